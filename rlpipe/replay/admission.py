"""Admission control: how many groups may start, so that staleness is bounded by construction.

Groups that are in flight or wait to be trained never exceed ``(max_staleness + 1) * groups_per_step``. Together with
the deadlines of ``rlpipe.replay.buffer``, this ensures that no group is trained more than ``max_staleness`` versions
after the one that its sampling began with. With ``max_staleness=0``, a step's groups start only when the step before
it is published, which is synchronous training.
"""

from __future__ import annotations


class Admission:
    """Counter of a run's groups from admission to training."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        num_steps: int,
        first_step: int = 0,
        num_waiting: int = 0,
    ) -> None:
        """Start at ``first_step``; ``num_waiting`` groups already have a place in it or a later step."""
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._num_steps = num_steps
        self._version = first_step
        self._admitted = first_step * groups_per_step + num_waiting

    @property
    def version(self) -> int:
        """The policy version that every engine serves; version v has been trained for v steps."""
        return self._version

    @property
    def capacity(self) -> int:
        """Number of groups that may be admitted now."""
        steps_open = min(self._version + self._max_staleness + 1, self._num_steps)
        return max(steps_open * self._groups_per_step - self._admitted, 0)

    def admit(self, num_groups: int) -> None:
        """Count groups as started; raise ``ValueError`` beyond the capacity."""
        if num_groups > self.capacity:
            raise ValueError(f"{num_groups} groups were admitted where {self.capacity} may be")
        self._admitted += num_groups

    def discard(self, num_groups: int) -> None:
        """Free the places of groups that will never be trained, so that others replace them."""
        self._admitted -= num_groups

    def publish(self, version: int) -> None:
        """Set the version that all engines serve now, which opens the steps up to ``version + max_staleness``."""
        self._version = max(self._version, version)

    def extend(self, num_steps: int) -> None:
        """Add ``num_steps`` steps after the last one."""
        self._num_steps += num_steps

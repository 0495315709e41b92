"""The replay buffer: slots that bound staleness, admission of groups, and prompts to sample again.

Groups that are in flight or wait to be trained never exceed ``(max_staleness + 1) * groups_per_step``. Together with
the deadlines of ``ReplayBuffer``, this ensures that no group is trained more than ``max_staleness`` versions
after the one that its sampling began with. With ``max_staleness=0``, a step's groups start only when the step before
it is published, which is synchronous training.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass

from rlpipe.types import RolloutGroup


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupTicket:
    """A started group, with the version that its sampling began with and its prompt's cursor."""

    group_id: int
    version: int
    epoch: int
    position: int
    prompt_id: int
    attempt: int = 0
    """Number of groups without reward variance that it replaces."""
    reroll: int = 0
    """Number of times that its prompt was rerolled."""


class ReplayBuffer:
    """Buffer of admitted groups until they are trained; a step takes those with the earliest deadlines.

    A group of version v must be trained by step v + ``max_staleness``. A step waits until it can be filled such that
    all remaining groups, finished or not, can still meet their deadlines: by any later step, no more groups may be
    due than the steps until then can take. This is checked on the number of groups of each version, because the
    check runs after every group.
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._admitted: dict[int, GroupTicket] = {}
        self._scored: dict[int, RolloutGroup] = {}
        self._num_admitted: Counter[int] = Counter()  # by version
        self._scored_ids: defaultdict[int, set[int]] = defaultdict(set)  # by version

    def admit(self, groups: list[GroupTicket]) -> None:
        self._admitted.update((group.group_id, group) for group in groups)
        self._num_admitted.update(group.version for group in groups)

    def add(self, group: RolloutGroup) -> None:
        """Store a scored group; raise ``ValueError`` if it is not admitted, or is here already."""
        if group.group_id not in self._admitted:
            raise ValueError(f"group {group.group_id} was not admitted, or has been trained or discarded")
        if group.group_id in self._scored:
            raise ValueError(f"group {group.group_id} is in the buffer already")
        self._scored[group.group_id] = group
        self._scored_ids[self._admitted[group.group_id].version].add(group.group_id)

    def discard(self, group_id: int) -> None:
        """Remove a group that will never be trained, if it is here."""
        if group_id in self._admitted:
            self._remove(group_id)

    def take(self, step: int) -> list[RolloutGroup] | None:
        """Remove and return the groups of a step, in the order of their ids, or None while the step must wait."""
        if len(self._scored) < self._groups_per_step or not self._may_fill(step):
            return None
        chosen: list[int] = []
        for version in sorted(self._scored_ids):
            chosen += sorted(self._scored_ids[version])[: self._groups_per_step - len(chosen)]
        groups = [self._scored[group_id] for group_id in sorted(chosen)]
        for group_id in chosen:
            self._remove(group_id)
        return groups

    def holds(self, group_id: int) -> bool:
        """Return whether the group is scored and waits for a step."""
        return group_id in self._scored

    @property
    def pending(self) -> list[GroupTicket]:
        """Groups that are in flight or wait to be trained, in the order of their ids."""
        return [self._admitted[group_id] for group_id in sorted(self._admitted)]

    @property
    def num_scored(self) -> int:
        return len(self._scored)

    def _may_fill(self, step: int) -> bool:
        """Return whether, if the step takes the most urgent groups, the remaining ones can meet their deadlines."""
        num_to_choose, total_remaining = self._groups_per_step, 0
        for version in sorted(self._num_admitted):
            chosen = min(len(self._scored_ids[version]), num_to_choose)
            remaining = self._num_admitted[version] - chosen
            num_to_choose -= chosen
            total_remaining += remaining
            if remaining and total_remaining > (version + self._max_staleness - step) * self._groups_per_step:
                return False
        return True

    def _remove(self, group_id: int) -> None:
        version = self._admitted.pop(group_id).version
        self._num_admitted[version] -= 1
        self._scored.pop(group_id, None)
        self._scored_ids[version].discard(group_id)
        if not self._num_admitted[version]:
            del self._num_admitted[version], self._scored_ids[version]


class Admission:
    """Counter of a run's groups from admission to training."""

    def __init__(
        self, *, groups_per_step: int, max_staleness: int, num_steps: int, first_step: int = 0, num_waiting: int = 0
    ) -> None:
        """Start at ``first_step``; ``num_waiting`` groups already have a slot in it or a later step."""
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
            raise ValueError(f"{num_groups} groups were to be admitted, but the capacity is {self.capacity}")
        self._admitted += num_groups

    def discard(self, num_groups: int) -> None:
        """Free the slots of groups that will never be trained, so that others replace them."""
        self._admitted -= num_groups

    def publish(self, version: int) -> None:
        """Set the version that all engines serve now, which opens the steps up to ``version + max_staleness``."""
        self._version = max(self._version, version)

    def extend(self, num_steps: int) -> None:
        """Add ``num_steps`` steps after the last one."""
        self._num_steps += num_steps


class Rerolls:
    """Queue whose prompts come back from ``first_version`` on, at most ``per_step`` for each step up to a version.

    A version that is published after several steps stands for all of them.
    """

    def __init__(self, *, first_version: int, per_step: int) -> None:
        self._first_version, self._per_step = first_version, per_step
        self._waiting: deque[GroupTicket] = deque()
        self._version: int | None = None
        self._left = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[GroupTicket]:
        return iter(self._waiting)

    def add(self, zero_reward: GroupTicket) -> None:
        self._waiting.append(zero_reward)

    def take(self, version: int, at_most: int) -> list[GroupTicket]:
        """Remove and return up to ``at_most`` groups of earlier versions than ``version``, the oldest first."""
        if version != self._version:
            steps = 1 if self._version is None else max(version - self._version, 1)
            self._version, self._left = version, self._per_step * steps
        tickets: list[GroupTicket] = []
        while self._waiting and len(tickets) < at_most and self._left > 0:
            if version < self._first_version or version <= self._waiting[0].version:
                break
            tickets.append(self._waiting.popleft())
            self._left -= 1
        return tickets

"""Holds scored groups and decides which of them a step trains."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.types import RolloutGroup


@dataclass(kw_only=True, slots=True, frozen=True)
class Admitted:
    """A group that has been started: the version that its sampling began with, and its prompt's place."""

    group_id: int
    version: int
    epoch: int
    position: int
    prompt_id: int
    attempt: int = 0
    """How many groups without reward variance it replaces."""
    reroll: int = 0
    """How often its prompt has been put back."""


class ReplayBuffer:
    """Admitted groups until they are trained; a step takes those whose deadline comes first.

    A group of version v must be trained by step v + ``max_staleness``. A step waits until it can be filled such that
    all groups left behind, finished or not, can still meet their deadlines: for every later step there must be no
    more groups due by then than the steps until then can take.
    """

    def __init__(self, *, groups_per_step: int, max_staleness: int) -> None:
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._admitted: dict[int, Admitted] = {}
        self._scored: dict[int, RolloutGroup] = {}

    def admit(self, groups: list[Admitted]) -> None:
        self._admitted.update((group.group_id, group) for group in groups)

    def add(self, group: RolloutGroup) -> None:
        """Stores a scored group; raises ``ValueError`` if it was never admitted, or is here already."""
        if group.group_id not in self._admitted:
            raise ValueError(f"group {group.group_id} was not admitted, or has been trained or discarded")
        if group.group_id in self._scored:
            raise ValueError(f"group {group.group_id} is in the buffer already")
        self._scored[group.group_id] = group

    def discard(self, group_id: int) -> None:
        """Forgets a group that will never be trained."""
        self._admitted.pop(group_id, None)
        self._scored.pop(group_id, None)

    def take(self, step: int) -> list[RolloutGroup] | None:
        """Removes and returns the groups of a step, in the order of their ids; None while the step must wait."""
        chosen = sorted(self._scored, key=self._urgency)[: self._groups_per_step]
        if len(chosen) < self._groups_per_step or not self._feasible_without(set(chosen), step):
            return None
        for group_id in chosen:
            del self._admitted[group_id]
        return [self._scored.pop(group_id) for group_id in sorted(chosen)]

    def holds(self, group_id: int) -> bool:
        """Whether the group is scored and waits for a step."""
        return group_id in self._scored

    @property
    def pending(self) -> list[Admitted]:
        """The groups that are in flight or wait to be trained, in the order of their ids."""
        return [self._admitted[group_id] for group_id in sorted(self._admitted)]

    @property
    def num_scored(self) -> int:
        return len(self._scored)

    def _urgency(self, group_id: int) -> tuple[int, int]:
        return self._admitted[group_id].version, group_id

    def _feasible_without(self, chosen: set[int], step: int) -> bool:
        versions = sorted(group.version for group in self._admitted.values() if group.group_id not in chosen)
        due_within = (version + self._max_staleness - step for version in versions)
        return all(count <= steps * self._groups_per_step for count, steps in enumerate(due_within, start=1))

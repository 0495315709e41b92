"""Greedy completions beside the sampled ones of a group, on any engine, as ReMax compares with (arXiv:2310.10505)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace

from rlpipe.rollout.engine import Engine, WrappedEngine
from rlpipe.types import GroupRequest, RolloutGroup

FIRST_GREEDY_ID = 2**45
"""First request id for greedy completions; no group's id is in this range."""


class GreedyBaselineEngine(WrappedEngine):
    """An engine that also samples ``with_greedy`` requests; all other requests go to the wrapped engine unchanged.

    Such a request becomes two, for the group and for one completion at temperature 0, which is the last rollout of the
    group that comes back. The group fails if either of them does.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._next_id = FIRST_GREEDY_ID
        self._greedy: dict[int, int] = {}
        """Group ids by the request ids of their greedy completions."""
        self._due: Counter[int] = Counter()
        """Numbers of groups that have not come back, by group id; an engine may be given a group twice."""
        self._halves: dict[int, tuple[list[RolloutGroup], list[RolloutGroup]]] = {}
        """Sampled and greedy halves that wait for the other, by group id."""

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        added = []
        for request in requests:
            if request.with_greedy:
                self._greedy[self._next_id] = request.group_id
                self._due[request.group_id] += 1
                self._halves.setdefault(request.group_id, ([], []))
                greedy_request = replace(
                    request, group_id=self._next_id, group_size=1, temperature=0.0, with_greedy=False
                )
                added.append(greedy_request)
                self._next_id += 1
        self._engine.submit([*requests, *added])

    def cancel(self, group_ids: Collection[int]) -> None:
        greedy = {engine_id for engine_id, group_id in self._greedy.items() if group_id in group_ids}
        self._greedy = {engine_id: group_id for engine_id, group_id in self._greedy.items() if engine_id not in greedy}
        for group_id in group_ids:
            self._forget(group_id)
        self._engine.cancel({*group_ids, *greedy})

    def step(self) -> list[RolloutGroup]:
        finished = []
        for half in self._engine.step():
            group_id = self._greedy.pop(half.group_id, half.group_id)
            if group_id not in self._halves:
                finished.append(half)
                continue
            sampled, greedy = self._halves[group_id]
            (sampled if half.group_id == group_id else greedy).append(half)
            if sampled and greedy:
                finished.append(_joined(sampled.pop(0), greedy.pop(0)))
                self._due[group_id] -= 1
                if not self._due[group_id]:
                    self._forget(group_id)
        return finished

    def _forget(self, group_id: int) -> None:
        self._halves.pop(group_id, None)
        self._due.pop(group_id, None)


def _joined(sampled: RolloutGroup, greedy: RolloutGroup) -> RolloutGroup:
    """Return the group with the greedy completion as its last rollout, or the failed group."""
    generate_s = max(sampled.generate_s, greedy.generate_s)
    failure = sampled.failure or (greedy.failure and f"greedy completion: {greedy.failure}")
    if failure:
        return replace(sampled, rollouts=[], failure=failure, generate_s=generate_s)
    (rollout,) = greedy.rollouts
    last = replace(rollout, group_id=sampled.group_id, sample_index=len(sampled), is_greedy=True)
    return replace(sampled, rollouts=[*sampled.rollouts, last], generate_s=generate_s)

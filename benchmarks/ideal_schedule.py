"""The ideal time of a run in which only generation and training take time: the bound for random times."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

import numpy as np

from rlpipe.replay.buffer import Admission, GroupTicket, ReplayBuffer
from rlpipe.rollout.routing import Router
from rlpipe.types import GroupRequest, Prompt, RolloutGroup

PROMPT = Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(0, np.int32), prompt="", task={})


class IdealRun:
    """A simulated run with real admission, routing and deadlines; only engines and the learner advance its clock.

    An engine serves ``num_slots`` groups at one time, each for ``group_seconds(group_id)``; a step trains for
    ``train_s``.
    """

    def __init__(
        self,
        *,
        num_engines: int,
        num_slots: int,
        groups_per_step: int,
        max_staleness: int,
        num_steps: int,
        group_seconds: Callable[[int], float],
        train_s: float,
    ) -> None:
        self._num_steps, self._group_seconds, self._train_s = num_steps, group_seconds, train_s
        self._admission = Admission(groups_per_step=groups_per_step, max_staleness=max_staleness, num_steps=num_steps)
        self._buffer = ReplayBuffer(groups_per_step=groups_per_step, max_staleness=max_staleness)
        self._router = Router([str(index) for index in range(num_engines)])
        self._waiting: dict[str, deque[int]] = {engine: deque() for engine in self._router.outstanding}
        self._free = dict.fromkeys(self._waiting, num_slots)
        self._next_group_id = 0
        self._now = 0.0
        self._ends: list[tuple[float, int, str]] = []
        """Heap of the groups in generation, as (end, id, engine), and of the step in training, as (end, -1, "")."""

    def run(self) -> list[float]:
        """Return when each step ends, in seconds from the start."""
        ended: list[float] = []
        training = False
        self._admit()
        while len(ended) < self._num_steps:
            if not training and self._buffer.take(len(ended)) is not None:
                training = True
                heapq.heappush(self._ends, (self._now + self._train_s, -1, ""))
            self._now, group_id, engine = heapq.heappop(self._ends)
            if engine:
                self._router.finish(group_id)
                self._buffer.add(RolloutGroup(group_id=group_id, prompt=PROMPT, rollouts=[]))
                self._free[engine] += 1
                self._start(engine)
            else:
                training = False
                ended.append(self._now)
                self._admission.publish(len(ended))
                self._admit()
        return ended

    def _admit(self) -> None:
        version, count = self._admission.version, self._admission.capacity
        ids = range(self._next_group_id, self._next_group_id + count)
        self._next_group_id += count
        self._admission.admit(count)
        self._buffer.admit([GroupTicket(group_id=i, version=version, epoch=0, position=i, prompt_id=i) for i in ids])
        for engine, share in self._router.assign([_request(group_id) for group_id in ids]).items():
            self._waiting[engine].extend(request.group_id for request in share)
            self._start(engine)

    def _start(self, engine: str) -> None:
        while self._free[engine] and self._waiting[engine]:
            group_id = self._waiting[engine].popleft()
            heapq.heappush(self._ends, (self._now + self._group_seconds(group_id), group_id, engine))
            self._free[engine] -= 1


def _request(group_id: int) -> GroupRequest:
    return GroupRequest(group_id=group_id, prompt=PROMPT, group_size=1, max_tokens=1, temperature=1.0, seed=0)

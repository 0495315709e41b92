"""A queue of prompts whose whole group earned nothing, to be put back once the policy has had time to learn."""

from __future__ import annotations

from collections import deque

from rlpipe.replay.buffer import Admitted


class Rerolls:
    """Queue whose prompts come back ``after_steps`` versions after sampling, at most ``per_step`` per version."""

    def __init__(self, *, after_steps: int, per_step: int) -> None:
        self._after_steps, self._per_step = after_steps, per_step
        self._waiting: deque[Admitted] = deque()
        self._version = self._taken = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, fruitless: Admitted) -> None:
        self._waiting.append(fruitless)

    def take(self, version: int, at_most: int) -> list[Admitted]:
        """Remove and return up to ``at_most`` groups that are due at ``version``, the oldest first."""
        if version != self._version:
            self._version, self._taken = version, 0
        due: list[Admitted] = []
        while self._waiting and len(due) < at_most and self._taken < self._per_step:
            if self._waiting[0].version + self._after_steps > version:
                break
            due.append(self._waiting.popleft())
            self._taken += 1
        return due

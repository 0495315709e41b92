"""Virtual time: what is due is called in the order of its time, and levels are watched over it."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Clock:
    """Calls at their time; of calls at one time, the one that was asked for first comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = count()
        self._stopped = False

    def call_at(self, when: float, call: Callable[[Any], None], argument: Any) -> None:
        heappush(self._due, (when, next(self._numbers), call, argument))

    def run(self, until: float) -> None:
        """Goes on until ``until``, until nothing is due any more, or until ``stop``."""
        due = self._due
        while due and due[0][0] <= until and not self._stopped:
            self.now, _, call, argument = heappop(due)
            call(argument)

    def stop(self) -> None:
        self._stopped = True


class Level:
    """A number that changes over time, its highest value, and its integral."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._value, self._since, self._integral = 0, 0.0, 0.0
        self.highest = 0

    def change(self, difference: int) -> None:
        now = self._clock.now
        self._integral += self._value * (now - self._since)
        self._since = now
        self._value += difference
        if self._value > self.highest:
            self.highest = self._value

    @property
    def integral(self) -> float:
        """Over the time until now."""
        return self._integral + self._value * (self._clock.now - self._since)

"""Virtual time: a clock that makes calls in the order of their times, and levels that are integrated over time."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from typing import Any


class Clock:
    """Clock that makes calls at their times; of calls at the same time, the one requested first comes first."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._numbers = count()
        self._stopped = False

    def call_at(self, when: float, call: Callable[[Any], None], argument: Any) -> None:
        heappush(self._due, (when, next(self._numbers), call, argument))

    def run(self, until: float) -> None:
        """Make the calls that are due up to ``until``, until none is left or ``stop`` is called."""
        due = self._due
        while due and due[0][0] <= until and not self._stopped:
            self.now, _, call, argument = heappop(due)
            call(argument)

    def stop(self) -> None:
        self._stopped = True


class Level:
    """Number that changes over time, with its highest value and its integral."""

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
        """Integral over the time until now."""
        return self._integral + self._value * (self._clock.now - self._since)

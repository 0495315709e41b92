"""Metrics of a run as one series a metric, read on from where the last look ended."""

from __future__ import annotations

import bisect
import math
import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpipe.tracking.jsonl import rows_after

BATCH = 500
NUMBERS = (int, float)
"""Types of a metric's values; a union of them would be made again for each value."""
LARGEST_STEP, LARGEST = 2**62, 1e308
"""Numbers beyond which a line was not written by a run, and has no place in an array."""
MAX_POINTS = 3000
"""Points of a series that are sent; of more, means of neighbours are."""


@dataclass(slots=True)
class _Series:
    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class MetricSeries:
    """The series of a ``metrics.jsonl``, which a run may append to, or cut when it is resumed.

    One thread may update it while others read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._turn = threading.RLock()
        self._forget()

    def _forget(self) -> None:
        self._series: dict[str, _Series] = {}
        self._ends = _Series()
        """Times of the ends of steps; an evaluation may be of an older version."""
        self._offset, self._inode = 0, -1
        self.last_step = 0

    @property
    def names(self) -> list[str]:
        with self._turn:
            return sorted(name for name in self._series if name != "time")

    def update(self) -> None:
        """Read the rows that are new; all of them if the file was cut or replaced."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return
        if status.st_ino != self._inode or status.st_size < self._offset:
            with self._turn:
                self._forget()
            self._inode = status.st_ino
        while True:
            rows, self._offset = rows_after(self._path, self._offset, BATCH)
            with self._turn:
                for row in rows:
                    self._add(row)
            if len(rows) < BATCH:
                return

    def _add(self, row: dict[str, Any]) -> None:
        step = row.get("step")
        if not isinstance(step, int) or abs(step) > LARGEST_STEP:  # no run has written this line
            return
        if "loss" in row and isinstance(time := row.get("time"), int | float):
            self._ends.steps.append(step)
            self._ends.values.append(time)
        for name, value in row.items():
            if value is None:  # which stands for a value that is not finite
                value = math.nan
            if name != "step" and isinstance(value, NUMBERS) and not LARGEST < abs(value) < math.inf:
                series = self._series.get(name)
                if series is None:
                    series = self._series[name] = _Series()
                series.steps.append(step)
                series.values.append(value)
        self.last_step = max(self.last_step, step)

    def latest(self, name: str) -> float | None:
        """Return the newest value of a metric; None if it is not finite."""
        with self._turn:
            series = self._series.get(name)
            return None if series is None else _finite(series.values[-1])

    def get(self, names: Iterable[str], most_points: int = MAX_POINTS) -> dict[str, dict[str, Any]]:
        """Return ``steps`` and ``values`` of those metrics that the run has, and how many steps each point stands for.

        Not all are equally dense: evaluations are rare.
        """
        with self._turn:
            return {name: _thinned(self._series[name], most_points) for name in names if name in self._series}

    def step_at(self, moment: float) -> int:
        """Return the step during which something happened at a moment, in seconds since 1970."""
        with self._turn:
            series = self._ends if self._ends.steps else self._series.get("time")
            if series is None:
                return 0
            index = bisect.bisect_left(series.values, moment)
            return series.steps[min(index, len(series.steps) - 1)]


def _thinned(series: _Series, most_points: int) -> dict[str, Any]:
    size = math.ceil(len(series.steps) / most_points)
    if size <= 1:
        return {"steps": [*series.steps], "values": [*map(_finite, series.values)], "stands_for": size}
    steps, values = [], []
    for start in range(0, len(series.steps), size):
        window = [x for x in series.values[start : start + size] if math.isfinite(x)]
        steps.append(series.steps[min(start + size, len(series.steps)) - 1])
        values.append(sum(window) / len(window) if window else None)
    return {"steps": steps, "values": values, "stands_for": size}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

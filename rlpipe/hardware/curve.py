"""How long ranks take to exchange bytes, by how many there are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(kw_only=True, slots=True, frozen=True)
class Curve:
    """Seconds of one collective, for some numbers of bytes that a rank sends to others, or receives from them.

    Between those it is a line. Below the first it takes as long as for that, as nothing is faster than the start of a
    collective; beyond the last, as many bytes a second. Raises ``ValueError`` for what is no such curve.
    """

    num_bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.num_bytes or len(self.num_bytes) != len(self.seconds):
            raise ValueError(f"a curve of {len(self.num_bytes)} sizes has {len(self.seconds)} times")
        edges = (*self.num_bytes, math.inf)
        if not (edges[0] >= 0 and edges[-2] > 0 and all(first < second for first, second in pairwise(edges))):
            raise ValueError(f"the sizes of a curve are {self.num_bytes}, and must be 0 or more, and go up")
        if not all(0 <= seconds < math.inf for seconds in self.seconds):
            raise ValueError(f"the times of a curve are {self.seconds}, and must be 0 or more, and finite")

    @classmethod
    def at_rate(cls, rate: float) -> Curve:
        """Of so many bytes a second, whatever their number; raises ``ValueError`` where that is not above 0."""
        if not rate > 0:
            raise ValueError(f"the rate is {rate}, and must be above 0")
        return cls(num_bytes=(0.0, 1.0), seconds=(0.0, 1 / rate))

    def time(self, num_bytes: float) -> float:
        """Seconds; no bytes take none."""
        if num_bytes == 0:
            return 0.0
        if num_bytes > self.num_bytes[-1]:
            return num_bytes / self.num_bytes[-1] * self.seconds[-1]
        return float(np.interp(num_bytes, self.num_bytes, self.seconds))

    def rate(self, num_bytes: float) -> float:
        """Bytes a second where there are so many."""
        seconds = self.time(num_bytes)
        return num_bytes / seconds if seconds else math.inf


@dataclass(kw_only=True, slots=True, frozen=True)
class Link:
    """Between the ranks of a machine. For N ranks and a tensor of B bytes, a gather and a scattered sum have each rank
    receive B (N - 1) / N bytes; a sum that all are given twice that."""

    all_gather: Curve
    reduce_scatter: Curve
    all_reduce: Curve

    @classmethod
    def at_rate(cls, rate: float) -> Link:
        """All at so many bytes a second."""
        curve = Curve.at_rate(rate)
        return cls(all_gather=curve, reduce_scatter=curve, all_reduce=curve)

"""Times of collectives between ranks, by the number of bytes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(kw_only=True, slots=True, frozen=True)
class Curve:
    """Seconds of one collective, by the number of bytes that a rank sends to or receives from the others.

    Linear between the measured sizes. Below the first size the time is constant, because starting the collective
    dominates; above the last one the rate is constant. Raises ``ValueError`` if the values are no such curve.
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
        """Return a curve of constant ``rate`` in bytes per second; raise ``ValueError`` if that is not above 0."""
        if not rate > 0:
            raise ValueError(f"the rate is {rate}, and must be above 0")
        return cls(num_bytes=(0.0, 1.0), seconds=(0.0, 1 / rate))

    def time(self, num_bytes: float) -> float:
        """Return the seconds for ``num_bytes``; 0 for 0 bytes."""
        if num_bytes == 0:
            return 0.0
        if num_bytes > self.num_bytes[-1]:
            return num_bytes / self.num_bytes[-1] * self.seconds[-1]
        return float(np.interp(num_bytes, self.num_bytes, self.seconds))

    def rate(self, num_bytes: float) -> float:
        """Return the bytes per second at a size of ``num_bytes``."""
        seconds = self.time(num_bytes)
        return num_bytes / seconds if seconds else math.inf


@dataclass(kw_only=True, slots=True, frozen=True)
class Link:
    """The collectives between the ranks of a machine.

    With N ranks and a tensor of B bytes, each rank receives B (N - 1) / N bytes in an all-gather or a reduce-scatter,
    and twice that in an all-reduce.
    """

    all_gather: Curve
    reduce_scatter: Curve
    all_reduce: Curve

    @classmethod
    def at_rate(cls, rate: float) -> Link:
        """Return a link on which all collectives have this constant rate in bytes per second."""
        curve = Curve.at_rate(rate)
        return cls(all_gather=curve, reduce_scatter=curve, all_reduce=curve)

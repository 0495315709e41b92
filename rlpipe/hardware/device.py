"""A device as a plan sees it: memory, bandwidths, and rates of arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Literal

import numpy as np

from rlpipe.errors import ConfigError
from rlpipe.hardware.dtypes import FASTER, NARROW, WIDE


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
            raise ValueError(f"the sizes of a curve are {self.num_bytes}, and must be 0 or more and increasing")
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


ADAM_ACCESSES = 7
"""Memory accesses per element: weight, both moments and gradient are read; all but the gradient are written."""
STATE_DTYPES = ("float32", "bfloat16")
"""Dtypes that AdamW's weights and moments, and gradient sums, may have."""


def adding(part: str, total: str) -> str:
    """Return the name of the rate at which tensors of dtype ``part`` are added to sums of dtype ``total``."""
    return f"{part} to {total}"


ADDINGS = tuple(adding(part, total) for total in STATE_DTYPES for part in STATE_DTYPES)


@dataclass(kw_only=True, slots=True, frozen=True)
class Device:
    """A device and its host, with the rates that programs reach, per second, rather than data sheet peaks.

    Raises ``ConfigError`` if a rate is not above 0 and finite.
    """

    name: str
    kind: Literal["cuda", "cpu"] = "cuda"
    memory_bytes: int
    """Total memory of the device as torch reports it; for a CPU, the machine's memory."""
    matmul_flops: Mapping[str, float] = field(hash=False)
    """FLOP/s of dense matrix products, by the config's name of the dtype."""
    memory_bandwidth: float
    """Bytes per second between the device and its own memory."""
    host_to_device: float
    """Bytes per second from the host to the device; ``device_to_host`` is the reverse."""
    device_to_host: float
    both: float
    """Bytes per second in each direction while both are busy."""
    link: Link | None
    """Collectives between the ranks of a machine; None: not known, and assumed to go through PCIe and the host."""
    device_adam: Mapping[str, float] = field(hash=False)
    """Elements per second, by the dtype of weights, gradients and moments."""
    host_adam: Mapping[str, float] = field(hash=False)
    """Elements per second on the host; this and all following rates are of all ranks of a machine together."""
    host_adding: Mapping[str, float] = field(hash=False)
    """Gradient elements per second that are added to their sum, by ``adding``."""
    host_bandwidth: float
    """Bytes per second that are read and written while the host copies within its memory."""
    host_memory_bytes: int
    hardware: str | None = None
    """The driver's name of the GPU, or the machine's name of its processor; None in the table."""
    measured_at: str | None = None
    """Date of the measurement, such as 2026-11-22; None if the rates are assumed."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            for name, rate in _rates_of(entry.name, getattr(self, entry.name)).items():
                if not 0 < rate < math.inf:
                    raise ConfigError(f"device {self.name}: {name} is {rate}, and must be above 0 and finite")

    @property
    def source(self) -> str:
        """The origin of the rates, as text for reports."""
        return "assumed from data sheets" if self.measured_at is None else f"measured {self.measured_at}"

    @property
    def exchange(self) -> Link:
        """Collectives between ranks: over the link, or at the PCIe rate of both directions if no link is known."""
        return Link.at_rate(self.both) if self.link is None else self.link

    def flops(self, dtype: str) -> float:
        """Return the FLOP/s of dense matrix products; raise ``ConfigError`` if the dtype's rate is not known."""
        if dtype not in self.matmul_flops:
            supported = ", ".join(self.matmul_flops)
            raise ConfigError(f"model.dtype={dtype}: device {self.name} has no rate for it; set one of {supported}")
        return self.matmul_flops[dtype]

    def auto_dtype(self, *, on_gpu: bool = True) -> str:
        """Return the dtype that ``dtype: auto`` stands for on this device.

        bfloat16 if it is faster, on a CPU by at least the factor ``FASTER``. The CPUs beside a GPU are not measured,
        and assumed to compute in float32.
        """
        if self.kind == "cuda" and not on_gpu:
            return WIDE
        speedup = self.matmul_flops.get(NARROW, 0) / self.matmul_flops[WIDE]
        return NARROW if (speedup > 1 if self.kind == "cuda" else speedup >= FASTER) else WIDE


def _rates_of(name: str, value: object) -> dict[str, float]:
    """Return all numbers of a field by their names; for a link, the rates of its largest tensors."""
    if isinstance(value, Mapping):
        return {f"{name}.{key}": rate for key, rate in value.items()}
    if isinstance(value, Link):
        curves = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return {f"{name}.{key}": curve.rate(curve.num_bytes[-1]) for key, curve in curves.items()}
    return {name: value} if isinstance(value, int | float) else {}

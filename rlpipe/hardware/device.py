"""A device, the machine around it, and the rates that a program reaches on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from rlpipe.errors import ConfigError
from rlpipe.hardware.curve import Link
from rlpipe.hardware.dtypes import FASTER, NARROW, WIDE

ADAM_ACCESSES = 7
"""Of an element: weight, both moments and gradient are read; all but the gradient are written."""
STATE_DTYPES = ("float32", "bfloat16")
"""In which AdamW's weights and moments may be, and sums of gradients."""


def adding(part: str, total: str) -> str:
    """The name of a rate: of tensors in the dtype ``part`` that are added to such in ``total``."""
    return f"{part} to {total}"


ADDINGS = tuple(adding(part, total) for total in STATE_DTYPES for part in STATE_DTYPES)


@dataclass(kw_only=True, slots=True, frozen=True)
class Device:
    """Rates are what programs reach, per second, not the peaks of data sheets. Raises ``ConfigError`` if one is not
    above 0 and finite."""

    name: str
    kind: Literal["cuda", "cpu"] = "cuda"
    memory_bytes: int
    """What torch calls the device's total memory; a CPU's is the machine's."""
    matmul_flops: Mapping[str, float] = field(hash=False)
    """FLOP of dense matrix products by the config's name of the dtype."""
    memory_bandwidth: float
    """Bytes between the device and its own memory."""
    host_to_device: float
    """Bytes."""
    device_to_host: float
    both: float
    """Bytes in each direction while both are busy."""
    link: Link | None
    """Between the ranks of a machine; None: it is not known, and they are taken to exchange through PCIe and the
    host."""
    device_adam: Mapping[str, float] = field(hash=False)
    """Elements by the dtype of weights, gradients and moments."""
    host_adam: Mapping[str, float] = field(hash=False)
    """The same, of all ranks of a machine together, as all that follows."""
    host_adding: Mapping[str, float] = field(hash=False)
    """Elements of gradients that are added to their sum, by ``adding``."""
    host_bandwidth: float
    """Bytes that are read and written while the host copies within its memory."""
    host_memory_bytes: int
    hardware: str | None = None
    """What the driver calls the GPU, or the machine its processor; None in the table."""
    measured_at: str | None = None
    """The day, as 2026-11-22; None where the rates are assumed."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            for name, rate in _rates_of(entry.name, getattr(self, entry.name)).items():
                if not 0 < rate < math.inf:
                    raise ConfigError(f"device {self.name}: {name} is {rate}, and must be above 0 and finite")

    @property
    def source(self) -> str:
        """Where the rates come from."""
        return "assumed from data sheets" if self.measured_at is None else f"measured {self.measured_at}"

    @property
    def exchange(self) -> Link:
        """Between ranks: over the link, or as both directions of PCIe allow."""
        return Link.at_rate(self.both) if self.link is None else self.link

    def flops(self, dtype: str) -> float:
        """FLOP a second of dense matrix products; ``ConfigError`` for a dtype whose rate is not known."""
        if dtype not in self.matmul_flops:
            known = ", ".join(self.matmul_flops)
            raise ConfigError(f"model.dtype={dtype}: device {self.name} has no rate for it; set one of {known}")
        return self.matmul_flops[dtype]

    def auto_dtype(self, *, on_gpu: bool = True) -> str:
        """What ``dtype: auto`` is there: bfloat16 where it is faster, on a CPU by so much as a run asks for. Nothing is
        known of the processors beside a GPU, which are taken to compute in float32."""
        if self.kind == "cuda" and not on_gpu:
            return WIDE
        speedup = self.matmul_flops.get(NARROW, 0) / self.matmul_flops[WIDE]
        return NARROW if (speedup > 1 if self.kind == "cuda" else speedup >= FASTER) else WIDE


def _rates_of(name: str, value: object) -> dict[str, float]:
    """All numbers of a field, by their names; of a link those of its largest tensors."""
    if isinstance(value, Mapping):
        return {f"{name}.{key}": rate for key, rate in value.items()}
    if isinstance(value, Link):
        curves = {entry.name: getattr(value, entry.name) for entry in fields(value)}
        return {f"{name}.{key}": curve.rate(curve.num_bytes[-1]) for key, curve in curves.items()}
    return {name: value} if isinstance(value, int | float) else {}

"""A device, the machine around it, and the rates that a program reaches on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Literal

from rlpipe.errors import ConfigError

BYTES_PER_ADAM_STEP = 28
"""What an element moves in float32: weight, both moments and gradient are read; all but the gradient are written."""


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
    link: float | None
    """Bytes that a rank receives from the others of its machine in a gather, or sends in a reduction; None: there is no
    figure, and ranks are taken to exchange through PCIe and the host."""
    device_adam: float
    """Elements."""
    host_adam: float
    """Elements, of all ranks of a machine together."""
    host_memory_bytes: int
    """Of a machine."""
    hardware: str | None = None
    """What the driver calls the GPU, or the machine its processor; None in the table."""
    measured_at: str | None = None
    """The day, as 2026-11-22; None where the rates are assumed."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            rates = {f"{entry.name}.{key}": rate for key, rate in value.items()} if isinstance(value, Mapping) else {}
            for name, rate in (rates or {entry.name: value}).items():
                if isinstance(rate, int | float) and not 0 < rate < math.inf:
                    raise ConfigError(f"device {self.name}: {name} is {rate}, and must be above 0 and finite")

    @property
    def source(self) -> str:
        """Where the rates come from."""
        return "assumed from data sheets" if self.measured_at is None else f"measured {self.measured_at}"

    @property
    def exchange(self) -> float:
        """Bytes a second that a rank receives from others: over the link, or as both directions of PCIe allow."""
        return self.both if self.link is None else self.link

    def flops(self, dtype: str) -> float:
        """FLOP a second of dense matrix products; ``ConfigError`` for a dtype whose rate is not known."""
        if dtype not in self.matmul_flops:
            known = ", ".join(self.matmul_flops)
            raise ConfigError(f"model.dtype={dtype}: device {self.name} has no rate for it; set one of {known}")
        return self.matmul_flops[dtype]

"""The dtypes that a device computes in, and the choice of ``dtype: auto``; does not import torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

AUTO = "auto"
WIDE, NARROW = "float32", "bfloat16"
"""The dtypes that ``auto`` chooses from."""
FASTER = 1.3
"""Speedup over float32 that a CPU must reach in bfloat16 for ``auto`` to choose it, because it is less exact."""
CPU_INFO = Path("/proc/cpuinfo")
_SWITCHES = (
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "ATEN_CPU_CAPABILITY",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
)
"""Variables that choose the instructions of oneDNN, torch and MKL, and thereby the speed of each dtype."""
_FIRST_CAPABILITY = {"bfloat16": (8, 0), "float16": (7, 0)}
"""CUDA compute capability from which tensor cores multiply in a dtype; below it, torch emulates bfloat16."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DeviceTypes:
    """The dtypes that one device computes in, in addition to float32."""

    device: str
    """Name of the device, for messages."""
    narrow: frozenset[str] | None = None
    """Narrow types (bfloat16, float16) with tensor cores on a GPU; None for a CPU, which is measured instead."""
    switches: Sequence[str] = ()
    """Settings that choose a CPU's instructions, such as ``ONEDNN_MAX_CPU_ISA=AVX2``."""
    rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Measured FLOP/s by dtype; empty if not measured."""

    def is_slow(self, dtype: str) -> bool:
        """Return whether float32 is faster on this device."""
        if dtype == WIDE:
            return False
        return self._speedup(dtype) < 1 if self.narrow is None else dtype not in self.narrow

    @property
    def auto(self) -> str:
        if self.narrow is None:
            return NARROW if self._speedup(NARROW) >= FASTER else WIDE
        return WIDE if self.is_slow(NARROW) else NARROW

    def describe(self, dtype: str) -> str:
        """Return a clause that says how the device computes in ``dtype``."""
        setting = f" with {', '.join(self.switches)}" if self.switches else ""
        if self.narrow is not None:
            verb = "computes in" if dtype in self.narrow else "has no instructions for"
            return f"{self.device} {verb} {dtype}"
        if dtype not in self.rates:
            return f"{self.device} does not multiply in {dtype}{setting}"
        rates = " and ".join(f"{_giga(self.rates[name])} GFLOP/s in {name}" for name in (WIDE, dtype))
        return f"{self.device} reaches {rates}{setting}, {self._speedup(dtype):.2g} times as fast"

    def cost(self, dtype: str) -> str:
        """Return a clause that says what a slow dtype costs."""
        if dtype not in self.rates or WIDE not in self.rates:
            return self.describe(dtype)
        slowdown = self.rates[WIDE] / self.rates[dtype]
        return f"{self.device} takes {slowdown:.2g} times as long for a matrix product as in {WIDE}"

    def _speedup(self, dtype: str) -> float:
        """Return the speed relative to float32; 0 for a dtype that was not measured or can't be multiplied in."""
        return self.rates[dtype] / self.rates[WIDE] if dtype in self.rates else 0.0


def _giga(rate: float) -> str:
    return f"{rate / 1e9:,.0f}" if rate >= 1e10 else f"{rate / 1e9:.2g}"


@dataclass(kw_only=True, slots=True, frozen=True)
class DtypeChoice:
    """A chosen dtype, with a message for the user."""

    dtype: str
    line: str | None
    """Message for the user; None if the dtype was asked for and is not slow."""


def choose_dtype(
    asked: str,
    devices: Sequence[DeviceTypes],
    *,
    option: str = "model.dtype",
    fix: str = f"{AUTO} chooses {WIDE}",
    begun: str | None = None,
) -> DtypeChoice:
    """Choose one dtype for all ``devices``: the one asked for, or for ``auto`` bfloat16 if it is best on all of them.

    ``begun`` is the dtype of a resumed run so far; ``auto`` keeps it. ``fix`` says what to do about a slow one.
    """
    assert devices, "somebody computes"
    if asked != AUTO:
        slow = next((entry for entry in devices if entry.is_slow(asked)), None)
        line = None if slow is None else f"{option}={asked} is slow here: {slow.cost(asked)}; {fix}"
        return DtypeChoice(dtype=asked, line=line)
    wide_device = next((entry for entry in devices if entry.auto == WIDE), None)
    decisive = devices[0] if wide_device is None else wide_device
    if begun is None or begun == decisive.auto:
        return DtypeChoice(
            dtype=decisive.auto, line=f"{option}={AUTO}: {decisive.auto}, because {decisive.describe(NARROW)}"
        )
    slow = next((entry for entry in devices if entry.is_slow(begun)), None)
    reason = decisive.describe(NARROW) if slow is None else slow.cost(begun)
    return DtypeChoice(dtype=begun, line=f"{option}={AUTO}: {begun}, because the run began with it, although {reason}")


def gpu_types(name: str, capability: tuple[int, int]) -> DeviceTypes:
    """Return the dtypes of an NVIDIA GPU."""
    return DeviceTypes(
        device=f"{name} (compute capability {capability[0]}.{capability[1]})",
        narrow=frozenset(dtype for dtype, first in _FIRST_CAPABILITY.items() if capability >= first),
    )


def rocm_types(name: str) -> DeviceTypes:
    """Return the dtypes of an AMD GPU; every GPU that ROCm supports has both."""
    return DeviceTypes(device=name, narrow=frozenset(_FIRST_CAPABILITY))


def cpu_switches(environment: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the environment's settings that choose the CPU's instructions, as ``NAME=VALUE``."""
    return tuple(f"{name}={environment[name].upper()}" for name in _SWITCHES if environment.get(name))


def cpu_name(cpu_info: Path | None = None) -> str:
    """Return the machine's name of its processor."""
    return _read_cpu(CPU_INFO if cpu_info is None else cpu_info).get("model name", platform.machine())


def _read_cpu(cpu_info: Path) -> dict[str, str]:
    """Return Linux's fields for the first core; empty elsewhere."""
    try:
        first = cpu_info.read_text().strip().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}

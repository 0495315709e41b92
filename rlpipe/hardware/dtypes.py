"""Which types a device has matrix instructions for, and what ``dtype: auto`` stands for there; needs no torch."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

AUTO = "auto"
WIDE, NARROW = "float32", "bfloat16"
"""What ``auto`` chooses from."""
CPU_INFO = Path("/proc/cpuinfo")
_FLAGS = {"bfloat16": {"avx512_bf16", "amx_bf16", "bf16"}, "float16": {"avx512_fp16", "amx_fp16"}}
"""Linux's names of the instructions, the last of ARM. AVX-512 alone has none: oneDNN then converts to float32 and back,
in several times the time of float32."""
_SWITCHES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""oneDNN's, which multiplies for torch: the newest instructions that it may use. The first that is set counts."""
_WITHOUT_BFLOAT16 = {"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI"}
_WITHOUT = {"bfloat16": _WITHOUT_BFLOAT16, "float16": _WITHOUT_BFLOAT16 | {"AVX512_CORE_BF16"}}
_FIRST_CAPABILITY = {"bfloat16": (8, 0), "float16": (7, 0)}
"""CUDA's compute capability from which on tensor cores multiply in a type; below, torch emulates bfloat16."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DeviceTypes:
    """What one device computes in beside float32, in which every device does."""

    device: str
    """Its name, as in a sentence."""
    narrow: frozenset[str]
    """Of bfloat16 and float16, those that it has matrix instructions for."""
    switch: str = ""
    """The setting that keeps torch from them, if any does, such as ``ONEDNN_MAX_CPU_ISA=AVX2``."""
    slowdown: float | None = None
    """Times as long as in float32 that a product takes in the type that was asked for; None: nobody measured it."""

    def is_slow(self, dtype: str) -> bool:
        return dtype != WIDE and dtype not in self.narrow

    @property
    def auto(self) -> str:
        return WIDE if self.is_slow(NARROW) else NARROW

    def describe(self, dtype: str) -> str:
        """Whether it computes in the type, as a clause."""
        if not self.is_slow(dtype):
            return f"{self.device} computes in {dtype}"
        return f"{self.device} has no instructions for {dtype}" + (f" under {self.switch}" if self.switch else "")


@dataclass(kw_only=True, slots=True, frozen=True)
class DtypeChoice:
    dtype: str
    line: str | None
    """What the user should read of it; None where the type was asked for, and is none that is slow."""


def choose_dtype(
    asked: str, devices: Sequence[DeviceTypes], *, option: str = "model.dtype", begun: str | None = None
) -> DtypeChoice:
    """One type for all ``devices``: the one that was asked for, or ``auto``'s, bfloat16 where all compute in it.

    ``begun`` is the type that a run which goes on has had so far; ``auto`` keeps it.
    """
    assert devices, "somebody computes"
    if asked != AUTO:
        slow = next((entry for entry in devices if entry.is_slow(asked)), None)
        line = None if slow is None else f"{option}={asked} is slow here: {_cost(slow, asked)}; {AUTO} takes {WIDE}"
        return DtypeChoice(dtype=asked, line=line)
    lacking = next((entry for entry in devices if entry.is_slow(NARROW)), None)
    decisive = devices[0] if lacking is None else lacking
    why = decisive.describe(NARROW)
    if begun is None or begun == decisive.auto:
        return DtypeChoice(dtype=decisive.auto, line=f"{option}={AUTO}: {decisive.auto}, as {why}")
    slow = next((entry for entry in devices if entry.is_slow(begun)), None)
    but = why if slow is None else _cost(slow, begun)
    return DtypeChoice(dtype=begun, line=f"{option}={AUTO}: {begun}, as the run began in it, though {but}")


def _cost(slow: DeviceTypes, dtype: str) -> str:
    times = "" if slow.slowdown is None else f", and products take {slow.slowdown:.2g} times as long as in {WIDE}"
    return slow.describe(dtype) + times


def cpu_types(environment: Mapping[str, str] = os.environ, cpu_info: Path | None = None) -> DeviceTypes:
    """Of the processors that this process runs on, as oneDNN's switches leave them."""
    entries = _read_cpu(CPU_INFO if cpu_info is None else cpu_info)
    flags = {*entries.get("flags", entries.get("Features", "")).split()}
    has = {dtype for dtype, names in _FLAGS.items() if flags & names}
    switch = next((name for name in _SWITCHES if environment.get(name)), "")
    level = environment.get(switch, "").upper()
    left = {dtype for dtype in has if level not in _WITHOUT[dtype]}
    return DeviceTypes(device=cpu_name(cpu_info), narrow=frozenset(left), switch=f"{switch}={level}" * (left != has))


def gpu_types(name: str, capability: tuple[int, int]) -> DeviceTypes:
    """Of an NVIDIA GPU."""
    return DeviceTypes(
        device=f"{name} (compute capability {capability[0]}.{capability[1]})",
        narrow=frozenset(dtype for dtype, first in _FIRST_CAPABILITY.items() if capability >= first),
    )


def device_types(device: torch.device) -> DeviceTypes:
    """Of a device of this process."""
    if device.type != "cuda":
        return cpu_types()
    import torch

    name = torch.cuda.get_device_name(device)
    if torch.version.hip:  # all that ROCm knows have both
        return DeviceTypes(device=name, narrow=frozenset(_FIRST_CAPABILITY))
    return gpu_types(name, torch.cuda.get_device_capability(device))


def cpu_name(cpu_info: Path | None = None) -> str:
    """What the machine calls its processor."""
    return _read_cpu(CPU_INFO if cpu_info is None else cpu_info).get("model name", platform.machine())


def _read_cpu(cpu_info: Path) -> dict[str, str]:
    """Linux's account of the first core; empty elsewhere."""
    try:
        first = cpu_info.read_text().strip().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}

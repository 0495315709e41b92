"""Peak memory of a block of code, on the CPU or a GPU."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.processes import status_bytes

RESET = Path("/proc/self/clear_refs")
RESET_PEAK = "5"
"""Command to the kernel to reset the peak of the resident set."""
MB = 1e6
MMAP_THRESHOLD, THRESHOLD_BYTES = -3, 2**16
"""glibc's number for the option, and its value here."""


def return_what_is_freed() -> None:
    """Have glibc return freed tensors at once; by default it keeps blocks below 32 MB, as small models have."""
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, THRESHOLD_BYTES)


@dataclass
class Peak:
    mb: float = 0.0
    """Peak above the memory before the block; set when the block ends."""


@contextmanager
def peak_memory(device: torch.device) -> Iterator[Peak]:
    """Measure the block: torch's allocations on a GPU, this process's resident set on the CPU."""
    peak = Peak()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield peak
        torch.cuda.synchronize()
        peak.mb = (torch.cuda.max_memory_allocated() - before) / MB
        return
    before = status_bytes("VmRSS")
    RESET.write_text(RESET_PEAK)
    yield peak
    peak.mb = (status_bytes("VmHWM") - before) / MB

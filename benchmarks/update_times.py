"""Measurement of a model's updates: their seconds, and the memory of device and host."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch


@dataclass(kw_only=True, frozen=True)
class Measured:
    seconds: float
    """Median seconds of an update."""
    fastest_s: float
    slowest_s: float
    peak_bytes: int | None
    """Peak of torch's tensors on the device, after the warm-up; None on the CPU, where they are not counted."""
    reserved_bytes: int | None
    """Memory that torch's allocator reserved for them."""
    host_bytes: int
    """Largest resident set of the process since its start; on the CPU it includes the device's memory."""


def measure_updates(update: Callable[[int], object], device: torch.device, *, warmup: int, updates: int) -> Measured:
    """Measure updates; ``update`` gets the number of each, and may leave work on the host to the next one."""
    for number in range(warmup):
        update(number)
    settle(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = []
    for number in range(warmup, warmup + updates):
        begin = time.perf_counter()
        update(number)
        settle(device)
        seconds.append(time.perf_counter() - begin)
    on_gpu = device.type == "cuda"
    return Measured(
        seconds=median(seconds),
        fastest_s=min(seconds),
        slowest_s=max(seconds),
        peak_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
        reserved_bytes=torch.cuda.max_memory_reserved(device) if on_gpu else None,
        host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

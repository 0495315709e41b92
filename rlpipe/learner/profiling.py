"""Traces of single steps of a rank for chrome://tracing and Perfetto, and the memory that its process holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
from torch.profiler import ProfilerActivity, profile

from rlpipe.common.formatting import GIB

MAX_EVENTS = 200_000
"""Allocations and frees that a snapshot of a GPU's memory has at the most."""


class StepProfiler:
    """A profiler that writes ``step_<n>_rank_<r>.json.gz`` for ``steps``, counted from 1; memory snapshots on a GPU."""

    def __init__(self, folder: Path, steps: Collection[int], *, rank: int, device: torch.device) -> None:
        self._folder, self._steps, self._rank, self._device = folder, frozenset(steps), rank, device

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Trace what happens within the block if the step is one of those asked for."""
        if step not in self._steps:
            yield
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"step_{step:06}_rank_{self._rank}"
        on_gpu = self._device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        if on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MAX_EVENTS)
        try:
            with profile(activities=activities, record_shapes=True, profile_memory=True) as traced:
                yield
        finally:
            if on_gpu:
                torch.cuda.memory._dump_snapshot(f"{path}_memory.pickle")
                torch.cuda.memory._record_memory_history(enabled=None)
        traced.export_chrome_trace(f"{path}.json.gz")


def memory_metrics(device: torch.device) -> dict[str, float]:
    """Return GiB: on a GPU the most that was allocated and reserved since the last reset, else what is resident."""
    if device.type != "cuda":
        return {"memory/resident": psutil.Process().memory_info().rss / GIB}
    peaks = {
        "memory/allocated": torch.cuda.max_memory_allocated(device) / GIB,
        "memory/reserved": torch.cuda.max_memory_reserved(device) / GIB,
    }
    torch.cuda.reset_peak_memory_stats(device)
    return peaks

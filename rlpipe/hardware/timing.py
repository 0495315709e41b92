"""How fast a piece of work runs: the median of several repetitions, after one to warm up."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median

import torch

from rlpipe.hardware.cgroup import num_cores

REPETITIONS = 5
REPETITION_S = 0.05
"""What one repetition takes at least, by calls one after another: what starts the first of them then hardly counts."""
MAX_CALLS = 1000

Work = Callable[[], object]


def rate(amount: float, work: Work, device: torch.device, *, scale: float = 1.0) -> float:
    """What a second does of something of which one call of ``work`` does ``amount``; ``inf`` if no time passed.

    ``scale`` shortens the repetitions.
    """
    work()
    once_s = time_calls(work, 1, device)
    num_calls = min(MAX_CALLS, math.ceil(scale * REPETITION_S / once_s)) if once_s else MAX_CALLS
    seconds = median(time_calls(work, num_calls, device) for _ in range(REPETITIONS))
    return amount * num_calls / seconds if seconds else math.inf


def time_calls(work: Work, num_calls: int, device: torch.device) -> float:
    """Seconds of so many calls; on a GPU those between two events in its current stream, which wait for all of it."""
    if device.type != "cuda":
        begin = time.perf_counter()
        for _ in range(num_calls):
            work()
        return time.perf_counter() - begin
    with torch.cuda.device(device):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        first.record()
        for _ in range(num_calls):
            work()
        last.record()
        torch.cuda.synchronize()
        return first.elapsed_time(last) / 1e3


def all_cores() -> AbstractContextManager[None]:
    """Torch computes with as many threads as there are cores: a rank may have fewer, the machine's rates have all."""
    return threads(num_cores())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Torch computes with so many."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

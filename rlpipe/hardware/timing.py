"""The rate of a piece of work: the median of several repetitions, after a warm-up call."""

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
"""Least seconds of one repetition, in consecutive calls, so that the overhead of starting the first hardly counts."""
MAX_CALLS = 1000

Work = Callable[[], object]


def rate(amount: float, work: Work, device: torch.device, *, scale: float = 1.0) -> float:
    """Return the amount per second if each call of ``work`` does ``amount``; ``inf`` if no time passed.

    ``scale`` shortens the repetitions.
    """
    work()
    once_s = time_calls(work, 1, device)
    num_calls = min(MAX_CALLS, math.ceil(scale * REPETITION_S / once_s)) if once_s else MAX_CALLS
    seconds = median(time_calls(work, num_calls, device) for _ in range(REPETITIONS))
    return amount * num_calls / seconds if seconds else math.inf


def time_calls(work: Work, num_calls: int, device: torch.device) -> float:
    """Return the seconds of ``num_calls``; on a GPU, those between two events in its current stream."""
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
    """Have torch compute with a thread per core: a rank may have fewer, but the rates are the machine's."""
    return threads(num_cores())


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Have torch compute with ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)

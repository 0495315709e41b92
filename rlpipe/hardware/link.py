"""Measurements of the collectives between ranks, by tensor size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.hardware.curve import Curve, Link
from rlpipe.hardware.timing import time_calls

TENSOR_BYTES = (2**16, 2**20, 2**23, 2**25, 2**27)
"""Sizes of the whole tensor that ranks gather or sum: from a small layer's weights to a chunk of the model."""
REPETITIONS = 3
REPETITION_BYTES = 2**23
"""Bytes per repetition, in consecutive calls; a larger tensor takes a single call."""
MAX_CALLS = 16

Collective = Callable[[Tensor, Tensor], object]
"""Function of the whole tensor, which all ranks have, and this rank's part of it."""


def measure_link(device: torch.device, *, scale: float = 1.0) -> Link:
    """Measure the time of each collective that chunks need, in float32, in the default process group.

    All of its ranks must call this together; all get the times of the slowest rank. ``scale`` scales the tensors.
    """
    return Link(
        all_gather=_measure(lambda whole, part: dist.all_gather_single(whole, part), 1, device, scale),
        reduce_scatter=_measure(lambda whole, part: dist.reduce_scatter_single(part, whole), 1, device, scale),
        all_reduce=_measure(lambda whole, _: dist.all_reduce(whole), 2, device, scale),
    )


def _measure(collective: Collective, num_rounds: int, device: torch.device, scale: float) -> Curve:
    """Return the curve of a collective; ``num_rounds`` is how often every part goes around the ring."""
    sizes, times = [], []
    for tensor_bytes in TENSOR_BYTES:
        part = torch.zeros(max(1, int(scale * tensor_bytes) // 4 // dist.get_world_size()), device=device)
        whole = torch.zeros(len(part) * dist.get_world_size(), device=device)
        sizes.append(num_rounds * (whole.nbytes - part.nbytes))
        times.append(_slowest(partial(collective, whole, part), tensor_bytes, device))
    return Curve(num_bytes=tuple(sizes), seconds=tuple(times))


def _slowest(call: Callable[[], object], tensor_bytes: int, device: torch.device) -> float:
    """Return the seconds of one call on the slowest rank, as the median of several repetitions."""
    call()  # opens the connections
    num_calls = max(1, min(MAX_CALLS, REPETITION_BYTES // tensor_bytes))
    seconds = median(time_calls(call, num_calls, device) for _ in range(REPETITIONS)) / num_calls
    slowest = torch.tensor(seconds, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.item()

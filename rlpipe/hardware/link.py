"""Measures how fast ranks gather from each other."""

from __future__ import annotations

import math
from statistics import median

import torch
import torch.distributed as dist

from rlpipe.hardware.timing import REPETITIONS, time_calls

GATHERED_BYTES = 2**27
"""What a gather makes of the ranks' parts, as of a chunk of the model."""


def measure_link(device: torch.device, *, scale: float = 1.0) -> float:
    """Bytes a second that a rank receives from the others in an all-gather over the default process group.

    All of its ranks must call this together. Each is given the rate of the slowest.
    """
    num_ranks = dist.get_world_size()
    part = torch.ones(max(1, int(scale * GATHERED_BYTES) // num_ranks), dtype=torch.uint8, device=device)
    whole = torch.empty(num_ranks * part.nbytes, dtype=torch.uint8, device=device)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, part)

    gather()  # which opens the connections
    seconds = torch.tensor(median(time_calls(gather, 1, device) for _ in range(REPETITIONS)), device=device)
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    return (num_ranks - 1) * part.nbytes / seconds.item() if seconds > 0 else math.inf

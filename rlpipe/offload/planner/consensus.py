"""Has ranks decide alike: the first one for all, by what the one with least memory has free."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from rlpipe.hardware.rank0 import ask_first, num_ranks
from rlpipe.offload.planner.planner import Decision
from rlpipe.offload.planner.profile import Capacity
from rlpipe.offload.runtime.chunk_ranks import Alone, ChunkRanks, Replicated, Sharded


def ranks_of(num_parts: int) -> ChunkRanks:
    """The default process group, with every chunk in so many parts: one, or as many as there are ranks."""
    if num_ranks() == 1:
        return Alone()
    return Replicated() if num_parts == 1 else Sharded()


def agree(free: Capacity, decide: Callable[[Capacity], Decision]) -> Decision:
    """What ``decide`` says on the first rank, of the least that any has free; all ranks must call it.

    What it raises is raised on all of them, as ``ask_first`` does.
    """
    if num_ranks() > 1:
        every: list[Capacity] = [free] * num_ranks()
        dist.all_gather_object(every, free)
        free = Capacity(
            device_bytes=min(one.device_bytes for one in every), host_bytes=min(one.host_bytes for one in every)
        )
    return ask_first(lambda: decide(free))

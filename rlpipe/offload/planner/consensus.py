"""One decision for all ranks, which the first makes for the least memory that any of them has free."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from rlpipe.hardware.rank0 import ask_first, num_ranks
from rlpipe.offload.planner.planner import Decision
from rlpipe.offload.planner.profile import Capacity
from rlpipe.offload.runtime.chunk_ranks import Alone, ChunkRanks, Replicated, Sharded


def ranks_of(num_parts: int) -> ChunkRanks:
    """Return the default process group's ranks, with every chunk cut into ``num_parts``: one, or one per rank."""
    if num_ranks() == 1:
        return Alone()
    return Replicated() if num_parts == 1 else Sharded()


def agree(free: Capacity, decide: Callable[[Capacity], Decision]) -> Decision:
    """Return what ``decide`` returns on the first rank for the least memory that any rank has free.

    All ranks must call it. What ``decide`` raises is raised on all of them, as in ``ask_first``.
    """
    if num_ranks() > 1:
        every: list[Capacity] = [free] * num_ranks()
        dist.all_gather_object(every, free)
        free = Capacity(
            device_bytes=min(one.device_bytes for one in every), host_bytes=min(one.host_bytes for one in every)
        )
    return ask_first(lambda: decide(free))

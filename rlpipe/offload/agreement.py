"""Has ranks decide alike: the first one for all, by what the one with least memory has free."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from rlpipe.offload.decide import Decision
from rlpipe.offload.profile import Capacity
from rlpipe.offload.ranks import Alone, Ranks, Replicated, Sharded


def num_ranks() -> int:
    """Of torch's default process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def ranks_of(num_parts: int) -> Ranks:
    """The default process group, with every chunk in so many parts: one, or as many as there are ranks."""
    if num_ranks() == 1:
        return Alone()
    return Replicated() if num_parts == 1 else Sharded()


def agree(free: Capacity, decide: Callable[[Capacity], Decision]) -> Decision:
    """What ``decide`` says on the first rank; all ranks must call it.

    Raises there what ``decide`` raises, and ``ValueError`` with the same text elsewhere.
    """
    if num_ranks() == 1:
        return decide(free)
    every: list[Capacity] = [free] * num_ranks()
    dist.all_gather_object(every, free)
    least = Capacity(
        device_bytes=min(one.device_bytes for one in every), host_bytes=min(one.host_bytes for one in every)
    )
    found: list[Decision | str] = [""]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            found = [decide(least)]
        except Exception as error:  # noqa: BLE001  the others wait to be told
            failure, found = error, [f"{error}"]
    dist.broadcast_object_list(found)
    if failure is not None:
        raise failure
    (decision,) = found
    if not isinstance(decision, Decision):
        raise ValueError(decision)
    return decision

"""Distribution of chunks over the ranks of a group: each rank holds all of every chunk, or a part of it."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class ChunkRanks(Protocol):
    """One rank's view of the group; all ranks must make the same calls of ``gather``, ``reduce`` and ``sum``."""

    rank: int
    num_ranks: int
    num_parts: int
    """Number of parts that every chunk is cut into."""

    def part(self, length: int) -> slice:
        """Return the slice of ``length`` elements, a multiple of ``num_parts``, that this rank holds."""

    def gather(self, whole: Tensor) -> None:
        """Fill ``whole``, in which this rank's part is set, with the parts of the other ranks."""

    def reduce(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sum over all ranks."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` over all ranks, in place, and return them."""


class Alone:
    rank, num_ranks, num_parts = 0, 1, 1

    def part(self, length: int) -> slice:
        return slice(0, length)

    def gather(self, whole: Tensor) -> None:
        pass

    def reduce(self, whole: Tensor) -> Tensor:
        return whole

    def sum(self, values: Tensor) -> Tensor:
        return values


class Replicated(Alone):
    """Ranks that each hold and update all of every chunk."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def reduce(self, whole: Tensor) -> Tensor:
        whole = whole.float()
        dist.all_reduce(whole)
        return whole

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values


class Sharded:
    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.num_parts = self.num_ranks

    def part(self, length: int) -> slice:
        assert length % self.num_parts == 0
        size = length // self.num_parts
        return slice(self.rank * size, (self.rank + 1) * size)

    def gather(self, whole: Tensor) -> None:
        dist.all_gather_single(whole, whole[self.part(len(whole))].clone())

    def reduce(self, whole: Tensor) -> Tensor:
        whole = whole.float()
        part = torch.empty(len(whole) // self.num_parts, dtype=whole.dtype, device=whole.device)
        dist.reduce_scatter_single(part, whole)
        return part

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values

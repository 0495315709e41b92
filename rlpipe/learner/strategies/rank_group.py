"""The common base of the strategies that shard a policy over torch's default process group."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.learner.strategies.sharding import Reduce

OPERATIONS = {Reduce.SUM: dist.ReduceOp.SUM, Reduce.MIN: dist.ReduceOp.MIN, Reduce.MAX: dist.ReduceOp.MAX}


class RankGroup:
    """A rank of the default process group, which Ray Train or torchrun has created."""

    def __init__(self, device: torch.device) -> None:
        assert dist.is_initialized(), "there is no process group: start the ranks with Ray Train or torchrun"
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.loads_on_cpu = self.num_ranks > 1
        self.notes: list[str] = []

    def reduce(self, tensor: Tensor, operation: Reduce) -> Tensor:
        reduced = tensor.detach().to(self.device, copy=True)
        dist.all_reduce(reduced, OPERATIONS[operation])
        return reduced

    def barrier(self) -> None:
        dist.barrier()

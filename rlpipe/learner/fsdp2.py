"""Spreads the policy over the ranks with torch's fully_shard, one unit for each transformer block."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from rlpipe.configs.schema import FsdpConfig
from rlpipe.errors import ModelError
from rlpipe.learner.scorer import TokenScorer
from rlpipe.learner.sharding import Reduce

OPERATIONS = {Reduce.SUM: dist.ReduceOp.SUM, Reduce.MIN: dist.ReduceOp.MIN, Reduce.MAX: dist.ReduceOp.MAX}


class Fsdp2:
    """The group of ranks over which ``shard`` spreads models; needs torch's default process group.

    Parameters are kept in their own type and computed with in the scorer's; gradients are summed in float32, over
    the ranks once an update for an adapter, and after every backward pass for a whole model, whose unsharded gradients
    would not fit.
    """

    def __init__(self, config: FsdpConfig, device: torch.device, *, reduce_every_backward: bool) -> None:
        assert dist.is_initialized(), "fsdp2 needs torch's process group: start the ranks with Ray Train or torchrun"
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self._config = config
        self._device = device
        self._reduce_every_backward = reduce_every_backward
        self._mesh = init_device_mesh(device.type, (self.num_ranks,))
        self._trained: TokenScorer | None = None

    def shard(self, scorer: TokenScorer, *, trained: bool) -> None:
        """Shards the model of ``scorer`` in place, and moves it to the device."""
        narrow = scorer.compute_dtype is not torch.float32
        precision = MixedPrecisionPolicy(
            param_dtype=scorer.compute_dtype if narrow else None, reduce_dtype=torch.float32 if narrow else None
        )
        offload = (
            CPUOffloadPolicy(pin_memory=self._device.type == "cuda") if self._config.cpu_offload else OffloadPolicy()
        )
        for block in find_blocks(scorer):
            fully_shard(
                block,
                mesh=self._mesh,
                reshard_after_forward=self._config.reshard_after_forward,
                mp_policy=precision,
                offload_policy=offload,
            )
        fully_shard(scorer, mesh=self._mesh, reshard_after_forward=False, mp_policy=precision, offload_policy=offload)
        for module in scorer.modules():
            if isinstance(module, FSDPModule):
                # The loss carries the counts of all ranks: gradients are added up, where FSDP would average them.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if trained:
            self._trained = scorer

    def begin_backward(self, *, last: bool) -> None:
        assert isinstance(self._trained, FSDPModule)
        self._trained.set_requires_gradient_sync(last or self._reduce_every_backward)

    def end_inference(self, scorer: TokenScorer) -> None:
        # The root keeps its parameters gathered for the backward pass; until then the optimizer would not find them.
        assert isinstance(scorer, FSDPModule)
        scorer.reshard()

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def full(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        # Offloaded parts lie on the CPU, while the group may speak on the device alone.
        return cast(DTensor, tensor.detach().to(self._device)).full_tensor()

    def reduce(self, tensor: Tensor, operation: Reduce) -> Tensor:
        reduced = tensor.detach().to(self._device, copy=True)
        dist.all_reduce(reduced, OPERATIONS[operation])
        return reduced

    def barrier(self) -> None:
        dist.barrier()


def find_blocks(scorer: TokenScorer) -> list[nn.Module]:
    """The transformer layers, as the model names their classes itself."""
    names = set(scorer.causal_model._no_split_modules or ())
    blocks = [module for module in scorer.modules() if type(module).__name__ in names]
    if not blocks:
        raise ModelError(f"{type(scorer.causal_model).__name__} does not name its layers: set learner.strategy=single")
    return blocks

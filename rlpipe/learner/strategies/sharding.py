"""Collective operations that a strategy provides to the learner, for a process group of ranks or a single one."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.learner.forward import LogprobModel
from rlpipe.learner.strategies.optimizer import TorchUpdates
from rlpipe.weights.dcp import Read


class Reduce(Enum):
    """Operations that reduce a tensor over the ranks."""

    SUM = "sum"
    MIN = "min"
    MAX = "max"


class Updates(Protocol):
    """One rank's view of the updates; all ranks must make the same calls of all methods but ``set_learning_rate``."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the learning rate of all parameters, from the next update on."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Add the gradients of a loss; they are summed over the ranks after the ``last`` one of an update."""

    def squared_norm(self) -> Tensor:
        """Return the sum of squares of this rank's parts of the gradients (scalar, float32)."""

    def apply(self, scale: float) -> None:
        """Scale the gradients, update the parameters, and drop the gradients."""

    def drop(self) -> None:
        """Drop the gradients."""

    def state(self) -> dict[str, Tensor]:
        """Return the tensors that this rank writes: ``policy.<parameter>`` and ``optimizer.<parameter>.<moment>``."""

    def load_state(self, stored: Mapping[str, torch.Size], read: Read) -> None:
        """Load parameters and moments; ``stored`` has the shapes of all tensors in the checkpoint."""


class Sharding(Protocol):
    """One rank's view of the group; all ranks must make the same calls of all methods but ``shape`` and ``local``."""

    rank: int
    num_ranks: int
    loads_on_cpu: bool
    """True if models are loaded on the CPU, because ``shard`` moves them to the device."""
    notes: list[str]
    """Messages to the user about how models were sharded."""

    def shard(self, module: LogprobModel, *, trained: bool) -> None:
        """Shard a model over the ranks, in place, and move it to their devices."""

    def make_updates(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> Updates:
        """Make the updates of the trained parameters, given by name; call it once, after ``shard``."""

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Return the tensors that this rank writes for parameters of a model that is not trained, by name."""

    def load_state(self, parameters: Mapping[str, nn.Parameter], read: Read) -> None:
        """Load parameters of a model from a checkpoint."""

    def end_inference(self, module: LogprobModel) -> None:
        """End a series of forward passes that no backward pass follows."""

    def move(self, parameter: nn.Parameter, towards: nn.Parameter, by: float) -> None:
        """Interpolate a parameter of a model that is not trained towards that of another, by the fraction ``by``."""

    def shape(self, tensor: Tensor) -> torch.Size:
        """Return the shape of the whole tensor."""

    def local(self, tensor: Tensor) -> Tensor:
        """Return this rank's part of a parameter, gradient or moment, sharing its memory."""

    def full(self, tensor: Tensor) -> Tensor:
        """Return the whole tensor, on every rank."""

    def reduce(self, tensor: Tensor, operation: Reduce) -> Tensor:
        """Return the tensor reduced over all ranks."""

    def barrier(self) -> None:
        """Wait until all ranks have called it."""


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


class SingleRank:
    """The sharding of a single rank, which holds the whole model."""

    rank = 0
    num_ranks = 1
    loads_on_cpu = False

    def __init__(self) -> None:
        self.notes: list[str] = []

    def shard(self, module: LogprobModel, *, trained: bool) -> None:
        pass

    def make_updates(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> Updates:
        return TorchUpdates(parameters, config, local=self.local)

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in parameters.items()}

    def load_state(self, parameters: Mapping[str, nn.Parameter], read: Read) -> None:
        read(self.state(parameters))

    def end_inference(self, module: LogprobModel) -> None:
        pass

    def move(self, parameter: nn.Parameter, towards: nn.Parameter, by: float) -> None:
        parameter.lerp_(towards, by)

    def shape(self, tensor: Tensor) -> torch.Size:
        return tensor.shape

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def full(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, operation: Reduce) -> Tensor:
        return tensor

    def barrier(self) -> None:
        pass

"""The sharding of a single rank, which holds everything."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.learner.forward import TokenScorer
from rlpipe.learner.strategies.optimizer import TorchUpdates
from rlpipe.learner.strategies.sharding import Reduce, Updates
from rlpipe.weights.dcp import Read


class SingleRank:
    rank = 0
    num_ranks = 1
    loads_on_cpu = False

    def __init__(self) -> None:
        self.notes: list[str] = []

    def shard(self, scorer: TokenScorer, *, trained: bool) -> None:
        pass

    def make_updates(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> Updates:
        return TorchUpdates(parameters, config, local=self.local)

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in parameters.items()}

    def load_state(self, parameters: Mapping[str, nn.Parameter], read: Read) -> None:
        read(self.state(parameters))

    def end_inference(self, scorer: TokenScorer) -> None:
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

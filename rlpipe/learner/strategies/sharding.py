"""How the policy is spread over the ranks and updated, as far as a step, a checkpoint and publishing need to know."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Protocol

import torch
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.learner.forward import TokenScorer
from rlpipe.weights.dcp import Read


class Reduce(Enum):
    SUM = "sum"
    MIN = "min"
    MAX = "max"


class Updates(Protocol):
    """One rank's view; all ranks must call all but ``set_learning_rate`` alike."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """That of all parameters, from the next update on."""

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Adds the gradients of a loss; they are summed over the ranks after the ``last`` of an update."""

    def squared_norm(self) -> Tensor:
        """The sum of squares of this rank's parts of the gradients (scalar, float32)."""

    def apply(self, scale: float) -> None:
        """Scales the gradients, updates the parameters, and drops the gradients."""

    def drop(self) -> None:
        """Drops the gradients."""

    def state(self) -> dict[str, Tensor]:
        """``policy.<parameter>`` and ``optimizer.<parameter>.<moment>``, as far as this rank writes them."""

    def load_state(self, stored: Mapping[str, torch.Size], read: Read) -> None:
        """Takes over parameters and moments; ``stored`` has the shapes of all that the checkpoint holds."""


class Sharding(Protocol):
    """One rank's view of the group. All ranks must call all but ``shape`` and ``local`` alike."""

    rank: int
    num_ranks: int
    loads_on_cpu: bool
    """Whether models are loaded there, as ``shard`` brings them to the device."""
    notes: list[str]
    """What users should know of how models were spread."""

    def shard(self, scorer: TokenScorer, *, trained: bool) -> None:
        """Spreads a model over the ranks, in place, and moves it to their device."""

    def make_updates(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> Updates:
        """Of the parameters that are trained, by name; call it once, after ``shard``."""

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Those of a model that is not trained, by name, as far as this rank writes them."""

    def load_state(self, parameters: Mapping[str, nn.Parameter], read: Read) -> None:
        """Takes them over from a checkpoint."""

    def end_inference(self, scorer: TokenScorer) -> None:
        """Announces the end of forward passes that no backward pass follows."""

    def move(self, parameter: nn.Parameter, towards: nn.Parameter, by: float) -> None:
        """Brings a parameter of a model that is not trained nearer to that of another, by a share of the way."""

    def shape(self, tensor: Tensor) -> torch.Size:
        """That of the whole tensor."""

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter, gradient or moment that this rank holds; shares its memory."""

    def full(self, tensor: Tensor) -> Tensor:
        """The whole tensor, on every rank."""

    def reduce(self, tensor: Tensor, operation: Reduce) -> Tensor:
        """The tensor, combined over all ranks."""

    def barrier(self) -> None:
        """Waits until all ranks are here."""

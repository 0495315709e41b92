"""How the policy is spread over the ranks, as far as a step, a checkpoint and publishing need to know."""

from __future__ import annotations

from enum import Enum
from typing import Protocol

from torch import Tensor

from rlpipe.learner.scorer import TokenScorer


class Reduce(Enum):
    SUM = "sum"
    MIN = "min"
    MAX = "max"


class Sharding(Protocol):
    """One rank's view of the group. ``full``, ``reduce`` and ``barrier`` must be called by all ranks alike."""

    rank: int
    num_ranks: int

    def shard(self, scorer: TokenScorer, *, trained: bool) -> None:
        """Spreads a model over the ranks, in place, and moves it to their device."""

    def begin_backward(self, *, last: bool) -> None:
        """Announces a backward pass; gradients must be summed over the ranks after the ``last`` of an update."""

    def end_inference(self, scorer: TokenScorer) -> None:
        """Announces the end of forward passes that no backward pass follows."""

    def local(self, tensor: Tensor) -> Tensor:
        """The part of a parameter, gradient or moment that this rank holds; shares its memory."""

    def full(self, tensor: Tensor) -> Tensor:
        """The whole tensor, on every rank."""

    def reduce(self, tensor: Tensor, operation: Reduce) -> Tensor:
        """The tensor, combined over all ranks."""

    def barrier(self) -> None:
        """Waits until all ranks are here."""


class SingleRank:
    """One rank that holds everything."""

    rank = 0
    num_ranks = 1

    def shard(self, scorer: TokenScorer, *, trained: bool) -> None:
        pass

    def begin_backward(self, *, last: bool) -> None:
        pass

    def end_inference(self, scorer: TokenScorer) -> None:
        pass

    def local(self, tensor: Tensor) -> Tensor:
        return tensor

    def full(self, tensor: Tensor) -> Tensor:
        return tensor

    def reduce(self, tensor: Tensor, operation: Reduce) -> Tensor:
        return tensor

    def barrier(self) -> None:
        pass

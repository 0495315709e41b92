"""Gradients of an lm_head and its inputs, collected from those of its logits, tile by tile.

Shapes: T tokens, H hidden size, V vocabulary, r rank of a LoRA, N columns of a tile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlpipe.kernels.head_tiles import HeadTiles, sum_over_shards
from rlpipe.kernels.products import add_product


@dataclass(slots=True, frozen=True)
class HeadGradients:
    """Gradients of an lm_head's tensors, None for those not needed.

    Those of ``hidden`` and ``states`` are sums over all tiles, and have the type of the logits.
    """

    tiles: HeadTiles
    hidden: Tensor | None  # [T, H]
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]
    states: Tensor | None  # [T, r]
    up: Tensor | None  # [V, r]

    @classmethod
    def make(cls, tiles: HeadTiles, needed: Sequence[bool]) -> HeadGradients:
        """Allocate the gradients that are ``needed``, flags in the order of the tensors."""

        def zeros(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.zeros_like(tensor, dtype=tiles.dtype)

        def empty(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.empty_like(tensor)

        makers = (
            (zeros, tiles.hidden),
            (empty, tiles.weight),
            (empty, tiles.bias),
            (zeros, tiles.states),
            (empty, tiles.up),
        )
        return cls(tiles, *(make(one) if need else None for (make, one), need in zip(makers, needed, strict=False)))

    def add(self, columns: slice, gradient: Tensor) -> None:
        """Add the contribution of a tile, whose logits have the given ``gradient`` ``[T, N]``."""
        tiles = self.tiles
        if self.hidden is not None:
            add_product(self.hidden, gradient, tiles.weight[columns])
        if self.states is not None and tiles.up is not None:
            add_product(self.states, gradient, tiles.up[columns])
        if self.weight is not None:
            torch.mm(gradient.T, tiles.hidden, out=self.weight[columns])
        if self.up is not None and tiles.states is not None:
            torch.mm(gradient.T, tiles.states, out=self.up[columns])
        if self.bias is not None:
            self.bias[columns] = gradient.sum(0, dtype=tiles.dtype)

    def finished(self) -> list[Tensor | None]:
        """Return the gradients in the order and the types of the tensors, summed over shards where necessary."""
        shard = self.tiles.options.shard
        hidden, states = (
            None if one is None else sum_over_shards(one, shard).to(self.tiles.weight.dtype)
            for one in (self.hidden, self.states)
        )
        return [hidden, self.weight, self.bias, states, self.up]

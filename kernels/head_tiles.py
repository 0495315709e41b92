"""Logits computed tile by tile, and the statistics of their softmax, so that log-probs never need all logits at once.

Matrix products run in torch (cuBLAS); the rest of a tile's work is one pass of a kernel over its rows. Shapes:
T tokens, H hidden size, V vocabulary (a rank's rows of it, if it is sharded), r rank of a LoRA, C tokens of a chunk,
N columns of a tile.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.kernels.logit_change import LogitChange
from rlpipe.kernels.products import add_product, product, wide
from rlpipe.kernels.softmax_gradient import row_gradient
from rlpipe.kernels.softmax_stats import RowStats, row_stats

COLUMN_MULTIPLE = 64
"""Tile widths are multiples of this, so that each row of a tile begins where tensor cores can read it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class VocabularyShard:
    """This rank's rows of an lm_head that is sharded over the ranks of a group, which all have the same tokens."""

    group: dist.ProcessGroup
    first_row: int
    """Index of this rank's first row in the whole vocabulary."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HeadOptions:
    change: LogitChange
    """Change that is the same for all tokens and columns."""
    chunk_tokens: int
    shard: VocabularyShard | None
    use_triton: bool | None


@dataclass(slots=True, frozen=True)
class HeadTiles:
    """The tensors that logits are computed from, tile by tile."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    states: Tensor | None  # [T, r]
    up: Tensor | None  # [V, r]
    targets: Tensor  # [T]
    temperatures: Tensor | None  # [T]
    options: HeadOptions

    @property
    def dtype(self) -> torch.dtype:
        """Type of the logits."""
        return wide(self.weight.dtype)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits ``[C, V]`` of one chunk of tokens after another; they may be overwritten."""
        buffer = self.weight.new_empty(
            min(self.options.chunk_tokens, len(self.hidden)), len(self.weight), dtype=self.dtype
        )
        for start in range(0, len(self.hidden), self.options.chunk_tokens):
            rows = slice(start, min(start + self.options.chunk_tokens, len(self.hidden)))
            yield rows, self._logits(rows, slice(None), buffer[: rows.stop - start])

    def columns(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits ``[T, N]`` of all tokens for one part of the vocabulary after another.

        The tiles are about as large as those of ``chunks``.
        """
        num_tokens, vocabulary = len(self.hidden), len(self.weight)
        num_tiles = math.ceil(num_tokens / self.options.chunk_tokens)
        width = math.ceil(vocabulary / num_tiles / COLUMN_MULTIPLE) * COLUMN_MULTIPLE if num_tiles > 1 else vocabulary
        buffer = self.weight.new_empty(num_tokens * width, dtype=self.dtype)
        for start in range(0, vocabulary, width):
            columns = slice(start, min(start + width, vocabulary))
            size = columns.stop - start
            yield columns, self._logits(slice(None), columns, buffer[: num_tokens * size].view(num_tokens, size))

    def stats(self, with_entropy: bool) -> RowStats:
        """Compute the statistics of all tokens."""
        return self.join([self.stats_of(rows, logits, with_entropy) for rows, logits in self.chunks()])

    def join(self, chunks: Sequence[RowStats]) -> RowStats:
        """Concatenate the statistics of all chunks."""
        values = [chunk.values for chunk in chunks]
        return RowStats(torch.cat(values, 1) if values else self.weight.new_empty(4, 0, dtype=self.dtype))

    def stats_of(self, rows: slice, logits: Tensor, with_entropy: bool) -> RowStats:
        """Compute the statistics of a chunk over the whole vocabulary, including other ranks' shards."""
        own = row_stats(
            logits,
            self.targets[rows],
            self._change.of_rows(rows),
            first_column=self._first_row,
            with_entropy=with_entropy,
            use_triton=self.options.use_triton,
        )
        if self.options.shard is None:
            return own
        group = self.options.shard.group
        num_parts, (num_values, num_rows) = dist.get_world_size(group), own.values.shape
        parts = own.values.new_empty(num_parts * num_values, num_rows)
        dist.all_gather_into_tensor(parts, own.values, group=group)
        return RowStats.join(parts.view(num_parts, num_values, num_rows))

    def gradient_of(
        self,
        rows: slice,
        columns: slice,
        logits: Tensor,
        stats: RowStats,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        """Compute the gradient of a tile's logits, in the weight's type; it overwrites logits of the same type."""
        own = logits if logits.dtype == self.weight.dtype else torch.empty_like(logits, dtype=self.weight.dtype)
        return row_gradient(
            logits,
            self.targets[rows],
            stats,
            self._change.of_rows(rows).of_columns(columns),
            grad_logprobs=grad_logprobs,
            grad_entropy=grad_entropy,
            out=own,
            first_column=self._first_row + (columns.start or 0),
            has_ignored=False,
            use_triton=self.options.use_triton,
        )

    @property
    def _change(self) -> LogitChange:
        return replace(self.options.change, temperatures=self.temperatures, bias=self.bias)

    @property
    def _first_row(self) -> int:
        return 0 if self.options.shard is None else self.options.shard.first_row

    def _logits(self, rows: slice, columns: slice, out: Tensor) -> Tensor:
        states = None if self.states is None else self.states[rows]
        up = None if self.up is None else self.up[columns]
        return form_logits(self.hidden[rows], self.weight[columns], states, up, out)


def form_logits(hidden: Tensor, weight: Tensor, states: Tensor | None, up: Tensor | None, out: Tensor) -> Tensor:
    """Compute logits before any change into ``out`` ``[T, V]``, at least float32; other shapes as in ``HeadTiles``."""
    product(hidden, weight.T, out)
    if states is not None and up is not None:
        add_product(out, states, up.T)
    return out


def sum_over_shards(tensor: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Sum a tensor over the ranks of a shard's group in place; without a shard, leave it unchanged."""
    if shard is not None:
        dist.all_reduce(tensor, group=shard.group)
    return tensor

"""The logits of tokens, a tile at a time, and the statistics of their softmax; for log-probs that never hold all.

Products run in torch (cuBLAS), what a tile needs beside them is one pass of a kernel over its rows. Shapes: T tokens,
H hidden size, V vocabulary (a rank's rows of it, if it is sharded), r rank of a LoRA, C tokens of a chunk, N columns of
a tile.
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
"""Tiles are many times as wide, so that tensor cores can read each of their rows from its begin."""


@dataclass(kw_only=True, slots=True, frozen=True)
class VocabularyShard:
    """Rows of the lm_head are spread over the ranks of a group, which all have the same tokens."""

    group: dist.ProcessGroup
    first_row: int
    """Of this rank's, in the whole vocabulary."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HeadOptions:
    change: LogitChange
    """What is the same for all tokens and columns."""
    chunk_tokens: int
    shard: VocabularyShard | None
    use_triton: bool | None


@dataclass(slots=True, frozen=True)
class HeadTiles:
    """What logits are made of."""

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
        """Of logits."""
        return wide(self.weight.dtype)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """The logits ``[C, V]`` of some tokens after the other, which may be overwritten."""
        buffer = self.weight.new_empty(
            min(self.options.chunk_tokens, len(self.hidden)), len(self.weight), dtype=self.dtype
        )
        for start in range(0, len(self.hidden), self.options.chunk_tokens):
            rows = slice(start, min(start + self.options.chunk_tokens, len(self.hidden)))
            yield rows, self._logits(rows, slice(None), buffer[: rows.stop - start])

    def columns(self) -> Iterator[tuple[slice, Tensor]]:
        """The logits ``[T, N]`` of all tokens for a part of the vocabulary after the other; tiles as large as above."""
        num_tokens, vocabulary = len(self.hidden), len(self.weight)
        num_tiles = math.ceil(num_tokens / self.options.chunk_tokens)
        width = math.ceil(vocabulary / num_tiles / COLUMN_MULTIPLE) * COLUMN_MULTIPLE if num_tiles > 1 else vocabulary
        buffer = self.weight.new_empty(num_tokens * width, dtype=self.dtype)
        for start in range(0, vocabulary, width):
            columns = slice(start, min(start + width, vocabulary))
            size = columns.stop - start
            yield columns, self._logits(slice(None), columns, buffer[: num_tokens * size].view(num_tokens, size))

    def stats(self, with_entropy: bool) -> RowStats:
        """Of all tokens."""
        return self.join([self.stats_of(rows, logits, with_entropy) for rows, logits in self.chunks()])

    def join(self, chunks: Sequence[RowStats]) -> RowStats:
        """Of all tokens from those of the chunks."""
        values = [chunk.values for chunk in chunks]
        return RowStats(torch.cat(values, 1) if values else self.weight.new_empty(4, 0, dtype=self.dtype))

    def stats_of(self, rows: slice, logits: Tensor, with_entropy: bool) -> RowStats:
        """Of a chunk, for the whole vocabulary."""
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
        """Of a tile, in the weight's type, as products take it; in the memory of the logits where that is as wide."""
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
    """Before any change; shapes as in ``HeadTiles``, ``out`` ``[T, V]`` in at least float32."""
    product(hidden, weight.T, out)
    if states is not None and up is not None:
        add_product(out, states, up.T)
    return out


def sum_over_shards(tensor: Tensor, shard: VocabularyShard | None) -> Tensor:
    """In place."""
    if shard is not None:
        dist.all_reduce(tensor, group=shard.group)
    return tensor

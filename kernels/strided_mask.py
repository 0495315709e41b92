"""Attention masks of EBFT's strided pass: as a dense mask, and as flex_attention's block mask.

Shapes: M tokens of the row, the first L of documents, followed by steps of C tokens, one of each column (an EBFT
block); Q query tokens and the first K tokens as keys. Mask blocks are stretches of B tokens, not EBFT's blocks: q of
the queries, k of the keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from torch.nn.functional import pad

BLOCK_SIZE = 128
"""Default tokens of a mask block (B); flex_attention's GPU kernels need multiples of their own tile size."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StridedMask:
    """Properties of each token of a row that determine which tokens it sees.

    A document's token sees the document up to itself; a block's token sees its context, and its own block up to itself.
    The mask of the whole row is cached until ``forget``, because several passes need it.
    """

    documents: Tensor  # [M] int64, document's number, ascending among the first L
    columns: Tensor  # [M] int64, block's column; -1 for tokens of documents
    positions: Tensor  # [M] int64, position ids
    visible: Tensor  # [M] int64, how many tokens of its document a token sees
    num_document_tokens: int
    num_columns: int
    _cache: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def dense(self, queries: slice = slice(None), *, window: int | None = None) -> Tensor:
        """Return the mask ``[Q, K]``, True where a query sees a key; K is the end of ``queries``.

        ``window`` hides tokens that are ``window`` or more positions earlier (sliding-window attention).
        """
        key = ("dense", window)
        if key not in self._cache:
            indices = torch.arange(len(self.columns), device=self.columns.device)
            self._cache[key] = self._visible_pairs(indices[:, None], indices[None], window)
        mask: Tensor = self._cache[key]
        return mask[queries, : queries.stop]

    def blocks(
        self, queries: slice = slice(None), *, window: int | None = None, block_size: int = BLOCK_SIZE
    ) -> BlockMask:
        """Return the same mask as flex_attention's block mask ``[1, 1, Q, K]``.

        Empty, full and partial pairs of mask blocks are determined exactly, but without the pairs of tokens: in memory
        of order M + q k, plus k numbers for each step.
        """
        key = ("blocks", window, block_size)
        if queries != slice(None):
            return self._make_blocks(queries, window, block_size)
        if key not in self._cache:
            self._cache[key] = self._make_blocks(queries, window, block_size)
        mask: BlockMask = self._cache[key]
        return mask

    def forget(self) -> None:
        """Free the cached masks."""
        self._cache.clear()

    def _visible_pairs(self, query: Tensor, key: Tensor, window: int | None) -> Tensor:
        same_document = self.documents[query] == self.documents[key]
        in_context = (self.columns[key] < 0) & same_document & (self.positions[key] < self.visible[query])
        own_block = (self.columns[key] >= 0) & (self.columns[key] == self.columns[query]) & (key <= query)
        is_visible = in_context | own_block
        return is_visible if window is None else is_visible & (self.positions[query] - self.positions[key] < window)

    def _make_blocks(self, queries: slice, window: int | None, block_size: int) -> BlockMask:
        start, stop, _ = queries.indices(len(self.columns))
        ranges = self._ranges(start, stop, window)
        pairs = _count_in_documents(ranges, stop, block_size)
        pairs += self._count_in_columns(start, stop, window, block_size)
        full = pairs == block_size**2
        return BlockMask.from_kv_blocks(
            *_list_blocks((pairs > 0) & ~full),
            *_list_blocks(full),
            BLOCK_SIZE=block_size,
            mask_mod=_make_mask_mod(torch.stack(ranges).int(), self.columns[:stop].int()),
            seq_lengths=(stop - start, stop),
        )

    def _ranges(self, start: int, stop: int, window: int | None) -> _Ranges:
        count, reach = self.num_document_tokens, len(self.columns) if window is None else window
        indices = torch.arange(start, stop, device=self.columns.device)
        begin = torch.searchsorted(self.documents[:count], self.documents[start:stop])
        end = begin + self.visible[start:stop]
        first = (begin + (self.positions[start:stop] - reach + 1).clamp(min=0)).minimum(end)
        # A block's steps are C positions apart; the range of a document's token, which has no column, is empty.
        first_own = (indices - (reach - 1) * self.num_columns).clamp(min=count)
        return _Ranges(first=first, end=end, first_own=first_own, last_own=indices, columns=self.columns[start:stop])

    def _count_in_columns(self, start: int, stop: int, window: int | None, block_size: int) -> Tensor:
        """Count pairs of a query and a block's token that it sees, in each pair of mask blocks ``[q, k]``.

        A token is seen from its own position and from those C, 2 C, ... positions later. So the tokens of one mask
        block are seen, a given number of steps later, from a range of positions of the same length.
        """
        num_steps = max(0, -((self.num_document_tokens - stop) // max(1, self.num_columns)))
        steps = torch.arange(num_steps if window is None else min(num_steps, window), device=self.columns.device)
        shift = steps * self.num_columns - start
        begin = torch.arange(0, stop, block_size, device=self.columns.device)[:, None]  # [k, 1]
        end = (begin + block_size).clamp(max=stop)
        first = (begin.clamp(min=self.num_document_tokens) + shift).clamp(0, stop - start)  # [k, steps]
        return _count_overlaps(first, (end + shift).clamp(0, stop - start).maximum(first), stop - start, block_size).T


class _Ranges(NamedTuple):
    """Keys that queries see: ``first`` up to but not including ``end``, and their column's in [first_own, last_own]."""

    first: Tensor  # [Q]
    end: Tensor  # [Q]
    first_own: Tensor  # [Q]
    last_own: Tensor  # [Q]
    columns: Tensor  # [Q]


def _make_mask_mod(
    ranges: Tensor,  # [5, Q], the fields of a _Ranges
    key_columns: Tensor,  # [K]
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """Make a mask function that captures only tensors, so that a kernel compiled for one serves all of them."""

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_context = (ranges[0, query] <= key) & (key < ranges[1, query])
        in_own_block = (ranges[2, query] <= key) & (key <= ranges[3, query])
        return in_context | in_own_block & (ranges[4, query] == key_columns[key])

    return sees


def _count_in_documents(ranges: _Ranges, num_keys: int, block_size: int) -> Tensor:
    """Count pairs of a query and a document's token that it sees, in each pair of mask blocks ``[q, k]``."""
    padding = (0, -len(ranges.first) % block_size)
    first, end = (pad(edge, padding).view(-1, block_size) for edge in (ranges.first, ranges.end))
    return _count_overlaps(first, end, num_keys, block_size)


def _count_overlaps(first: Tensor, end: Tensor, length: int, block_size: int) -> Tensor:
    """Count the positions that each row's ranges ``[R, N]`` cover in each of b blocks of ``length`` ones, ``[R, b]``.

    The part of a block that lies before a range's edge is all of it, some of it, or nothing; from block to block it
    changes at only two blocks. So the changes of all ranges are scattered to those blocks, and summed up cumulatively.
    """
    num_blocks = -(-length // block_size)
    changes = first.new_zeros(len(first), num_blocks + 2)
    for edge, sign in ((end, -1), (first, 1)):
        offset = edge % block_size
        changes.scatter_add_(1, edge // block_size, sign * (block_size - offset))
        changes.scatter_add_(1, edge // block_size + 1, sign * offset)
    return changes.cumsum(1)[:, :num_blocks]


def _list_blocks(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many mask blocks of each row are chosen ``[1, 1, q]``, and all indices, the chosen ones first."""
    indices = chosen.int().argsort(dim=1, descending=True, stable=True)
    return chosen.sum(1, dtype=torch.int32)[None, None], indices.int()[None, None]

"""Token positions in EBFT's strided pass: documents, and short blocks that are generated from within them.

A row holds documents, one after the other, and after them the tokens of all blocks. A block sees the first tokens of
its document, its context, and its own earlier tokens; it sees no other block and no other document, so that one pass
scores all of them. The samples of a block are adjacent columns.

Shapes: L document tokens of a row, C columns (blocks times samples), g tokens of a block, M = L + g C tokens in all.
Source: Jelassi et al. 2026, "Energy-Based Fine-Tuning", arXiv:2603.12248.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlpipe.configs.schema.algorithm_config import StridedConfig

Ints = NDArray[np.int64]


def block_contexts(length: int, config: StridedConfig, prompt_length: int = 0) -> Ints:
    """Return the context length of each block of a document of ``length`` tokens; empty if it is too short for a block.

    Without a prompt there are (length - g - context_length) // stride + 1 blocks; with one, they begin after it and at
    least ``min_completion_prefix`` further tokens.
    """
    first = config.context_length
    if prompt_length:
        first = max(prompt_length + config.min_completion_prefix, first)
    return np.arange(first, length - config.generate_tokens + 1, config.stride, dtype=np.int64)


@dataclass(kw_only=True, slots=True, frozen=True)
class StridedRow:
    """The layout of a row's tokens; step s of column c is at L + s C + c."""

    document_ids: Ints  # [L], from 0
    positions: Ints  # [L], each token's index in its own document
    column_documents: Ints  # [C]
    contexts: Ints  # [C], tokens of the document that the column sees
    num_steps: int
    """Tokens of a block (g)."""

    @property
    def num_document_tokens(self) -> int:
        return len(self.document_ids)

    @property
    def num_columns(self) -> int:
        return len(self.contexts)

    @property
    def num_skipped(self) -> int:
        """Number of documents that are too short for a block."""
        return int(np.count_nonzero(self.columns_by_document() == 0))

    @property
    def num_tokens(self) -> int:
        return self.num_document_tokens + self.num_steps * self.num_columns

    def columns_by_document(self) -> Ints:
        """Return the number of columns of each document."""
        return np.bincount(self.column_documents, minlength=int(self.document_ids[-1]) + 1)

    def step_slice(self, step: int) -> slice:
        """Return the slice of the row with one step's tokens, of all columns."""
        start = self.num_document_tokens + step * self.num_columns
        return slice(start, start + self.num_columns)

    def position_ids(self) -> Ints:
        """Return the position of every token ``[M]``; a block's positions continue from the end of its context."""
        generated = self.contexts[None] + np.arange(self.num_steps)[:, None]  # [g, C]
        return np.concatenate([self.positions, generated.ravel()])

    def predecessors(self) -> Ints:
        """Return the indices of the hidden states that predict the generated tokens ``[g, C]``.

        A block's first token is predicted at the last token of its context; any other at the same column's token of the
        step before, which is C tokens earlier in the row, not adjacent.
        """
        first = self._column_starts() + self.contexts - 1
        later = self.num_document_tokens + np.arange((self.num_steps - 1) * self.num_columns)
        return np.concatenate([first, later]).reshape(self.num_steps, self.num_columns)

    def truth_indices(self) -> Ints:
        """Return the indices of the document's own tokens that a column's tokens are compared with ``[g, C]``."""
        return self._column_starts() + self.contexts + np.arange(self.num_steps)[:, None]

    def _column_starts(self) -> Ints:
        """Return the index of the first token of each column's document ``[C]``."""
        return np.searchsorted(self.document_ids, self.column_documents).astype(np.int64)

    def columns(self) -> Ints:
        """Return the column of each token ``[M]``; -1 for document tokens."""
        documents = np.full(self.num_document_tokens, -1, np.int64)
        return np.concatenate([documents, np.tile(np.arange(self.num_columns), self.num_steps)])

    def documents(self) -> Ints:
        """Return the document of each token ``[M]``."""
        return np.concatenate([self.document_ids, np.tile(self.column_documents, self.num_steps)])

    def visible(self) -> Ints:
        """Return how many tokens of its document each token sees ``[M]``: up to itself, or the context of its block."""
        return np.concatenate([self.positions + 1, np.tile(self.contexts, self.num_steps)])


def document_budget(max_tokens: int, config: StridedConfig, num_samples: int) -> int:
    """Return the document tokens that fit in a row of ``max_tokens`` with their blocks.

    A document has a block per stride, and its first one as soon as it has a context and the tokens of a block.
    """
    tokens_per_block = min(config.stride, config.context_length + config.generate_tokens)
    return int(max_tokens / (1 + num_samples * config.generate_tokens / tokens_per_block))


def plan_strided_row(
    lengths: Sequence[int], config: StridedConfig, *, num_samples: int, prompt_lengths: Sequence[int] | None = None
) -> StridedRow:
    """Lay out documents of ``lengths`` in one row, with ``num_samples`` adjacent columns for each block."""
    prompts = prompt_lengths or [0] * len(lengths)
    contexts = [block_contexts(length, config, prompt) for length, prompt in zip(lengths, prompts, strict=True)]
    documents = np.repeat(np.arange(len(lengths)), [len(document_contexts) for document_contexts in contexts])
    return StridedRow(
        document_ids=np.repeat(np.arange(len(lengths)), lengths),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        column_documents=np.repeat(documents, num_samples),
        contexts=np.repeat(np.concatenate(contexts), num_samples),
        num_steps=config.generate_tokens,
    )

"""Where everything stands in EBFT's strided pass: documents, and short blocks that are generated from within them.

A row holds documents, one after the other, and behind them the tokens of all blocks. A block sees the first tokens of
its document, its context, and its own earlier tokens; it sees no other block and no other document, so that one pass
scores all of them. The samples of a block are columns beside each other.

Shapes: L document tokens of a row, C columns (blocks times samples), g tokens of a block, M = L + g C tokens in all.
Source: Jelassi et al. 2026, "Energy-Based Fine-Tuning", arXiv:2603.12248.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rlpipe.configs.schema.ebft_config import StridedConfig

Ints = NDArray[np.int64]


def block_contexts(length: int, config: StridedConfig, prompt_length: int = 0) -> Ints:
    """How many tokens each block of a document of ``length`` sees; none where that is too short for a block.

    Without prompt that makes (length - g - context_length) // stride + 1 blocks; with one, they begin in what follows
    it, behind at least ``min_completion_prefix`` tokens.
    """
    first = config.context_length
    if prompt_length:
        first = max(prompt_length + config.min_completion_prefix, first)
    return np.arange(first, length - config.generate_tokens + 1, config.stride, dtype=np.int64)


@dataclass(kw_only=True, slots=True, frozen=True)
class StridedRow:
    """The places of a row's tokens; step s of column c stands at L + s C + c."""

    document_ids: Ints  # [L], from 0
    positions: Ints  # [L], each token's place in its own document
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
        """Documents that are too short for a block."""
        return int(np.count_nonzero(self.columns_by_document() == 0))

    @property
    def num_tokens(self) -> int:
        return self.num_document_tokens + self.num_steps * self.num_columns

    def columns_by_document(self) -> Ints:
        """How many each document has."""
        return np.bincount(self.column_documents, minlength=int(self.document_ids[-1]) + 1)

    def place(self, step: int) -> slice:
        """Where the tokens of a step stand, of all columns."""
        start = self.num_document_tokens + step * self.num_columns
        return slice(start, start + self.num_columns)

    def position_ids(self) -> Ints:
        """Of all tokens ``[M]``: those of a block go on where its context ends."""
        generated = self.contexts[None] + np.arange(self.num_steps)[:, None]  # [g, C]
        return np.concatenate([self.positions, generated.ravel()])

    def predecessors(self) -> Ints:
        """Where the hidden states stand that predict the generated tokens ``[g, C]``.

        That of a block's first token is the last of its context; that of any other stands a step before it, which is C
        tokens before it, and not beside it.
        """
        first = self._column_starts() + self.contexts - 1
        later = self.num_document_tokens + np.arange((self.num_steps - 1) * self.num_columns)
        return np.concatenate([first, later]).reshape(self.num_steps, self.num_columns)

    def truth_places(self) -> Ints:
        """Where the document's own tokens stand that a column's tokens are compared with ``[g, C]``."""
        return self._column_starts() + self.contexts + np.arange(self.num_steps)[:, None]

    def _column_starts(self) -> Ints:
        """Where the documents of the columns begin ``[C]``."""
        return np.searchsorted(self.document_ids, self.column_documents).astype(np.int64)

    def columns(self) -> Ints:
        """The column of each token ``[M]``; -1 for documents."""
        documents = np.full(self.num_document_tokens, -1, np.int64)
        return np.concatenate([documents, np.tile(np.arange(self.num_columns), self.num_steps)])

    def documents(self) -> Ints:
        """The document of each token ``[M]``."""
        return np.concatenate([self.document_ids, np.tile(self.column_documents, self.num_steps)])

    def visible(self) -> Ints:
        """Of each token, how much of its document it sees ``[M]``: up to itself, or the context of its block."""
        return np.concatenate([self.positions + 1, np.tile(self.contexts, self.num_steps)])


def document_budget(max_tokens: int, config: StridedConfig, num_samples: int) -> int:
    """Document tokens of a row that has at most ``max_tokens`` with its blocks, of which there is one a stride."""
    return int(max_tokens / (1 + num_samples * config.generate_tokens / config.stride))


def plan_row(
    lengths: Sequence[int], config: StridedConfig, *, num_samples: int, prompt_lengths: Sequence[int] | None = None
) -> StridedRow:
    """Documents of ``lengths`` in one row, with ``num_samples`` columns for each block, side by side."""
    prompts = prompt_lengths or [0] * len(lengths)
    contexts = [block_contexts(length, config, prompt) for length, prompt in zip(lengths, prompts, strict=True)]
    documents = np.repeat(np.arange(len(lengths)), [len(own) for own in contexts])
    return StridedRow(
        document_ids=np.repeat(np.arange(len(lengths)), lengths),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        column_documents=np.repeat(documents, num_samples),
        contexts=np.repeat(np.concatenate(contexts), num_samples),
        num_steps=config.generate_tokens,
    )

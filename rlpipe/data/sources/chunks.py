"""Long texts in chunks, each of which is a row of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rlpipe.data.row import AnyRows, Row, UnusableRow

logger = logging.getLogger(__name__)


class ChunkedRows:
    """Rows of which some are repeated, once for each chunk of their text.

    ``count_chunks`` is called once for each row of ``indices``; a row on which it raises ``UnusableRow`` stays one row,
    which is skipped when its turn comes.
    """

    def __init__(self, rows: AnyRows, indices: Sequence[int], count_chunks: Callable[[Row], int]) -> None:
        self.name = rows.name
        self._rows = rows
        counts = np.array([self._count(index, count_chunks) for index in indices], np.int64)
        self._indices: NDArray[np.int64] = np.repeat(np.asarray(indices, np.int64), counts)
        self._counts = np.repeat(counts, counts)
        self._chunks = np.arange(len(self._indices)) - np.repeat(np.cumsum(counts) - counts, counts)
        logger.info("%s: %d texts in %d chunks", self.name, len(counts), len(self))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return self._rows[int(self._indices[index])]

    def chunk(self, index: int) -> int:
        """Return the number of the row's chunk, from 0."""
        return int(self._chunks[index])

    def location(self, index: int) -> str:
        location, count = self._rows.location(int(self._indices[index])), self._counts[index]
        return location if count == 1 else f"{location}, chunk {self._chunks[index] + 1} of {count}"

    def _count(self, index: int, count_chunks: Callable[[Row], int]) -> int:
        try:
            return count_chunks(self._rows[index])
        except UnusableRow:
            return 1

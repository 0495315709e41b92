"""Rows read block by block, from sources that need not fit into memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlpipe.data.row import CheckColumns, Row, UnusableRow, parse_object
from rlpipe.data.sources.row_source import Cursor
from rlpipe.errors import DataError

KEPT_BLOCKS = 2
"""Blocks kept in memory: the one being read, and one that the run goes back to."""


@dataclass(frozen=True, slots=True)
class StreamedRow:
    """A row and its location, as messages name it."""

    content: Row | bytes
    """A line of JSON, or the row's columns."""
    location: str


class Reader(Protocol):
    """A reader of rows in sequence; it can jump to any other row, which takes longer."""

    name: str
    num_rows: int | None
    """Number of rows; None until the end has been read, if the files do not state it."""

    def read(self, start: int, count: int) -> list[StreamedRow]:
        """Return ``count`` rows from ``start`` on, or fewer at the end."""


class StreamRows:
    """The rows of a reader in blocks of ``block_size``; raises ``DataError`` if there are none.

    The first row is checked at once. Later rows that can't be parsed, or lack a column, are unusable, because nobody
    can fix them during a run.
    """

    def __init__(self, reader: Reader, *, block_size: int, check: CheckColumns | None) -> None:
        self.name, self.block_size = reader.name, block_size
        self._reader, self._check = reader, check
        self._blocks: dict[int, list[StreamedRow]] = {}
        if not self.has(0):
            raise DataError(f"{self.name} has no rows")
        self._columns(self._streamed(0))

    @property
    def num_rows(self) -> int | None:
        """Number of rows; None while it is not known."""
        return self._reader.num_rows

    def has(self, index: int) -> bool:
        """Return whether the row exists; if it does not, ``num_rows`` is known afterwards."""
        if self.num_rows is not None:
            return index < self.num_rows
        return index % self.block_size < self.block_length(index // self.block_size)

    def block_length(self, number: int) -> int:
        return len(self._block(number))

    def __getitem__(self, index: int) -> Row:
        row = self._streamed(index)
        try:
            return self._columns(row)
        except DataError as error:
            raise UnusableRow(str(error).removeprefix(f"{row.location}: ")) from None

    def location(self, index: int) -> str:
        return self._streamed(index).location

    def _columns(self, row: StreamedRow) -> Row:
        columns = parse_object(row.content, row.location) if isinstance(row.content, bytes) else row.content
        if self._check is not None:
            self._check(columns.keys(), row.location, [name for name, value in columns.items() if value is None])
        return columns

    def _streamed(self, index: int) -> StreamedRow:
        return self._block(index // self.block_size)[index % self.block_size]

    def _block(self, number: int) -> list[StreamedRow]:
        block = self._blocks.pop(number, None)
        if block is None:
            block = self._reader.read(number * self.block_size, self.block_size)
        self._blocks[number] = block  # moved to the end of the dict: most recently used
        if len(self._blocks) > KEPT_BLOCKS:
            del self._blocks[next(iter(self._blocks))]
        return block


class BlockOrder:
    """The order of a stream's rows, block by block; with ``shuffle``, each epoch permutes each block by ``seeds``."""

    def __init__(self, rows: StreamRows, *, seeds: Sequence[int], shuffle: bool) -> None:
        self._rows, self._seeds, self._shuffle = rows, seeds, shuffle
        self._key = (-1, -1)
        self._order = np.arange(0)

    @property
    def num_rows(self) -> int | None:
        return self._rows.num_rows

    def row(self, cursor: Cursor) -> int | None:
        if min(cursor.epoch, cursor.position) < 0 or not self._rows.has(cursor.position):
            if cursor.position == self.num_rows:
                return None
            raise DataError(f"{self._rows.name} has {self.num_rows} rows, so {cursor} does not belong to this data")
        if not self._shuffle:
            return cursor.position
        number, place = divmod(cursor.position, self._rows.block_size)
        if self._key != (cursor.epoch, number):
            self._key = (cursor.epoch, number)
            random = np.random.default_rng([*self._seeds, 0, *self._key])
            self._order = random.permutation(self._rows.block_length(number))
        return number * self._rows.block_size + int(self._order[place])

    def after(self, count: int) -> Cursor:
        if self._rows.has(count):
            return Cursor(0, count)
        assert self.num_rows is not None, "its end has been read"
        return Cursor(*divmod(count, self.num_rows))

"""Readers of the rows of JSONL files, Parquet files and ``datasets`` data sets, block by block."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, Protocol

import numpy as np

from rlpipe.common.imports import describe_error
from rlpipe.data.row import CheckColumns, Row, UnusableRow, parse_object
from rlpipe.data.sources.row_source import Cursor
from rlpipe.errors import DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow


KEPT_BLOCKS = 2
"""Blocks kept in memory: the one being read, and one that the run goes back to."""
BATCH_ROWS = 1024
"""Parquet rows decoded at a time."""
CHUNK_BYTES = 1 << 20


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
        number, index = divmod(cursor.position, self._rows.block_size)
        if self._key != (cursor.epoch, number):
            self._key = (cursor.epoch, number)
            random = np.random.default_rng([*self._seeds, 0, *self._key])
            self._order = random.permutation(self._rows.block_length(number))
        return number * self._rows.block_size + int(self._order[index])

    def after(self, count: int) -> Cursor:
        if self._rows.has(count):
            return Cursor(0, count)
        assert self.num_rows is not None, "its end has been read"
        return Cursor(*divmod(count, self.num_rows))


def is_compressed(path: Path) -> bool:
    return path.suffix in (".gz", ".zst")


def open_lines(path: Path, offset: int = 0) -> BinaryIO:
    """Open a file at a byte offset, which in a compressed file counts decompressed bytes."""
    if not is_compressed(path):
        file = path.open("rb")
        file.seek(offset)
        return file
    import pyarrow

    stream = io.BufferedReader(pyarrow.input_stream(str(path)), CHUNK_BYTES)
    while offset > 0:
        passed = len(stream.read(min(offset, CHUNK_BYTES)))
        if not passed:
            raise DataError(f"{path} has become shorter since the run began: put it back, and continue")
        offset -= passed
    return stream


class _Mark(NamedTuple):
    """The offset in JSONL files at which a row, or a blank line, begins."""

    file: int
    offset: int
    line: int
    """Lines of the file before this offset."""


class JsonlReader:
    """The lines of JSONL files, without blank ones.

    The reader returns by byte offset to a row that a read has started at. To reach any other row, it counts lines from
    the last such row before it. A compressed file is decompressed from its beginning.
    """

    def __init__(self, name: str, files: Sequence[Path]) -> None:
        self.name = name
        self.num_rows: int | None = None
        self._files = files
        self._marks = {0: _Mark(0, 0, 0)}
        self._row = 0
        self._lines = self._read_lines(self._marks[0])

    def read(self, start: int, count: int) -> list[StreamedRow]:
        if start != self._row:
            self._row = max(row for row in self._marks if row <= start)
            self._lines = self._read_lines(self._marks[self._row])
            for _ in islice(self._lines, start - self._row):
                self._row += 1
        lines = list(islice(self._lines, count)) if self._row == start else []
        if lines:
            self._marks[start] = lines[0][0]
        self._row += len(lines)
        if len(lines) < count:
            self.num_rows = self._row
        return [StreamedRow(line, f"{self._files[mark.file]}, line {mark.line + 1}") for mark, line in lines]

    def _read_lines(self, start: _Mark) -> Iterator[tuple[_Mark, bytes]]:
        for number in range(start.file, len(self._files)):
            mark = start if number == start.file else _Mark(number, 0, 0)
            with naming(str(self._files[number])), open_lines(self._files[number], mark.offset) as file:
                for line in file:
                    if line.strip():
                        yield mark, line
                    mark = _Mark(number, mark.offset + len(line), mark.line + 1)


class ParquetReader:
    """The rows of Parquet files; row groups before the requested rows are not read."""

    def __init__(self, name: str, files: Sequence[Path], check: CheckColumns | None) -> None:
        self.name = name
        self._files = files
        opened = [_open_parquet(path) for path in files]
        if check is not None:
            for path, file in zip(files, opened, strict=True):
                check(file.schema_arrow.names, str(path))
        sizes = [[file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] for file in opened]
        self._groups = [(number, group) for number, groups in enumerate(sizes) for group in range(len(groups))]
        self._starts = [0, *accumulate(size for groups in sizes for size in groups)]  # of row groups
        self._file_starts = [0, *accumulate(sum(groups) for groups in sizes)]
        self.num_rows: int | None = self._starts[-1]
        self._row = 0
        self._rows = self._read_rows(0)

    def read(self, start: int, count: int) -> list[StreamedRow]:
        if start != self._row:
            self._row, self._rows = start, self._read_rows(start)
        rows = list(islice(self._rows, count))
        self._row += len(rows)
        return rows

    def _read_rows(self, start: int) -> Iterator[StreamedRow]:
        for index in range(bisect_right(self._starts, start) - 1, len(self._groups)):
            number, group = self._groups[index]
            path, first = self._files[number], self._starts[index]
            with naming(str(path)):
                for batch in _open_parquet(path).iter_batches(BATCH_ROWS, row_groups=[group]):
                    passed = min(max(start - first, 0), batch.num_rows)
                    columns_of = batch.slice(passed).to_pylist(maps_as_pydicts="lossy")
                    for row, columns in enumerate(columns_of, first + passed):
                        yield StreamedRow(columns, f"{path}, row {row - self._file_starts[number] + 1}")
                    first += batch.num_rows


def _open_parquet(path: Path) -> pyarrow.parquet.ParquetFile:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({describe_error(error)})") from None


class DatasetReader:
    """The rows of a ``datasets.IterableDataset``, with a saved state for each row that a read has started at."""

    def __init__(self, name: str, dataset: datasets.IterableDataset) -> None:
        self.name = name
        self.num_rows: int | None = None
        self._whole = self._dataset = dataset
        self._row = 0
        self._rows = iter(dataset)
        self._marks = {0: (dataset, dataset.state_dict())}

    def read(self, start: int, count: int) -> list[StreamedRow]:
        with naming(self.name):
            if start in self._marks and start != self._row:
                self._begin(*self._marks[start])
            elif start != self._row:
                self._begin(self._whole.skip(start), None)
            if start not in self._marks:  # state_dict() reflects a loaded state only once rows have been read
                self._marks[start] = (self._dataset, self._dataset.state_dict())
            rows = list(islice(self._rows, count))
            self._row = start + len(rows)
            if rows and len(rows) < count:
                self.num_rows = self._row
            elif not rows:
                self.num_rows = self._count()
        return [StreamedRow(columns, f"{self.name}, row {row + 1}") for row, columns in enumerate(rows, start)]

    def _begin(self, dataset: datasets.IterableDataset, state: dict[str, Any] | None) -> None:
        self._dataset = dataset
        if state is not None:
            dataset.load_state_dict(state)
        self._rows = iter(dataset)

    def _count(self) -> int:
        """Count the rows of the data set, after a read past its end."""
        self._begin(*self._marks[0])
        self._row = sum(1 for _ in self._rows)
        return self._row


@contextmanager
def naming(name: str) -> Iterator[None]:
    """Turn errors of the reading libraries into a one-line ``DataError`` with the name of what was read."""
    try:
        yield
    except Exception as error:
        import pyarrow  # imported here, because rows of a Parquet file need no datasets, which takes a second
        from datasets.exceptions import DatasetsError

        named = (OSError, ValueError, OverflowError, pyarrow.ArrowException, DatasetsError)
        if isinstance(error, DataError) or not isinstance(error, named):
            raise
        raise DataError(f"{name} can't be read ({describe_error(error)})") from None

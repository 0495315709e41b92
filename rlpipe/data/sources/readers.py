"""Readers of the rows of JSONL files, Parquet files and ``datasets`` data sets in sequence."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

from rlpipe.common.imports import describe_error
from rlpipe.data.row import CheckColumns
from rlpipe.data.sources.stream import StreamedRow
from rlpipe.errors import DataError

if TYPE_CHECKING:
    import datasets
    import pyarrow

BATCH_ROWS = 1024
"""Parquet rows decoded at a time."""
CHUNK_BYTES = 1 << 20


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
        offset -= len(stream.read(min(offset, CHUNK_BYTES)))
    return stream


class _Mark(NamedTuple):
    """A place in JSONL files where a row, or a blank line, begins."""

    file: int
    offset: int
    line: int
    """Lines of the file before this place."""


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
        found = list(islice(self._lines, count)) if self._row == start else []
        if found:
            self._marks[start] = found[0][0]
        self._row += len(found)
        if len(found) < count:
            self.num_rows = self._row
        return [StreamedRow(line, f"{self._files[mark.file]}, line {mark.line + 1}") for mark, line in found]

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
                    for row, columns in enumerate(batch.slice(passed).to_pylist(), first + passed):
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
            found = list(islice(self._rows, count))
            self._row = start + len(found)
            if found and len(found) < count:
                self.num_rows = self._row
            elif not found:
                self.num_rows = self._count()
        return [StreamedRow(columns, f"{self.name}, row {row + 1}") for row, columns in enumerate(found, start)]

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
    import pyarrow
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (OSError, ValueError, pyarrow.ArrowException, DatasetsError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name} can't be read ({describe_error(error)})") from None

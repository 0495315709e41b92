"""Access to the rows that a config names: local files, datasets from the hub, and mixes of them."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from rlpipe.common.hub import hub_has
from rlpipe.common.imports import describe_error
from rlpipe.configs.data_sources import MixedSource, data_files
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.formats import apply_transform
from rlpipe.data.row import AnyRows, CheckColumns, Row, Rows, find_part, parse_object
from rlpipe.data.sources.readers import (
    DatasetReader,
    JsonlReader,
    ParquetReader,
    Reader,
    StreamRows,
    is_compressed,
    naming,
    open_lines,
)
from rlpipe.errors import DataError, did_you_mean

if TYPE_CHECKING:
    import datasets
    import pyarrow
    from transformers import PreTrainedTokenizerBase


def open_rows(data: DataConfig, *, seed: int, check: CheckColumns | None = None) -> Rows:
    """Open the rows that ``data`` names.

    ``check`` is called with the columns of every JSONL line; for a table, once, and once more for each combination of
    columns that are null in a row. ``seed`` is the seed of a reasoning-gym task whose arguments set none. Raises
    ``DataError`` if the source does not exist, can't be read, or is empty.
    """
    rows: Rows
    match data.source:
        case "jsonl" | "parquet":
            rows = _open_files(data, "data.path", check)
        case "datasets":
            rows = _open_dataset(data, check)
        case "reasoning_gym":
            rows = ReasoningGymRows(data, seed)
        case _:
            raise DataError(f"data.source: unknown source {data.source!r}")
    if not len(rows):
        raise DataError(f"{rows.name} has no rows")
    return rows


def open_stream(data: DataConfig, check: CheckColumns | None = None) -> StreamRows:
    """Open the rows that ``data`` names as a stream.

    Raises ``DataError`` as ``open_rows`` does, but checks only the first row at once.
    """
    reader: Reader
    match data.source:
        case "jsonl":
            reader = JsonlReader(str(data.path), data_files(data.path, data.source, "data.path"))
        case "parquet":
            reader = ParquetReader(str(data.path), data_files(data.path, data.source, "data.path"), check)
        case "datasets":
            reader = DatasetReader(f"{data.path} ({data.split})", _load_stream(data))
        case _:
            raise DataError(f"data.streaming: source {data.source} can't be streamed")
    return StreamRows(reader, block_size=data.shuffle_rows, check=check)


def open_held_out_rows(data: DataConfig, check: CheckColumns | None = None) -> Rows:
    """Open the rows of ``held_out_data``."""
    file = held_out_data(data)
    if data.held_out.split is not None:
        return _read_all(_load_stream(file), file, check) if data.streaming else _open_dataset(file, check)
    rows = _open_files(file, "data.held_out.path", check)
    if not len(rows):
        raise DataError(f"{rows.name} has no rows")
    return rows


def held_out_data(data: DataConfig) -> DataConfig:
    """Return the config of the held-out rows: those of ``data.held_out.split``, or else of ``data.held_out.path``.

    The file is read as JSONL unless its name ends in ``.parquet``.
    """
    if data.held_out.split is not None:
        return dataclasses.replace(data, split=data.held_out.split)
    source = "parquet" if str(data.held_out.path).endswith(".parquet") else "jsonl"
    return dataclasses.replace(data, source=source, path=data.held_out.path)


def _read_all(stream: datasets.IterableDataset, data: DataConfig, check: CheckColumns | None) -> Rows:
    """Read all rows of a streamed data set into memory."""
    rows, name = list(stream), f"{data.path} ({data.split})"
    if not rows:
        raise DataError(f"{name} has no rows")
    if check is not None:
        check(rows[0].keys(), name)
    return TableRows(name, len(rows), rows.__getitem__)


class JsonlRows:
    """A file with one JSON object per line; blank lines are skipped.

    Every line is checked once. Lines are read from disk on access, except that a compressed file is kept in memory.
    """

    def __init__(self, path: Path, check: CheckColumns | None = None) -> None:
        self.name = str(path)
        self._path = path.absolute()
        self._content: bytes | None = None
        if is_compressed(path):
            with naming(str(path)), open_lines(path) as file:
                self._content = file.read()
        self._offsets, self._line_numbers = np.array(self._scan(check), np.int64).reshape(-1, 2).T

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        try:
            with self._open() as file:
                file.seek(self._offsets[index])
                return json.loads(file.readline())
        except (OSError, ValueError) as error:  # also a DataError
            changed = f"{self.location(index)} has changed since the run began ({describe_error(error)})"
            raise DataError(f"{changed}: put the file back, and continue") from None

    def location(self, index: int) -> str:
        return f"{self.name}, line {self._line_numbers[index]}"

    def _open(self) -> BinaryIO:
        if self._content is not None:
            return io.BytesIO(self._content)
        try:
            return open(self._path, "rb")
        except OSError as error:
            raise DataError(f"{self.name} can't be read ({describe_error(error)})") from None

    def _scan(self, check: CheckColumns | None) -> list[tuple[int, int]]:
        """Return the byte offset and the number, from 1, of every line that holds a row."""
        offsets, offset = [], 0
        with self._open() as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    row = parse_object(line, f"{self.name}, line {number}")
                    if check is not None:
                        nulls = [name for name, value in row.items() if value is None]
                        check(row.keys(), f"{self.name}, line {number}", nulls)
                    offsets.append((offset, number))
                offset += len(line)
        return offsets


class JoinedRows:
    """The rows of several files in sequence."""

    def __init__(self, name: str, files: Sequence[Rows]) -> None:
        self.name = name
        self._files = files
        self._ends = np.cumsum([len(rows) for rows in files])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        rows, row = self._find(index)
        return rows[row]

    def location(self, index: int) -> str:
        rows, row = self._find(index)
        return rows.location(row)

    def _find(self, index: int) -> tuple[Rows, int]:
        file, row = find_part(self._ends, index)
        return self._files[file], row


class TableRows:
    """The rows of a ``datasets.Dataset`` or a ``pyarrow.Table``."""

    def __init__(self, name: str, length: int, read: Callable[[int], Row]) -> None:
        self.name = name
        self._length = length
        self._read = read

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        with naming(self.location(index)):
            return self._read(index)

    def location(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"


class ReasoningGymRows:
    """The entries of a reasoning-gym task, with the columns that its reward needs.

    Columns: the prompt column holds the question; ``answer``; ``entry`` is the whole entry (question, answer,
    metadata), which the task's grader needs; ``reasoning_gym_task`` is the task's name.
    """

    def __init__(self, data: DataConfig, seed: int) -> None:
        self.name = f"reasoning_gym task {data.task}"
        self._task = data.task
        self._prompt_column = data.prompt_column
        self._entries = _create_task(str(data.task), {"seed": seed, **data.task_args})

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> Row:
        entry = self._entries[index]
        return {
            self._prompt_column: entry["question"],
            "answer": entry["answer"],
            "entry": entry,
            "reasoning_gym_task": self._task,
        }

    def location(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"


def _open_files(data: DataConfig, option: str, check: CheckColumns | None) -> Rows:
    files = data_files(data.path, data.source, option)
    opened: list[Rows] = [JsonlRows(p, check) if data.source == "jsonl" else _open_parquet(p, check) for p in files]
    return opened[0] if len(opened) == 1 else JoinedRows(str(data.path), opened)


def _open_parquet(path: Path, check: CheckColumns | None) -> TableRows:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({describe_error(error)})") from None
    if check is not None:
        _check_table(table, str(path), check)

    def read(index: int) -> Row:
        columns: Row = table.slice(index, 1).to_pylist(maps_as_pydicts="lossy")[0]
        return columns

    return TableRows(str(path), table.num_rows, read)


def _open_dataset(data: DataConfig, check: CheckColumns | None) -> TableRows:
    from rlpipe.data.sources.stored_media import reads_rows

    dataset = load_split(data)
    name = f"{data.path} ({data.split})"
    if check is not None:
        _check_table(dataset.data.table, name, check)
    return TableRows(name, len(dataset), reads_rows(dataset))


def _load_stream(data: DataConfig) -> datasets.IterableDataset:
    from datasets import Dataset

    from rlpipe.data.sources.stored_media import with_stored_media

    dataset = load_split(data)
    return with_stored_media(dataset.to_iterable_dataset() if isinstance(dataset, Dataset) else dataset)


def load_split(data: DataConfig) -> Any:
    """Load the ``datasets`` split that ``data`` names; raise ``DataError`` if it can't be loaded.

    Returns a ``Dataset``; with ``data.streaming`` an ``IterableDataset``, unless it was saved by ``save_to_disk``.
    """
    from datasets.exceptions import DatasetsError

    if data.path is None:
        raise DataError("data.path is not set; source datasets needs a folder or a hub id")
    try:
        return _load_dataset(data, data.path)
    except (OSError, ValueError, DatasetsError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"data.path: data set {data.path!r} can't be loaded ({describe_error(error)})") from None


def _check_table(table: pyarrow.Table, name: str, check: CheckColumns) -> None:
    """Call ``check`` with the columns, and then with the first row of each combination of nulls."""
    check(table.column_names, name)
    nullable = [column for column in table.column_names if table[column].null_count]
    if nullable:
        is_null = np.stack([table[column].is_null().to_numpy() for column in nullable], axis=1)  # [rows, columns]
        for row in np.unique(is_null, axis=0, return_index=True)[1]:
            nulls = [column for column, null in zip(nullable, is_null[row], strict=True) if null]
            check(table.column_names, f"{name}, row {row + 1}", nulls)


def _load_dataset(data: DataConfig, path: str) -> Any:
    """Load a folder that ``save_to_disk`` wrote, a data file or a folder of them, or a data set on the hub."""
    from datasets import load_dataset, load_from_disk
    from huggingface_hub.constants import HF_HUB_OFFLINE

    folder = Path(path).expanduser().absolute()  # data sets are named after their folder
    if any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        return _split_of(load_from_disk(str(folder)), data)
    if folder.is_file():  # its suffix tells the format
        return load_dataset(
            str(folder.parent), data.name, data_files=escape(folder.name), split=data.split, streaming=data.streaming
        )
    if folder.exists():
        return load_dataset(str(folder), data.name, split=data.split, streaming=data.streaming)
    if not hub_has(path, kind="dataset", option="data.path", error=DataError) and not HF_HUB_OFFLINE:
        raise DataError(
            f"data.path: {path!r} is neither a file nor a folder here, and the hub can't be reached; "
            "HF_HUB_OFFLINE=1 uses the copy in the cache"
        )
    return load_dataset(path, data.name, split=data.split, streaming=data.streaming)


def _split_of(saved: datasets.Dataset | datasets.DatasetDict, data: DataConfig) -> datasets.Dataset:
    """Return the split that the config names; a single data set is returned whole if no other split is asked for."""
    from datasets import DatasetDict

    is_held_out = data.split == data.held_out.split
    option = "data.held_out.split" if is_held_out else "data.split"
    if isinstance(saved, DatasetDict):
        if data.split not in saved:
            raise DataError(f"{option}: {data.path!r} has no split {data.split!r}; its splits are {', '.join(saved)}")
        return saved[data.split]
    by_default = data.split == DataConfig().split and not is_held_out
    if not by_default and data.split != str(saved.split):
        fix = "set data.held_out.size or data.held_out.path instead" if is_held_out else "leave data.split out"
        raise DataError(f"{option}: {data.path!r} is a single data set without a split {data.split!r}; {fix}")
    return saved


def _create_task(task: str, arguments: dict[str, Any]) -> Any:
    """Create the reasoning-gym data set; raise ``DataError`` if its name or its arguments are wrong."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        hint = f"; the closest names are {', '.join(close)}" if close else ""
        raise DataError(f"data.task: reasoning-gym has no task {task!r}{hint}")
    argument_names = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    for name in arguments.keys() - set(argument_names):
        hint = did_you_mean(name, argument_names, f"its arguments are {', '.join(argument_names)}")
        raise DataError(f"data.task_args: task {task} has no argument {name!r}{hint}")
    try:
        return reasoning_gym.create_dataset(task, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"data.task_args of task {task}: {error}") from None


SOURCE_COLUMN = "data_source"
"""The column that holds the source's name in the rows of a mix, unless they have such a column already."""


def open_source_rows(
    source: MixedSource, tokenizer: PreTrainedTokenizerBase, *, seed: int, check: CheckColumns
) -> Rows:
    """Open the rows of a source; raise ``DataError`` as ``open_rows`` and ``apply_transform`` do."""
    rows = open_rows(source.data, seed=seed, check=_check_unless_transformed(source.data, check))
    rows = apply_transform(rows, source.data, tokenizer)
    return _NamedRows(rows, source.name) if source.name else rows


def open_source_stream(
    source: MixedSource, tokenizer: PreTrainedTokenizerBase, *, check: CheckColumns
) -> tuple[StreamRows, AnyRows]:
    """Open a source as a stream; return the raw rows, and the rows after the transform.

    Raises ``DataError`` as ``open_source_rows`` does.
    """
    stream = open_stream(source.data, _check_unless_transformed(source.data, check))
    rows = apply_transform(stream, source.data, tokenizer)
    return stream, _NamedRows(rows, source.name) if source.name else rows


def open_held_out_source(data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, check: CheckColumns) -> Rows:
    """Open the rows of ``data.held_out.path`` or ``split``; raise ``DataError`` as ``open_source_rows`` does."""
    return apply_transform(open_held_out_rows(data, _check_unless_transformed(data, check)), data, tokenizer)


def with_own_images(data: DataConfig) -> DataConfig:
    """Return the config for rows of ``data.held_out.path``, whose relative image paths start at that file's folder."""
    if data.held_out.path is None or data.images_folder is not None:
        return data
    return replace(data, images_folder=str(Path(data.held_out.path).expanduser().parent))


@contextmanager
def named_errors(source: MixedSource) -> Iterator[None]:
    """Prefix the message of a ``DataError`` with the name of the mix's source."""
    try:
        yield
    except DataError as error:
        raise DataError(f"data.sources.{source.name}: {error}" if source.name else str(error)) from None


class _NamedRows:
    """Rows with the column ``SOURCE_COLUMN`` added where it is missing."""

    def __init__(self, rows: AnyRows, source: str) -> None:
        self.name = rows.name
        self._rows, self._source = rows, source

    def __len__(self) -> int:
        assert isinstance(self._rows, Sized), "a stream has no length"
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return {SOURCE_COLUMN: self._source, **self._rows[index]}

    def location(self, index: int) -> str:
        return self._rows.location(index)


def _check_unless_transformed(data: DataConfig, check: CheckColumns) -> CheckColumns | None:
    """Return the check, or None if a transform makes the columns that it would look for."""
    return check if data.transform is None else None

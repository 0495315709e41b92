"""Opens the rows of a JSONL or Parquet file, a ``datasets`` data set, or a reasoning-gym task."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from rlpipe.configs.schema_data import DataConfig
from rlpipe.data.rows import Row, Rows
from rlpipe.errors import DataError
from rlpipe.hub import hub_has
from rlpipe.imports import describe_error

if TYPE_CHECKING:
    import pyarrow


class CheckColumns(Protocol):
    """Raises ``DataError`` if the columns, found at the location, lack one that is needed; ``nulls`` are null there."""

    def __call__(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None: ...


def open_rows(data: DataConfig, *, seed: int, check: CheckColumns | None = None) -> Rows:
    """The rows that ``data`` names.

    ``check`` sees the columns of every line of JSONL; of a table once, and for each set of them that is null in a row.
    ``seed`` generates the rows of a reasoning-gym task whose arguments have none. Raises ``DataError`` if the source
    does not exist, can't be read, or is empty.
    """
    rows: Rows
    match data.source:
        case "jsonl":
            rows = JsonlRows(_existing_file(data, "data.path"), check)
        case "parquet":
            rows = _open_parquet(_existing_file(data, "data.path"), check)
        case "datasets":
            rows = _open_dataset(data, check)
        case "reasoning_gym":
            rows = ReasoningGymRows(data, seed)
        case _:
            raise DataError(f"data.source: unknown source {data.source!r}")
    if not len(rows):
        raise DataError(f"{rows.name} has no rows")
    return rows


def open_held_out_rows(data: DataConfig, check: CheckColumns | None = None) -> Rows:
    """The rows of ``data.held_out.split``, or of ``data.held_out.path``: JSONL unless it ends in ``.parquet``."""
    if data.held_out.split is not None:
        return _open_dataset(dataclasses.replace(data, split=data.held_out.split), check)
    source = "parquet" if str(data.held_out.path).endswith(".parquet") else "jsonl"
    file = dataclasses.replace(data, source=source, path=data.held_out.path)
    path = _existing_file(file, "data.held_out.path")
    rows: Rows = _open_parquet(path, check) if source == "parquet" else JsonlRows(path, check)
    if not len(rows):
        raise DataError(f"{rows.name} has no rows")
    return rows


class JsonlRows:
    """A file with one JSON object on each line; blank lines are no rows. Every line is checked once, none is kept."""

    def __init__(self, path: Path, check: CheckColumns | None = None) -> None:
        self.name = str(path)
        self._path = path.absolute()
        self._offsets, self._line_numbers = np.array(self._scan(check), np.int64).reshape(-1, 2).T

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> Row:
        with open(self._path, "rb") as file:
            file.seek(self._offsets[index])
            return json.loads(file.readline())

    def location(self, index: int) -> str:
        return f"{self.name}, line {self._line_numbers[index]}"

    def _scan(self, check: CheckColumns | None) -> list[tuple[int, int]]:
        """Byte offset and number, from 1, of every line that holds a row."""
        places, offset = [], 0
        with open(self._path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    row = _parse_object(line, f"{self.name}, line {number}")
                    if check is not None:
                        nulls = [name for name, value in row.items() if value is None]
                        check(row.keys(), f"{self.name}, line {number}", nulls)
                    places.append((offset, number))
                offset += len(line)
        return places


class TableRows:
    """The rows of a ``datasets.Dataset`` or a ``pyarrow.Table``."""

    def __init__(self, name: str, length: int, read: Callable[[int], Row]) -> None:
        self.name = name
        self._length = length
        self._read = read

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Row:
        return self._read(index)

    def location(self, index: int) -> str:
        return f"{self.name}, row {index + 1}"


class ReasoningGymRows:
    """The entries of a reasoning-gym task, with the columns that its reward needs.

    Columns: the prompt column holds the question; ``answer``; ``entry`` is the whole entry (question, answer,
    metadata), which the task's grader wants; ``reasoning_gym_task`` is the task's name.
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


def _existing_file(data: DataConfig, option: str) -> Path:
    if data.path is None:
        raise DataError(f"{option} is not set; source {data.source} needs a file")
    path = Path(data.path).expanduser()
    if not path.is_file():
        raise DataError(f"{option}: there is no file {path.absolute()}")
    return path


def _parse_object(line: bytes, location: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"{location}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{location}: a JSON object with the row's columns was expected, found {type(row).__name__}")
    return row


def _open_parquet(path: Path, check: CheckColumns | None) -> TableRows:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path, memory_map=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({describe_error(error)})") from None
    if check is not None:
        _check_table(table, str(path), check)
    return TableRows(str(path), table.num_rows, lambda index: table.slice(index, 1).to_pylist()[0])


def _open_dataset(data: DataConfig, check: CheckColumns | None) -> TableRows:
    from datasets import Dataset, DatasetDict
    from datasets.exceptions import DatasetsError

    if data.path is None:
        raise DataError("data.path is not set; source datasets needs a folder or a hub id")
    try:
        found = _load_dataset(data, data.path)
    except (OSError, ValueError, DatasetsError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"data.path: data set {data.path!r} can't be loaded ({describe_error(error)})") from None
    if isinstance(found, DatasetDict):
        if data.split not in found:
            option = "data.held_out.split" if data.split == data.held_out.split else "data.split"
            raise DataError(f"{option}: {data.path!r} has no split {data.split!r}, but {', '.join(found)}")
        found = found[data.split]
    assert isinstance(found, Dataset)
    name = f"{data.path} ({data.split})"
    if check is not None:
        _check_table(found.data.table, name, check)
    return TableRows(name, len(found), found.__getitem__)


def _check_table(table: pyarrow.Table, name: str, check: CheckColumns) -> None:
    """Shows the columns to ``check``, and then the first row of each combination of nulls."""
    check(table.column_names, name)
    nullable = [column for column in table.column_names if table[column].null_count]
    if nullable:
        is_null = np.stack([table[column].is_null().to_numpy() for column in nullable], axis=1)  # [rows, columns]
        for row in np.unique(is_null, axis=0, return_index=True)[1]:
            nulls = [column for column, null in zip(nullable, is_null[row], strict=True) if null]
            check(table.column_names, f"{name}, row {row + 1}", nulls)


def _load_dataset(data: DataConfig, path: str) -> Any:
    """A folder that ``save_to_disk`` wrote, a folder with data files, or a data set on the hub."""
    from datasets import load_dataset, load_from_disk
    from huggingface_hub.constants import HF_HUB_OFFLINE

    folder = Path(path).expanduser()
    if any((folder / marker).is_file() for marker in ("state.json", "dataset_dict.json")):
        return load_from_disk(str(folder))
    if folder.exists():
        return load_dataset(str(folder), data.name, split=data.split)
    if not hub_has(path, kind="dataset", option="data.path", error=DataError) and not HF_HUB_OFFLINE:
        raise DataError(
            f"data.path: {path!r} is no folder here, and the hub can't be reached; "
            "HF_HUB_OFFLINE=1 uses the copy in the cache"
        )
    return load_dataset(path, data.name, split=data.split)


def _create_task(task: str, arguments: dict[str, Any]) -> Any:
    """The reasoning-gym data set; raises ``DataError`` if its name or its arguments are wrong."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        close = get_close_matches(task, DATASETS, n=3, cutoff=0.4)
        hint = f"; the closest names are {', '.join(close)}" if close else ""
        raise DataError(f"data.task: reasoning-gym has no task {task!r}{hint}")
    known = [field.name for field in dataclasses.fields(DATASETS[task][1])]
    for name in arguments.keys() - set(known):
        raise DataError(f"data.task_args: task {task} has no argument {name!r}; it takes {', '.join(known)}")
    try:
        return reasoning_gym.create_dataset(task, **arguments)
    except (AssertionError, TypeError, ValueError) as error:
        raise DataError(f"data.task_args of task {task}: {error}") from None

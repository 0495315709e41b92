"""Rows of a data source, the reasons to skip one, and the values of prepared rows as bytes."""

from __future__ import annotations

import io
import json
import pickle
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

from rlpipe.common.imports import describe_error
from rlpipe.errors import DataError

Row = Mapping[str, Any]
ALLOWED_VALUES = {
    ("collections", "OrderedDict"),
    ("datetime", "date"),
    ("datetime", "datetime"),
    ("datetime", "time"),
    ("datetime", "timedelta"),
    ("datetime", "timezone"),
    ("decimal", "Decimal"),
    ("fractions", "Fraction"),
    ("uuid", "UUID"),
    ("zoneinfo", "ZoneInfo"),
    ("rlpipe.data.row", "make_array"),
    ("rlpipe.data.row", "make_number"),
    ("rlpipe.data.row", "make_objects"),
    ("rlpipe.data.row", "make_pandas_time"),
    ("rlpipe.types", "PlacedImage"),
    ("rlpipe.types", "GroundTruth"),
}
"""Classes and functions that values may use in addition to Python's own; none of them runs code.

NumPy's own are not among them: they take a dtype's flags from the file, and with wrong flags NumPy takes bytes of the
file for addresses of objects.
"""


class AnyRows(Protocol):
    """Rows that are read by number."""

    name: str
    """The source's name in messages, such as its file."""

    def __getitem__(self, index: int) -> Row: ...

    def location(self, index: int) -> str:
        """Return where a user finds the row."""


class Rows(AnyRows, Protocol):
    """A finite sequence of rows that can be read in any order."""

    def __len__(self) -> int: ...


class CheckColumns(Protocol):
    """A check that raises ``DataError`` if the columns at a location lack a needed one; ``nulls`` are null there."""

    def __call__(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None: ...


@dataclass(slots=True, frozen=True)
class RowLocation:
    """The number, epoch and location of a row."""

    row: int
    """The row's number, from 0, which is the same in every epoch."""
    epoch: int
    location: str
    chunk: int = 0
    """The number of the chunk of a long text, if ``data.long_texts`` is chunks."""


class SkipKind(StrEnum):
    """Kinds of reasons to skip a row."""

    UNRENDERABLE = "unrenderable"
    TOO_LONG = "too_long"
    HELD_OUT = "held_out"
    """The row's prompt equals a held-out one."""


@dataclass(slots=True, frozen=True)
class SkippedRow:
    """A row that is skipped, with the reason."""

    row: int
    location: str
    kind: SkipKind
    reason: str


class UnusableRow(Exception):
    """Raised while a row is read or rendered, to skip it."""

    def __init__(self, reason: str, kind: SkipKind = SkipKind.UNRENDERABLE) -> None:
        super().__init__(reason)
        self.reason = reason
        self.kind = kind


def require_columns(columns: Collection[str], needed: Sequence[str], location: str, options: str) -> None:
    """Raise ``DataError`` if one of the ``needed`` columns is missing; it suggests ``options`` to name others."""
    missing = [repr(name) for name in needed if name not in columns]
    if missing:
        existing = ", ".join(columns) or "none"
        noun = "column" if len(missing) == 1 else "columns"
        raise DataError(f"{location}: no {noun} {' and '.join(missing)}; existing columns: {existing}; set {options}")


def parse_object(line: bytes, location: str) -> dict[str, Any]:
    """Parse the row in a line of JSON; raise ``DataError`` if it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{location}: expected a JSON object with the row's columns, found {type(row).__name__}")
    return row


def find_part(ends: NDArray[np.int64], index: int) -> tuple[int, int]:
    """Return which of several parts has a row of the whole, and the row's index in it; ``ends`` are the parts' ends."""
    part = int(np.searchsorted(ends, index, side="right"))
    return part, int(index - (ends[part - 1] if part else 0))


def dump_values(value: Any, location: str) -> bytes:
    """Store ``value`` as bytes; raise ``DataError`` if it is, or holds, something that could not be read back."""
    try:
        with io.BytesIO() as file:
            _ValueWriter(file, protocol=5).dump(value)
            stored = file.getvalue()
        _ValueReader(io.BytesIO(stored)).load()
    except (pickle.PickleError, AttributeError, OverflowError, TypeError, RecursionError) as error:
        raise DataError(
            f"{location}: its columns can't be stored ({error}); leave out the column with data.transform"
        ) from None
    return stored


def load_values(stored: bytes) -> Any:
    """Return what ``dump_values`` stored; raise ``DataError`` if it is damaged, or holds anything else."""
    try:
        return _ValueReader(io.BytesIO(stored)).load()
    except Exception as error:  # noqa: BLE001 - a damaged pickle can raise any
        raise DataError(
            f"a prepared row can't be read ({describe_error(error)}): delete the prepared rows (data.cache)"
        ) from None


class _ValueWriter(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ZoneInfo) and value.key is not None:
            return ZoneInfo, (value.key,)
        if type(value).__module__.partition(".")[0] == "pandas" and type(value).__name__ in PANDAS_TIMES:
            return make_pandas_time, (type(value).__name__, value.value, value.unit, getattr(value, "tzinfo", None))
        if type(value) is not np.ndarray and not isinstance(value, np.generic):
            return NotImplemented
        if value.dtype.hasobject:
            return make_objects, (value.shape, value.ravel().tolist())
        described = np.lib.format.dtype_to_descr(value.dtype)
        if np.lib.format.descr_to_dtype(described) != value.dtype:
            raise pickle.PicklingError(f"NumPy's type {value.dtype} can't be described")
        make = make_array if isinstance(value, np.ndarray) else make_number
        return make, (described, value.shape, value.tobytes())


def make_array(described: Any, shape: tuple[int, ...], content: bytes) -> NDArray[Any]:
    """Make an array that owns its memory, of a type as ``.npy`` files describe it."""
    dtype = np.lib.format.descr_to_dtype(described)
    if dtype.hasobject:
        raise pickle.UnpicklingError("objects can't be made from their bytes")
    return np.ndarray(shape, dtype, content).copy()


def make_number(described: Any, shape: tuple[int, ...], content: bytes) -> Any:
    return make_array(described, shape, content)[()]


def make_objects(shape: tuple[int, ...], values: list[Any]) -> NDArray[Any]:
    array = np.empty(len(values), object)
    array[:] = values
    return array.reshape(shape)


PANDAS_TIMES = ("Timestamp", "Timedelta")
"""Types in which Arrow gives times in nanoseconds."""


def make_pandas_time(kind: str, nanoseconds: int, unit: str, zone: Any) -> Any:
    """Make a timestamp, from the time since 1970, or a difference of times."""
    import pandas

    if kind not in PANDAS_TIMES:
        raise pickle.UnpicklingError(f"{kind} is not a time of pandas")
    options = {"tz": zone} if kind == "Timestamp" else {}
    return getattr(pandas, kind)(nanoseconds, unit="ns", **options).as_unit(unit)


class _ValueReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED_VALUES:
            raise pickle.UnpicklingError(f"{module}.{name} is not a plain value")
        return super().find_class(module, name)

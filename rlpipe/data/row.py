"""Rows of a data source, and the reasons to skip one."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from rlpipe.errors import DataError

Row = Mapping[str, Any]


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
    UNRENDERABLE = "unrenderable"
    TOO_LONG = "too_long"
    HELD_OUT = "held_out"
    """The row's prompt equals a held-out one."""


@dataclass(slots=True, frozen=True)
class SkippedRow:
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
        there = ", ".join(columns) or "none"
        noun = "column" if len(missing) == 1 else "columns"
        raise DataError(f"{location}: no {noun} {' and '.join(missing)}; existing columns: {there}; set {options}")


def parse_object(line: bytes, location: str) -> dict[str, Any]:
    """Parse the row in a line of JSON; raise ``DataError`` if it is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{location}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataError(f"{location}: expected a JSON object with the row's columns, found {type(row).__name__}")
    return row

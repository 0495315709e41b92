"""Tables for people to read: as wide as the terminal, or plain lines if the output is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlpipe.tracking.view import format_number

LONGEST_CELL = 40


@dataclass(frozen=True, slots=True)
class Column:
    """Heading of a column, and a function for the text of a row's cell; None where the row has no value."""

    name: str
    show: Callable[[Any], str | None]
    is_text: bool = False
    """Whether the column is left-aligned, and shortened in a narrow terminal."""


def print_table(columns: Sequence[Column], rows: Sequence[Any], stream: TextIO) -> None:
    cells = [[column.show(row) or "" for column in columns] for row in rows]
    if stream.isatty():
        _print_rich(columns, cells, stream)
        return
    widths = [max(map(len, texts)) for texts in zip([column.name for column in columns], *cells, strict=True)]
    for line in [[column.name for column in columns], *cells]:
        texts = [
            text.ljust(width) if column.is_text else text.rjust(width)
            for column, text, width in zip(columns, line, widths, strict=True)
        ]
        print("  ".join(texts).rstrip(), file=stream)


def _print_rich(columns: Sequence[Column], cells: Sequence[Sequence[str]], stream: TextIO) -> None:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        if column.is_text:
            table.add_column(column.name, no_wrap=True, overflow="ellipsis")
        else:
            table.add_column(column.name, no_wrap=True, justify="right")
    for line in cells:
        table.add_row(*map(Text, line))
    Console(file=stream).print(table)


def one_line(columns: Sequence[Column], row: Any) -> str:
    """Return the cells of a row that have a value, with the names of their columns, as one line."""
    return "  ".join(f"{column.name} {text}" for column in columns if (text := column.show(row)))


def show_number(value: float | None) -> str | None:
    return None if value is None else format_number(value)


def show_count(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def show_time(seconds: float | None) -> str | None:
    """Return the local date and time of ``seconds`` since 1970."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def show_start(text: str) -> str:
    """Return as much of a text as a cell holds, in one line."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= LONGEST_CELL else f"{line[: LONGEST_CELL - 1]}…"


def printable(text: str) -> str:
    """Return a text with escapes for what would move a terminal's cursor or change its colours; keep newlines."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)

"""Says which rows are looked at: those of a source by number, those of a mix as the run takes them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile

from rlpipe.data.prompts import PromptSource, SequenceSource
from rlpipe.data.sources.order import Cursor
from rlpipe.data.sources.row_source import RowPlace


def first_rows(source: PromptSource | SequenceSource, num_rows: int) -> Iterator[RowPlace]:
    """At most so many."""
    found = (find_row(source, number) for number in range(num_rows))
    yield from (place for place in takewhile(bool, found) if place is not None)


def find_row(source: PromptSource | SequenceSource, number: int) -> RowPlace | None:
    """The row of this number, from 0; None behind the last one, which a mix does not have."""
    if source.is_mix:
        return source.at(Cursor(position=number))
    return RowPlace(0, number) if source.parts[0].has(number) else None


def all_rows(source: PromptSource | SequenceSource) -> Iterator[RowPlace]:
    """Every row once, of a mix one source after the other."""
    for index in range(len(source.parts)):
        yield from (RowPlace(index, row) for row in takewhile(source.parts[index].has, count()))

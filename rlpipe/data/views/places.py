"""Selection of rows to look at: by number for a single source, in the run's order for a mix."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile

from rlpipe.data.prompts import PromptSource, SequenceSource
from rlpipe.data.sources.order import Cursor
from rlpipe.data.sources.row_source import RowPlace


def first_rows(source: PromptSource | SequenceSource, num_rows: int) -> Iterator[RowPlace]:
    """Yield the first rows, at most ``num_rows``."""
    found = (find_row(source, number) for number in range(num_rows))
    yield from (place for place in takewhile(bool, found) if place is not None)


def find_row(source: PromptSource | SequenceSource, number: int) -> RowPlace | None:
    """Return the row of this number, from 0, or None after the last row; a mix has no last row."""
    if source.is_mix:
        return source.at(Cursor(position=number))
    return RowPlace(0, number) if source.parts[0].has(number) else None


def all_rows(source: PromptSource | SequenceSource) -> Iterator[RowPlace]:
    """Yield every row once; for a mix, source by source."""
    for index in range(len(source.parts)):
        yield from (RowPlace(index, row) for row in takewhile(source.parts[index].has, count()))

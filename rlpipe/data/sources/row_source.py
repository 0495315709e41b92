"""The rows of a run in order: shuffled epochs of one source, or a weighted mix of several."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlpipe.data.row import AnyRows, Row, RowLocation, SkipKind, SkippedRow, UnusableRow
from rlpipe.errors import DataError


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """The next row's epoch, and its position in the epoch; a mix of sources has no epochs, so that its epoch is 0."""

    epoch: int = 0
    position: int = 0


def check_num_rows(before: int | None, now: int | None, run: str = "the run") -> None:
    """Raise ``DataError`` if a run goes on with another number of rows, which changes their order."""
    if None not in (before, now) and before != now:
        raise DataError(
            f"the data has {now} rows for training, and had {before} when {run} began: put the rows back, set "
            "resume_changes=allow, or choose another output"
        )


class Order(Protocol):
    """An endless order of rows that depends on the cursor alone."""

    @property
    def num_rows(self) -> int | None:
        """Rows per epoch; None while the number is not known."""

    def row(self, cursor: Cursor) -> int | None:
        """Return the index of the row at a cursor, or None right after the last row of an epoch.

        Raises ``DataError`` for a cursor further on.
        """

    def after(self, count: int) -> Cursor:
        """Return the cursor of the row that follows the first ``count`` rows, counted over all epochs."""


class PermutedOrder:
    """The order of rows that can be read in any order; with ``shuffle``, each epoch permutes them anew by ``seeds``."""

    def __init__(self, name: str, indices: NDArray[np.int64], *, seeds: Sequence[int], shuffle: bool) -> None:
        self._name, self._indices = name, indices
        self._seeds, self._shuffle = seeds, shuffle
        self._epoch = -1
        self._rows = indices

    @property
    def num_rows(self) -> int:
        return len(self._indices)

    def row(self, cursor: Cursor) -> int | None:
        if cursor.epoch < 0 or not 0 <= cursor.position <= self.num_rows:
            raise DataError(
                f"{self._name} has {self.num_rows} rows for training, so {cursor} does not belong to this data"
            )
        if cursor.position == self.num_rows:
            return None
        if self._shuffle and cursor.epoch != self._epoch:
            self._rows = np.random.default_rng([*self._seeds, 0, cursor.epoch]).permutation(self._indices)
            self._epoch = cursor.epoch
        return int(self._rows[cursor.position])

    def after(self, count: int) -> Cursor:
        return Cursor(*divmod(count, self.num_rows))


class Mixture:
    """The assignment of the positions of a mix to its sources.

    Row k (from 0) of a source of weight w is due at time (k + 1/2) / w, and positions take rows in the order of
    these times; among rows due at the same time, the first source's comes first. So a source's rows among the first n
    are its share of n, give or take one or two, and they are a function of n alone.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = list(weights)
        self._position = 0
        self._counts = [0] * len(self._weights)

    def counts(self, position: int) -> list[int]:
        """Return the number of rows of each source before a position."""
        if not self._position <= position <= self._position + len(self._weights):
            # All of these rows come before the position, since they come before an earlier one.
            time = max(position - len(self._weights), 0) / sum(self._weights)
            self._counts = [int(time * weight) for weight in self._weights]
            self._position = sum(self._counts)
        while self._position < position:
            self._counts[self._next()] += 1
            self._position += 1
        return list(self._counts)

    def assign(self, position: int) -> tuple[int, int]:
        """Return the source of the row at a position, and the number of that source's rows before it."""
        counts = self.counts(position)
        source = self._next()
        return source, counts[source]

    def _next(self) -> int:
        times = [(count + 0.5) / weight for count, weight in zip(self._counts, self._weights, strict=True)]
        return times.index(min(times))


logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Render = Callable[[Row, RowLocation], Item]
"""A function that renders a row, and raises ``UnusableRow`` to skip it."""

NUMBER = re.compile(r"\d+")
MAX_LOGGED_SKIPS = 50
"""Skipped rows that a source logs one by one; further ones are only counted."""
MAX_KEPT_SKIPS = 200_000
"""Skipped rows remembered per part; further ones are counted again in each epoch."""
MAX_FIRST_SKIPS = 10_000
"""Skipped rows without a usable one after which a part of unknown length is given up."""


@dataclass(frozen=True, slots=True)
class SkipRecord:
    """A row that a source skipped because it can't be used."""

    at: Cursor
    prompt_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Part(Generic[Item]):
    """The rows of a source and how they are rendered; in a mix, one of several parts, with a name and a weight."""

    rows: AnyRows
    order: Order
    render: Render[Item]
    has: Callable[[int], bool]
    """Test whether a row number exists, held-out rows included."""
    name: str = ""
    """The source's name in a mix; empty without a mix."""
    weight: float = 1.0
    num_split_off: int = 0
    """Rows split off by ``data.held_out.size``."""

    is_transformed: bool = False
    """Whether ``data.transform`` makes the rows: columns that one of them lacks are not known before it is read."""

    def read(self, row: int, location: RowLocation) -> Item:
        """Read and render a row; raise ``UnusableRow`` to skip it."""
        if isinstance(self.rows, ChunkedRows):
            location = replace(location, chunk=self.rows.chunk(row))
        columns = self.rows[row]
        try:
            return self.render(columns, location)
        except DataError as error:
            if not self.is_transformed:
                raise
            raise UnusableRow(str(error)) from error


@dataclass(frozen=True, slots=True)
class RowRef:
    """A row of one of the parts, in one of its epochs."""

    part: int
    row: int
    epoch: int = 0


class RowSource(Generic[Item]):
    """An endless source of rendered rows, in an order that depends on the cursor alone.

    The rows of a single part come epoch by epoch; several named parts, each with epochs of its own, are interleaved by
    ``Mixture``. A row that can't be rendered is skipped and kept in ``skipped`` with the reason. ``next`` raises
    ``DataError`` if no row of a part is usable. After ``seek(cursor)`` the source yields again what it yielded when it
    was at ``cursor``.
    """

    def __init__(self, parts: Sequence[Part[Item]]) -> None:
        self.parts = parts
        self._mixture = Mixture([part.weight for part in parts]) if parts[0].name else None
        self._skipped: list[dict[int, SkippedRow]] = [{} for _ in parts]
        self._counts: list[Counter[SkipKind]] = [Counter() for _ in parts]
        self._usable: set[int] = set()
        """Parts with at least one usable row so far."""
        self._cursor = Cursor()
        self.last = Cursor()
        """Cursor of the item that ``next`` returned last."""
        self.skip_records: list[SkipRecord] = []
        """Rows that ``next`` skipped on the way to that item."""

    @property
    def num_rows(self) -> int | None:
        """Rows per epoch, skipped ones included; None for a mix, which has no epochs."""
        return self.parts[0].order.num_rows if self._mixture is None else None

    @property
    def name(self) -> str:
        """The source's name in messages."""
        names = [part.name for part in self.parts]
        return f"the mix of {', '.join(names)}" if self.is_mix else self.parts[0].rows.name

    @property
    def is_mix(self) -> bool:
        return self._mixture is not None

    def at(self, cursor: Cursor) -> RowRef | None:
        """Return the row at a cursor, or None right after the last row of an epoch."""
        index, source_cursor = 0, cursor
        if self._mixture is not None:
            index, count = self._mixture.assign(cursor.position)
            source_cursor = self.parts[index].order.after(count)
        row = self.parts[index].order.row(source_cursor)
        return None if row is None else RowRef(index, row, source_cursor.epoch)

    def render(self, ref: RowRef) -> Item:
        """Render a row, whether or not it comes next; raise ``UnusableRow`` if the source skips it."""
        part = self.parts[ref.part]
        prompt_id = self._prompt_id(ref.part, ref.row)
        return part.read(ref.row, RowLocation(prompt_id, ref.epoch, part.rows.location(ref.row)))

    @property
    def cursor(self) -> Cursor:
        return self._cursor

    @property
    def skipped(self) -> list[SkippedRow]:
        """The rows skipped so far, each once; at most the first ``MAX_KEPT_SKIPS`` of each part."""
        return [row for rows in self._skipped for row in rows.values()]

    @property
    def skip_counts(self) -> dict[str, int]:
        """Rows skipped so far, by ``SkipKind``."""
        return {kind.value: sum(counts[kind] for counts in self._counts) for kind in SkipKind}

    @property
    def metrics(self) -> dict[str, float]:
        """Rows skipped so far; for a mix, also each source's skipped and taken rows, and its epoch."""
        metrics = {f"rows/skipped/{kind}": float(count) for kind, count in self.skip_counts.items()}
        if self._mixture is None:
            return metrics
        counts = self._mixture.counts(self._cursor.position)
        for part, count, skipped in zip(self.parts, counts, self._counts, strict=True):
            metrics[f"rows/taken/{part.name}"] = float(count)
            metrics[f"rows/skipped/{part.name}"] = float(skipped.total())
            metrics[f"epoch/{part.name}"] = float(part.order.after(count).epoch)
        return metrics

    def seek(self, cursor: Cursor) -> None:
        """Move to ``cursor``; raise ``DataError`` if the source has no such row."""
        if self._mixture is None:
            self.parts[0].order.row(cursor)
        elif cursor.epoch != 0 or cursor.position < 0:
            raise DataError(f"a mix of sources has no epochs, so {cursor} does not belong to this data")
        self._cursor = cursor

    def next(self) -> Item:
        self.skip_records = []
        while True:
            ref = self._take()
            try:
                return self._read(ref)
            except UnusableRow as problem:
                reason = f"{problem.kind}: {problem.reason}"
                self.skip_records.append(SkipRecord(self.last, self._prompt_id(ref.part, ref.row), reason))

    def take(self, count: int) -> list[Item]:
        """Return the next ``count`` items."""
        return [self.next() for _ in range(count)]

    def examples(self) -> list[Item]:
        """Return the first item of each part; raise ``DataError`` if a part has none."""
        return [self._first(index) for index in range(len(self.parts))]

    def _first(self, index: int) -> Item:
        order, count = self.parts[index].order, 0
        while True:
            cursor = order.after(count)
            row = order.row(cursor)
            assert row is not None, "a source never runs out of rows"
            try:
                return self._read(RowRef(index, row, cursor.epoch))
            except UnusableRow:
                count += 1

    def _take(self) -> RowRef:
        """Return the next row, and move past it."""
        ref = self.at(self._cursor)
        if ref is None:
            self._cursor = Cursor(epoch=self._cursor.epoch + 1)
            ref = self.at(self._cursor)
            assert ref is not None, "an epoch has at least one row"
        self.last = self._cursor
        self._cursor = Cursor(self.last.epoch, self.last.position + 1)
        return ref

    def _read(self, ref: RowRef) -> Item:
        """Return the rendered row; raise ``UnusableRow`` if it is skipped."""
        skipped = self._skipped[ref.part].get(ref.row)
        if skipped is not None:
            self._require_usable_rows(ref.part)
            raise UnusableRow(skipped.reason, skipped.kind)
        try:
            item = self.render(ref)
        except UnusableRow as problem:
            location = self.parts[ref.part].rows.location(ref.row)
            self._skip(ref.part, SkippedRow(ref.row, location, problem.kind, problem.reason))
            raise
        self._usable.add(ref.part)
        return item

    def _prompt_id(self, index: int, row: int) -> int:
        """Return an id that is unique over all parts, whatever their lengths; with a single part, the row's index."""
        return row * len(self.parts) + index

    def _skip(self, index: int, skipped: SkippedRow) -> None:
        if len(self._skipped[index]) < MAX_KEPT_SKIPS:
            self._skipped[index][skipped.row] = skipped
        self._counts[index][skipped.kind] += 1
        number = sum(counts.total() for counts in self._counts)
        if number <= MAX_LOGGED_SKIPS:
            level = logging.INFO if skipped.kind is SkipKind.HELD_OUT else logging.WARNING
            logger.log(level, "%s is skipped: %s", skipped.location, skipped.reason)
        if number == MAX_LOGGED_SKIPS:
            logger.warning("further skipped rows of %s are counted, not logged", self.parts[index].rows.name)
        self._require_usable_rows(index)

    def _require_usable_rows(self, index: int) -> None:
        """Raise ``DataError`` if no row of a part is usable, or none of its first rows if its length is unknown."""
        part, number = self.parts[index], self._counts[index].total()
        if index not in self._usable and number >= (part.order.num_rows or MAX_FIRST_SKIPS):
            first = _most_frequent(self._skipped[index].values())
            which = f"all {number}" if part.order.num_rows else f"the first {number}"
            reason = f"{first.location} because {first.reason}"
            split_off = f"; data.held_out.size holds out {part.num_split_off} others" if part.num_split_off else ""
            raise DataError(f"{part.rows.name}: {which} rows for training are skipped, for example {reason}{split_off}")


def _most_frequent(skipped: Collection[SkippedRow]) -> SkippedRow:
    """Return the first row with the most frequent reason, where reasons that differ only in numbers are the same."""
    kinds = [NUMBER.sub("0", row.reason) for row in skipped]
    (common, _), *_ = Counter(kinds).most_common(1)
    return next(row for row, kind in zip(skipped, kinds, strict=True) if kind == common)


class ChunkedRows:
    """Rows of which some are repeated, once for each chunk of their text.

    ``count_chunks`` is called once for each row of ``indices``; a row on which it raises ``UnusableRow`` stays one row,
    which is skipped when its turn comes.
    """

    def __init__(self, rows: AnyRows, indices: Sequence[int], count_chunks: Callable[[Row], int]) -> None:
        self.name = rows.name
        self._rows = rows
        counts = np.array([self._count(index, count_chunks) for index in indices], np.int64)
        self._indices: NDArray[np.int64] = np.repeat(np.asarray(indices, np.int64), counts)
        self._counts = np.repeat(counts, counts)
        self._chunks = np.arange(len(self._indices)) - np.repeat(np.cumsum(counts) - counts, counts)
        logger.info("%s: %d texts in %d chunks", self.name, len(counts), len(self))

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Row:
        return self._rows[int(self._indices[index])]

    def chunk(self, index: int) -> int:
        """Return the number of the row's chunk, from 0."""
        return int(self._chunks[index])

    def location(self, index: int) -> str:
        location, count = self._rows.location(int(self._indices[index])), self._counts[index]
        return location if count == 1 else f"{location}, chunk {self._chunks[index] + 1} of {count}"

    def _count(self, index: int, count_chunks: Callable[[Row], int]) -> int:
        try:
            return count_chunks(self._rows[index])
        except UnusableRow:
            return 1

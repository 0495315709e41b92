"""The split of a data config's rows into training rows and held-out rows.

The same renderers render a source's training and held-out rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlpipe.configs.data_sources import MixedSource, all_sources
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.cached_rows import Rendering, find_prepared
from rlpipe.data.row import AnyRows, CheckColumns, Row, RowLocation, Rows, SkipKind, UnusableRow
from rlpipe.data.sources.open_rows import (
    held_out_data,
    named_errors,
    open_held_out_source,
    open_source_rows,
    open_source_stream,
    with_own_images,
)
from rlpipe.data.sources.readers import BlockOrder, StreamRows
from rlpipe.data.sources.row_source import (
    MAX_LOGGED_SKIPS,
    ChunkedRows,
    Mixture,
    Order,
    Part,
    PermutedOrder,
    Render,
    RowSource,
)
from rlpipe.errors import DataError
from rlpipe.types import Prompt

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Rendered = TypeVar("Rendered")

KeepOut = Callable[[Prompt], None]
"""A function that raises ``UnusableRow`` if the prompt is a held-out one."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Renderers(Generic[Item]):
    """The functions that check and render the rows of one source."""

    check: CheckColumns
    prompt: Render[Prompt]
    trained: Callable[[Row, RowLocation, KeepOut | None], Item]
    """Render a row for training, after passing its prompt to ``KeepOut`` if there is one."""
    count_chunks: Callable[[Row], int] | None = None
    """Count the chunks of a row's text, each of which is trained; None if rows are not cut into chunks."""

    def excluding(self, keep_out: KeepOut | None) -> Render[Item]:
        return lambda row, at: self.trained(row, at, keep_out)


class Split(Generic[Item]):
    """The training rows and the held-out rows of a data config.

    If ``require_usable_rows``, data without a usable row fails at once.
    """

    def __init__(
        self,
        data: DataConfig,
        rendering: Rendering,
        renderers_of: Callable[[DataConfig], Renderers[Item]],
        seed: int,
        *,
        require_usable_rows: bool,
    ) -> None:
        self._seed = seed
        self._require_usable_rows = require_usable_rows
        self._sources = [
            _Source.open(source, number, seed, renderers_of(source.data), rendering)
            for number, source in enumerate(all_sources(data))
        ]
        self._held: list[tuple[_Source[Item], list[int]]] = []
        """Held-out rows by source."""
        self.held_out: list[Prompt] = []
        if data.held_out.path is not None or data.held_out.split is not None:
            held = _Source.open_held_out(data, renderers_of(with_own_images(data)), rendering, seed)
            self._hold_out(held, held.indices.tolist(), len(held.indices))
        elif data.held_out.size:
            self._split_off(data.held_out.size)
        self._keys = {_key(prompt) for prompt in self.held_out}

    def source(self) -> RowSource[Item]:
        """Return the source of training rows."""
        keep_out = self._keep_out if self.held_out else None
        rows = RowSource([source.training_part(keep_out, self._seed) for source in self._sources])
        if self._require_usable_rows:
            rows.examples()
        return rows

    def render_held_out(self) -> list[Item]:
        """Render the held-out rows as training rows are rendered."""
        return [
            item
            for source, rows in self._held
            for item, _ in self._read(source, rows, len(rows), source.renderers.excluding(None))
        ]

    def _keep_out(self, prompt: Prompt) -> None:
        if _key(prompt) in self._keys:
            raise UnusableRow("its prompt is held out for evaluation", SkipKind.HELD_OUT)

    def _split_off(self, size: int) -> None:
        """Split off ``size`` rows; from each source of a mix, as many as it has in the mix's first ``size`` rows."""
        shares = Mixture([source.weight for source in self._sources]).counts(size)
        for source, share in zip(self._sources, shares, strict=True):
            order = np.random.default_rng([*source.seeds(self._seed), 1]).permutation(source.indices).tolist()
            # Unusable rows stay in the training source, which warns about them.
            rows = self._hold_out(source, order, share, level=logging.INFO) if share else []
            source.indices = np.setdiff1d(source.indices, rows)
            source.num_split_off = len(rows)
            if (rows or self._require_usable_rows) and (len(rows) < share or not len(source.indices)):
                requested = f"{share} of the {size} rows, by weight," if source.name else f"{size} rows"
                usable = f"which has {len(order)} rows, of which {len(rows)} can be held out"
                fix = "set it lower" if source.name else f"set it below {len(rows)}"
                raise DataError(
                    f"data.held_out.size: {requested} must come from {source.rows.name}, {usable}; {fix}, so that some "
                    "are left to train on"
                )

    def _hold_out(
        self, source: _Source[Item], order: Iterable[int], count: int, *, level: int = logging.WARNING
    ) -> list[int]:
        rendered = self._read(source, order, count, source.renderers.prompt, level)
        rows = [row for _, row in rendered]
        self._held.append((source, rows))
        self.held_out += [prompt for prompt, _ in rendered]
        return rows

    def _read(
        self,
        source: _Source[Item],
        order: Iterable[int],
        count: int,
        render: Render[Rendered],
        level: int = logging.WARNING,
    ) -> list[tuple[Rendered, int]]:
        """Return the first ``count`` rows of ``order`` that can be rendered, with their numbers; log the others."""
        rendered: list[tuple[Rendered, int]] = []
        part, reason, num_skipped = source.part(render, 0), "", 0
        for row in order:
            location = source.rows.location(row)
            try:
                rendered.append((part.read(row, RowLocation(row=row, epoch=0, location=location)), row))
            except UnusableRow as problem:
                reason = reason or f"{location} because {problem.reason}"
                num_skipped += 1
                if num_skipped <= MAX_LOGGED_SKIPS:
                    logger.log(level, "%s can't be held out: %s", location, problem.reason)
            if len(rendered) == count:
                break
        if num_skipped > MAX_LOGGED_SKIPS:
            logger.log(level, "%d rows of %s can't be held out in all", num_skipped, source.rows.name)
        if not rendered and self._require_usable_rows:
            raise DataError(
                f"data.held_out: none of the rows of {source.rows.name} can be held out, for example {reason}"
            )
        return rendered


@dataclass(kw_only=True, slots=True)
class _Source(Generic[Item]):
    """The rows of a config, or of one source of a mix."""

    name: str
    """The source's name in a mix; empty without a mix."""
    weight: float
    data: DataConfig
    renderers: Renderers[Item]
    rows: AnyRows
    has: Callable[[int], bool]
    """Test whether a row number exists."""
    indices: NDArray[np.int64]
    """Numbers of the training rows; empty for a stream."""
    stream: StreamRows | None = None
    number: int = 0
    num_split_off: int = 0
    """Rows removed from ``indices`` by ``data.held_out.size``."""

    @classmethod
    def open(
        cls, source: MixedSource, number: int, seed: int, renderers: Renderers[Item], rendering: Rendering
    ) -> _Source[Item]:
        data, tokenizer, check = source.data, rendering.tokenizer, renderers.check
        make = partial(cls, name=source.name, weight=source.weight, data=data, renderers=renderers, number=number)
        with named_errors(source):
            if data.streaming:
                stream, streamed = open_source_stream(source, tokenizer, check=check)
                return make(rows=streamed, has=stream.has, indices=np.arange(0), stream=stream)
            prepared = find_prepared(data, data, rendering, name=source.name, seed=seed)
            rows = prepared or open_source_rows(source, tokenizer, seed=seed, check=check)
            return make(rows=rows, has=_reaches(rows), indices=np.arange(len(rows)))

    @classmethod
    def open_held_out(
        cls, data: DataConfig, renderers: Renderers[Item], rendering: Rendering, seed: int
    ) -> _Source[Item]:
        held_out = with_own_images(data)
        prepared = find_prepared(held_out, held_out_data(data), rendering, name="", seed=seed)
        rows = prepared or open_held_out_source(data, rendering.tokenizer, check=renderers.check)
        return cls(
            name="",
            weight=1.0,
            data=held_out,
            renderers=renderers,
            rows=rows,
            has=_reaches(rows),
            indices=np.arange(len(rows)),
        )

    def seeds(self, seed: int) -> list[int]:
        """Return the seeds of the order; each source of a mix has its own, so that parallel sources differ in order."""
        return [seed, self.number] if self.name else [seed]

    def part(self, render: Render[Rendered], seed: int) -> Part[Rendered]:
        order = self._order(seed)
        return Part(
            rows=self.rows,
            order=order,
            render=render,
            has=self.has,
            name=self.name,
            weight=self.weight,
            num_split_off=self.num_split_off,
            is_transformed=self.data.transform is not None,
        )

    def training_part(self, keep_out: KeepOut | None, seed: int) -> Part[Item]:
        part = self.part(self.renderers.excluding(keep_out), seed)
        if self.renderers.count_chunks is None or not len(self.indices):
            return part
        rows = ChunkedRows(self.rows, self.indices.tolist(), self.renderers.count_chunks)
        order = PermutedOrder(rows.name, np.arange(len(rows)), seeds=self.seeds(seed), shuffle=self.data.shuffle)
        return replace(part, rows=rows, order=order, has=_reaches(rows))

    def _order(self, seed: int) -> Order:
        seeds, shuffle = self.seeds(seed), self.data.shuffle
        if self.stream is not None:
            return BlockOrder(self.stream, seeds=seeds, shuffle=shuffle)
        return PermutedOrder(self.rows.name, self.indices, seeds=seeds, shuffle=shuffle)


def _reaches(rows: Rows) -> Callable[[int], bool]:
    return lambda row: row < len(rows)


def _key(prompt: Prompt) -> tuple[bytes, ...]:
    if not len(prompt.token_ids):  # a row for an environment
        return (json.dumps(prompt.task, sort_keys=True, default=repr).encode(),)
    return (prompt.token_ids.tobytes(), *(image.content for image in prompt.images))

"""Opens the sources of prompts and SFT sequences, and the held-out prompts that neither ever yields."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlpipe.configs.schema_data import DataConfig
from rlpipe.configs.schema_ebft import EbftConfig
from rlpipe.configs.sources import MixedSource, all_sources
from rlpipe.data.chat import PromptRenderer, SequenceRenderer
from rlpipe.data.mixture import Mixture
from rlpipe.data.order import Order, PermutedOrder
from rlpipe.data.prepared.key import Rendering
from rlpipe.data.prepared.reading import PreparedRow, find_prepared, prompt_settings, sequence_settings
from rlpipe.data.processor import ImageProcessor
from rlpipe.data.row_source import Part, Render, RowSource
from rlpipe.data.rows import AnyRows, CheckColumns, Place, Row, Rows, SkipKind, UnusableRow
from rlpipe.data.source_rows import (
    named_errors,
    open_held_out_source,
    open_source_rows,
    open_source_stream,
    with_own_images,
)
from rlpipe.data.sources import held_out_data
from rlpipe.data.stream import BlockOrder, StreamRows
from rlpipe.data.truth import TruthRenderer
from rlpipe.errors import DataError
from rlpipe.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Item = TypeVar("Item")

PromptsOf = Callable[[DataConfig], tuple[CheckColumns, Render[Prompt]]]
PromptSource = RowSource[Prompt]
SequenceSource = RowSource[Rollout]


def open_prompts(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    ebft: EbftConfig | None = None,
    processor: ImageProcessor | None = None,
    tried: bool = True,
) -> tuple[PromptSource, list[Prompt]]:
    """The source of training prompts, and the held-out prompts; with ``ebft``, only rows with a ground truth.

    Held-out are the rows of ``data.held_out.path`` or ``data.held_out.split``, or ``data.held_out.size`` rows that
    ``seed`` splits off. A training row whose rendered prompt equals a held-out one is skipped. Raises ``DataError`` if
    the data can't be read, lacks a column, or, unless it is not ``tried``, yields no prompt.
    """

    def renderer_of(data: DataConfig) -> tuple[CheckColumns, Render[Prompt]]:
        renderer = PromptRenderer(tokenizer, data, processor)
        truth = None if ebft is None else TruthRenderer(tokenizer, data, ebft)

        def render(row: Row, place: Place) -> Prompt:
            if isinstance(row, PreparedRow):
                return row.prompt(place)
            prompt = renderer.render(row, place)
            return prompt if truth is None else truth.prepare(prompt)

        return renderer.check, render

    rendering = Rendering(tokenizer=tokenizer, processor=processor, settings=prompt_settings(ebft))
    split = _Split(data, rendering, renderer_of, seed, tried=tried)

    def trained(data: DataConfig) -> Render[Prompt]:
        _, render_any = renderer_of(data)

        def render(row: Row, place: Place) -> Prompt:
            prompt = render_any(row, place)
            split.keep_out(prompt)
            return prompt

        return render

    return split.source(trained), split.held_out


def open_sft_rows(
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    max_tokens: int,
    processor: ImageProcessor | None = None,
    tried: bool = True,
) -> tuple[SequenceSource, list[Rollout]]:
    """The source of SFT sequences of at most ``max_tokens`` tokens, and the held-out ones.

    With the same ``data`` and ``seed`` the held-out rows are those of ``open_prompts``. A conversation's prompt is what
    stands before its first assistant turn, a text's all of it; a row that makes no prompt can't be held out, and is
    trained if it makes a sequence. Raises ``DataError`` as ``open_prompts`` does.
    """

    def renderer_of(data: DataConfig) -> SequenceRenderer:
        return SequenceRenderer(tokenizer, data, max_tokens=max_tokens, processor=processor)

    def prompts_of(data: DataConfig) -> tuple[CheckColumns, Render[Prompt]]:
        renderer = renderer_of(data)

        def render(row: Row, place: Place) -> Prompt:
            return row.sequence_prompt(place) if isinstance(row, PreparedRow) else renderer.prompt(row, place)

        return renderer.check, render

    def sequences_of(data: DataConfig) -> Render[Rollout]:
        renderer = renderer_of(data)

        def render(row: Row, place: Place) -> Rollout:
            found = row.sequence() if isinstance(row, PreparedRow) else renderer.whole(row, place)
            encoded, loss_mask, task = found
            return renderer.fit(encoded, loss_mask, task, place)

        return render

    rendering = Rendering(tokenizer=tokenizer, processor=processor, settings=sequence_settings(data))
    split = _Split(data, rendering, prompts_of, seed, tried=tried)

    def trained(data: DataConfig) -> Render[Rollout]:
        _, render_prompt = prompts_of(data)
        render_any = sequences_of(data)

        def render(row: Row, place: Place) -> Rollout:
            if split.held_out:
                try:
                    prompt = render_prompt(row, place)
                except UnusableRow:
                    pass  # what makes no prompt equals none, and may be a sequence nevertheless
                else:
                    split.keep_out(prompt)
            return render_any(row, place)

        return render

    return split.source(trained), split.render_held_out(sequences_of)


class _Split:
    """The rows of a data config, and its held-out prompts.

    ``prompts_of`` gives a source's check of columns, and what renders its prompts. If it is ``tried``, data of which no
    row can be used fails at once.
    """

    def __init__(
        self,
        data: DataConfig,
        rendering: Rendering,
        prompts_of: PromptsOf,
        seed: int,
        *,
        tried: bool,
    ) -> None:
        self._seed = seed
        self._tried = tried
        self._prompts_of = prompts_of
        self._sources = [
            _Source.open(source, number, seed, prompts_of(source.data)[0], rendering)
            for number, source in enumerate(all_sources(data))
        ]
        self._held: list[tuple[_Source, list[int]]] = []
        """Held-out rows by source."""
        self.held_out: list[Prompt] = []
        if data.held_out.path is not None or data.held_out.split is not None:
            held = _Source.open_held_out(data, prompts_of(data)[0], rendering, seed)
            self._hold_out(held, held.indices.tolist(), len(held.indices))
        elif data.held_out.size:
            self._split_off(data.held_out.size)
        self._keys = {_key(prompt) for prompt in self.held_out}

    def keep_out(self, prompt: Prompt) -> None:
        """Raises ``UnusableRow`` if the prompt is a held-out one."""
        if _key(prompt) in self._keys:
            raise UnusableRow("its prompt is held out for evaluation", SkipKind.HELD_OUT)

    def render_held_out(self, render_of: Callable[[DataConfig], Render[Item]]) -> list[Item]:
        """The held-out rows, rendered as something else than prompts."""
        return [
            item
            for source, rows in self._held
            for item, _ in self._render_held_out(source, rows, len(rows), render_of(source.data))
        ]

    def source(self, render_of: Callable[[DataConfig], Render[Item]]) -> RowSource[Item]:
        """The training rows."""
        source = RowSource([opened.part(render_of(opened.data), self._seed) for opened in self._sources])
        if self._tried:
            source.examples()
        return source

    def _split_off(self, size: int) -> None:
        """Of several sources, as many rows of each as the first ``size`` places of the mix have."""
        shares = Mixture([source.weight for source in self._sources]).counts(size)
        for source, share in zip(self._sources, shares, strict=True):
            order = np.random.default_rng([*source.seeds(self._seed), 1]).permutation(source.indices).tolist()
            # Its other rows stay in the training source, which tells about them.
            rows = self._hold_out(source, order, share, level=logging.INFO) if share else []
            source.indices = np.setdiff1d(source.indices, rows)
            source.num_split_off = len(rows)
            if (rows or self._tried) and (len(rows) < share or not len(source.indices)):
                wanted = f"{share} of the {size} rows, by weight," if source.name else f"{size} rows"
                usable = f"of whose {len(order)} rows {len(rows)} can be held out"
                fix = "set it lower" if source.name else f"set it below {len(rows)}"
                raise DataError(
                    f"data.held_out.size: {wanted} are to come from {source.rows.name}, {usable}; {fix}, so that some "
                    "are left to train on"
                )

    def _hold_out(
        self, source: _Source, order: Iterable[int], count: int, *, level: int = logging.WARNING
    ) -> list[int]:
        found = self._render_held_out(source, order, count, self._prompts_of(source.data)[1], level)
        rows = [row for _, row in found]
        self._held.append((source, rows))
        self.held_out += [prompt for prompt, _ in found]
        return rows

    def _render_held_out(
        self,
        source: _Source,
        order: Iterable[int],
        count: int,
        render: Render[Item],
        level: int = logging.WARNING,
    ) -> list[tuple[Item, int]]:
        """The first ``count`` rows of ``order`` that can be rendered, with their numbers; the others are logged."""
        found: list[tuple[Item, int]] = []
        part, reason = source.part(render, 0), ""
        for row in order:
            location = source.rows.location(row)
            try:
                found.append((part.read(row, Place(row=row, epoch=0, location=location)), row))
            except UnusableRow as problem:
                reason = reason or f"{location} because {problem.reason}"
                logger.log(level, "%s can't be held out: %s", location, problem.reason)
            if len(found) == count:
                break
        if not found and self._tried:
            raise DataError(f"data.held_out: none of the rows of {source.rows.name} can be held out, {reason}")
        return found


@dataclass(kw_only=True, slots=True)
class _Source:
    """The rows of a config, or of one of the sources of a mix."""

    name: str
    """Empty where there is no mix."""
    weight: float
    data: DataConfig
    rows: AnyRows
    has: Callable[[int], bool]
    """Whether there is a row of this number."""
    indices: NDArray[np.int64]
    """Of the rows that are trained on, unless they are a stream's."""
    stream: StreamRows | None = None
    number: int = 0
    num_split_off: int = 0
    """Rows that ``data.held_out.size`` took out of ``indices``."""

    @classmethod
    def open(cls, source: MixedSource, number: int, seed: int, check: CheckColumns, rendering: Rendering) -> _Source:
        data, tokenizer = source.data, rendering.tokenizer
        make = partial(cls, name=source.name, weight=source.weight, data=data, number=number)
        with named_errors(source):
            if data.streaming:
                stream, streamed = open_source_stream(source, tokenizer, check=check)
                return make(rows=streamed, has=stream.has, indices=np.arange(0), stream=stream)
            prepared = find_prepared(data, data, rendering, name=source.name, seed=seed)
            rows = prepared or open_source_rows(source, tokenizer, seed=seed, check=check)
            return make(rows=rows, has=_reaches(rows), indices=np.arange(len(rows)))

    @classmethod
    def open_held_out(cls, data: DataConfig, check: CheckColumns, rendering: Rendering, seed: int) -> _Source:
        own = with_own_images(data)
        prepared = find_prepared(own, held_out_data(data), rendering, name="", seed=seed)
        rows = prepared or open_held_out_source(data, rendering.tokenizer, check=check)
        return cls(name="", weight=1.0, data=own, rows=rows, has=_reaches(rows), indices=np.arange(len(rows)))

    def seeds(self, seed: int) -> list[int]:
        """Another order for each source of a mix, so that parallel ones do not go hand in hand."""
        return [seed, self.number] if self.name else [seed]

    def part(self, render: Render[Item], seed: int) -> Part[Item]:
        order = self._order(seed)
        return Part(
            rows=self.rows,
            order=order,
            render=render,
            has=self.has,
            name=self.name,
            weight=self.weight,
            num_split_off=self.num_split_off,
        )

    def _order(self, seed: int) -> Order:
        seeds, shuffle = self.seeds(seed), self.data.shuffle
        if self.stream is not None:
            return BlockOrder(self.stream, seeds=seeds, shuffle=shuffle)
        return PermutedOrder(self.rows.name, self.indices, seeds=seeds, shuffle=shuffle)


def _reaches(rows: Rows) -> Callable[[int], bool]:
    return lambda row: row < len(rows)


def _key(prompt: Prompt) -> tuple[bytes, ...]:
    return (prompt.token_ids.tobytes(), *(image.content for image in prompt.images))

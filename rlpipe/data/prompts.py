"""Endless, resumable sources of prompts and SFT sequences, and the held-out prompts that neither ever yields."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rlpipe.configs.schema_data import DataConfig
from rlpipe.data.chat import PromptRenderer, SequenceRenderer
from rlpipe.data.rows import Place, Row, Rows, SkipKind, SkippedRow, UnusableRow
from rlpipe.data.sources import CheckColumns, open_held_out_rows, open_rows
from rlpipe.data.transforms import apply_transform
from rlpipe.data.truth import TruthRenderer
from rlpipe.errors import DataError
from rlpipe.types import Prompt, Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Item = TypeVar("Item")
Render = Callable[[Row, Place], Item]
"""Raises ``UnusableRow`` for a row to skip."""

MAX_LOGGED_SKIPS = 50
"""Skipped rows that a source logs one by one; all are in ``skipped``."""


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """Where a source stands: the next entry of the epoch's order."""

    epoch: int = 0
    position: int = 0


@dataclass(frozen=True, slots=True)
class Passed:
    """A row that a source passed over, because it can't be used."""

    at: Cursor
    prompt_id: int
    reason: str


class RowSource(Generic[Item]):
    """Rendered rows without end, each epoch in an order of its own that ``seed`` determines.

    A row that can't be rendered is skipped and kept in ``skipped`` with the reason. ``next`` raises ``DataError`` if
    no row is left. After ``seek(cursor)`` the source yields again what it yielded when ``cursor`` was its own.
    """

    def __init__(
        self, rows: Rows, render: Render[Item], *, indices: NDArray[np.int64], seed: int, shuffle: bool
    ) -> None:
        self._rows = rows
        self._render = render
        self._indices = indices
        self._seed = seed
        self._shuffle = shuffle
        self._skipped: dict[int, SkippedRow] = {}
        self._order = self._epoch_order(0)
        self._epoch = self._position = 0
        self.last = Cursor()
        """Where the item stands that ``next`` gave last."""
        self.passed_over: list[Passed] = []
        """The rows that it passed over on the way there."""

    def __len__(self) -> int:
        """Rows of an epoch, skipped ones included."""
        return len(self._indices)

    def __iter__(self) -> Iterator[Item]:
        return self

    def __next__(self) -> Item:
        return self.next()

    @property
    def cursor(self) -> Cursor:
        return Cursor(epoch=self._epoch, position=self._position)

    @property
    def skipped(self) -> list[SkippedRow]:
        """Every row skipped so far, once."""
        return list(self._skipped.values())

    @property
    def skip_counts(self) -> dict[str, int]:
        """Rows skipped so far, by ``SkipKind``."""
        counts = Counter(row.kind for row in self._skipped.values())
        return {kind.value: counts[kind] for kind in SkipKind}

    def seek(self, cursor: Cursor) -> None:
        """Goes to ``cursor``; raises ``DataError`` if the source is too short to have been there."""
        if cursor.epoch < 0 or not 0 <= cursor.position <= len(self):
            raise DataError(f"{self._rows.name} has {len(self)} rows for training, so {cursor} is not of this data")
        if cursor.epoch != self._epoch:
            self._order = self._epoch_order(cursor.epoch)
        self._epoch, self._position = cursor.epoch, cursor.position

    def next(self) -> Item:
        self.passed_over = []
        while True:
            if self._position == len(self._order):
                self.seek(Cursor(epoch=self._epoch + 1))
            self.last = self.cursor
            row = int(self._order[self._position])
            self._position += 1
            if row not in self._skipped:
                try:
                    return render_row(self._rows, row, self._epoch, self._render)
                except UnusableRow as problem:
                    self._skip(row, problem)
            skipped = self._skipped[row]
            self.passed_over.append(Passed(at=self.last, prompt_id=row, reason=f"{skipped.kind}: {skipped.reason}"))

    def peek(self) -> Item:
        """The next item, which stays the next."""
        cursor = self.cursor
        item = self.next()
        self.seek(cursor)
        return item

    def take(self, count: int) -> list[Item]:
        """The next ``count`` items."""
        return [self.next() for _ in range(count)]

    def _epoch_order(self, epoch: int) -> NDArray[np.int64]:
        return (
            np.random.default_rng([self._seed, 0, epoch]).permutation(self._indices) if self._shuffle else self._indices
        )

    def _skip(self, row: int, problem: UnusableRow) -> None:
        skipped = SkippedRow(row, self._rows.location(row), problem.kind, problem.reason)
        self._skipped[row] = skipped
        if len(self._skipped) <= MAX_LOGGED_SKIPS:
            level = logging.INFO if problem.kind is SkipKind.HELD_OUT else logging.WARNING
            logger.log(level, "%s is skipped: %s", skipped.location, skipped.reason)
        if len(self._skipped) == MAX_LOGGED_SKIPS:
            logger.warning("further skipped rows of %s are counted, not logged", self._rows.name)
        if len(self._skipped) == len(self):
            first = next(iter(self._skipped.values()))
            reason = f"{first.location} because {first.reason}"
            raise DataError(f"{self._rows.name}: all {len(self)} rows for training are skipped, {reason}")


PromptSource = RowSource[Prompt]
SequenceSource = RowSource[Rollout]


def open_prompts(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, truth: TruthRenderer | None = None
) -> tuple[PromptSource, list[Prompt]]:
    """The source of training prompts, and the held-out prompts; with ``truth``, only rows that have one.

    Held-out are the rows of ``data.held_out.path`` or ``data.held_out.split``, or ``data.held_out.size`` rows that
    ``seed`` splits off. A training row whose rendered prompt equals a held-out one is skipped. Raises ``DataError`` if
    the data can't be read, lacks a column, or yields no prompt.
    """
    renderer = PromptRenderer(tokenizer, data)

    def render_any(row: Row, place: Place) -> Prompt:
        prompt = renderer.render(row, place)
        return prompt if truth is None else truth.prepare(prompt)

    split = _Split(data, tokenizer, renderer.check, render_any, seed)

    def render(row: Row, place: Place) -> Prompt:
        prompt = render_any(row, place)
        split.keep_out(prompt)
        return prompt

    return split.source(render), split.held_out


def open_sft_rows(
    data: DataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int, max_tokens: int
) -> tuple[SequenceSource, list[Rollout]]:
    """The source of SFT sequences of at most ``max_tokens`` tokens, and the held-out ones.

    With the same ``data`` and ``seed`` the held-out rows are those of ``open_prompts``. A conversation's prompt is what
    stands before its first assistant turn, a text's all of it. Raises ``DataError`` as ``open_prompts`` does.
    """
    renderer = SequenceRenderer(tokenizer, data, max_tokens=max_tokens)
    split = _Split(data, tokenizer, renderer.check, renderer.prompt, seed)

    def render(row: Row, place: Place) -> Rollout:
        if split.held_out:
            split.keep_out(renderer.prompt(row, place))
        return renderer.render(row, place)

    return split.source(render), split.render_held_out(renderer.render)


class _Split:
    """The rows of a data config, and its held-out prompts."""

    def __init__(
        self,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        check: CheckColumns,
        render_prompt: Render[Prompt],
        seed: int,
    ) -> None:
        self._data = data
        self._seed = seed
        known = check if data.transform is None else None  # a transform makes the columns that are needed
        self._rows = apply_transform(open_rows(data, seed=seed, check=known), data, tokenizer)
        self._indices = np.arange(len(self._rows))
        self.held_out: list[Prompt] = []
        self._held_out_rows = self._rows
        if data.held_out.path is not None or data.held_out.split is not None:
            rows = self._held_out_rows = apply_transform(open_held_out_rows(data, known), data, tokenizer)
            self.held_out = _render_held_out(rows, range(len(rows)), len(rows), render_prompt)
        elif data.held_out.size:
            order = np.random.default_rng([seed, 1]).permutation(self._indices)
            self.held_out = _render_held_out(self._rows, order.tolist(), data.held_out.size, render_prompt)
            self._indices = np.setdiff1d(self._indices, [prompt.prompt_id for prompt in self.held_out])
        self._keys = {prompt.token_ids.tobytes() for prompt in self.held_out}

    def keep_out(self, prompt: Prompt) -> None:
        """Raises ``UnusableRow`` if the prompt is a held-out one."""
        if prompt.token_ids.tobytes() in self._keys:
            raise UnusableRow("its prompt is held out for evaluation", SkipKind.HELD_OUT)

    def render_held_out(self, render: Render[Item]) -> list[Item]:
        """The held-out rows, rendered as something else than prompts."""
        if not self.held_out:
            return []
        order = [prompt.prompt_id for prompt in self.held_out]
        return _render_held_out(self._held_out_rows, order, len(order), render)

    def source(self, render: Render[Item]) -> RowSource[Item]:
        """The training rows; the first one is tried at once, so that data which can't be used fails here."""
        if not len(self._indices):
            raise DataError(
                f"data.held_out.size: {self._data.held_out.size} of {len(self._rows)} rows of {self._rows.name} "
                "leave none to train on"
            )
        source = RowSource(self._rows, render, indices=self._indices, seed=self._seed, shuffle=self._data.shuffle)
        source.peek()
        return source


def render_row(rows: Rows, row: int, epoch: int, render: Render[Item]) -> Item:
    """The rendered row; raises ``UnusableRow`` to skip it."""
    return render(rows[row], Place(row=row, epoch=epoch, location=rows.location(row)))


def _render_held_out(rows: Rows, order: Iterable[int], count: int, render: Render[Item]) -> list[Item]:
    """The first ``count`` rows of ``order`` that can be rendered; the others are logged."""
    items: list[Item] = []
    for row in order:
        try:
            items.append(render_row(rows, row, 0, render))
        except UnusableRow as problem:
            logger.warning("%s can't be held out: %s", rows.location(row), problem.reason)
        if len(items) == count:
            break
    if not items:
        raise DataError(f"{rows.name}: none of its rows can be held out, as none can be rendered")
    return items

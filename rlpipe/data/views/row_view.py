"""Rows as the run renders them, to show people what is trained on, cut, or skipped and why."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlpipe.data.prompts import PromptSource, SequenceSource
from rlpipe.data.row import UnusableRow
from rlpipe.data.sources.row_source import RowPlace
from rlpipe.data.views.pieces import TextPiece, split_row
from rlpipe.types import Prompt, Rollout, RolloutStatus

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True, slots=True, frozen=True)
class ShownRow:
    name: str
    """The row's number and location."""
    summary: str
    """The row's token counts, or the reason why it is skipped."""
    pieces: list[TextPiece]
    """The row's text; empty for a skipped row."""

    @property
    def title(self) -> str:
        return f"{self.name}: {self.summary}"


def show_rows(
    source: PromptSource | SequenceSource, tokenizer: PreTrainedTokenizerBase, places: Iterable[RowPlace]
) -> Iterator[ShownRow]:
    """Yield the rows at these places, as the source renders them."""
    for place in places:
        part = source.parts[place.part]
        of = f" of {part.name}" if part.name else ""
        name = f"row {place.row}{of} ({part.rows.location(place.row)})"
        try:
            item = source.render(place)
        except UnusableRow as problem:
            yield ShownRow(name=name, summary=f"skipped, {problem.kind}: {problem.reason}", pieces=[])
            continue
        trained = np.zeros(len(item.token_ids), np.bool_) if isinstance(item, Prompt) else item.loss_mask
        pieces = split_row(item.token_ids, trained, tokenizer, item.images)
        yield ShownRow(name=name, summary=_summary(item), pieces=pieces)


def _summary(item: Prompt | Rollout) -> str:
    images = f", {len(item.images)} image{'s' if len(item.images) > 1 else ''}" if item.images else ""
    if isinstance(item, Prompt):
        return f"a prompt of {len(item.token_ids)} tokens{images}"
    cut = ", a window of a longer text" if item.status is RolloutStatus.TRUNCATED else ""
    return f"{item.num_loss_tokens} of {len(item.token_ids)} tokens trained{images}{cut}"

"""The rules of a loss mask: the content and the end markers of turns count, by the turns' roles.

Shapes: T tokens of a sequence, B sequences of equal length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from rlpipe.data.masks.boundaries import RoleBoundary, Turn, find_turns
from rlpipe.types import BoolArray, IntArray


class TrainedEnds(StrEnum):
    """The end markers that count, among turns that include theirs."""

    TURN = "turn"
    """End markers of the turns that count."""
    ALL = "all"
    NONE = "none"
    LAST = "last"
    """The end marker of the last turn that counts."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LossMask:
    """The rules by which tokens count in the loss."""

    boundaries: Sequence[RoleBoundary]
    roles: frozenset[str] = frozenset({"assistant"})
    """Roles whose turns count."""
    ends: TrainedEnds = TrainedEnds.TURN
    counts_all: bool = False
    """Whether all tokens count, whatever their role."""
    media_ids: Sequence[int] = ()
    """Tokens that stand for parts of images, audio and videos, which never count."""
    pad_id: int | None = None
    end_id: int | None = None
    """The tokenizer's end token. If it also pads, only one that follows another is taken for padding."""

    def mark(self, token_ids: IntArray) -> BoolArray:
        """Return the loss mask of ``token_ids`` ``[T]`` or ``[B, T]``, in the same shape."""
        if token_ids.ndim == 2:
            return np.stack([self.mark(row) for row in token_ids]) if len(token_ids) else token_ids.astype(np.bool_)
        return self.mark_turns(token_ids, find_turns(token_ids, self.boundaries))

    def mark_turns(self, token_ids: IntArray, turns: Sequence[Turn]) -> BoolArray:
        """Return the loss mask of one sequence whose turns are already known."""
        mask = np.ones(len(token_ids), np.bool_) if self.counts_all else _fill(self._spans(turns), len(token_ids))
        mask &= ~np.isin(token_ids, self.media_ids)
        mask &= ~self._padding(token_ids, turns)
        return mask

    def _spans(self, turns: Sequence[Turn]) -> list[tuple[int, int]]:
        """Return the spans that count, in order and without overlap: first token, and the one after the last."""
        last = next((turn for turn in reversed(turns) if turn.boundary.role in self.roles), None)
        spans = []
        for turn in turns:
            boundary = turn.boundary
            counts = boundary.role in self.roles
            match self.ends:
                case TrainedEnds.TURN:
                    end_counts = counts
                case TrainedEnds.LAST:
                    end_counts = turn is last
                case other:
                    end_counts = other is TrainedEnds.ALL
            stop = turn.stop if end_counts and boundary.include_end else turn.end
            if counts:
                spans.append((turn.marker if boundary.include_start else turn.start, stop))
            elif stop > turn.end:
                spans.append((turn.end, stop))
        return spans

    def _padding(self, token_ids: IntArray, turns: Sequence[Turn]) -> BoolArray:
        is_padding = token_ids == self.pad_id if self.pad_id is not None else np.zeros(len(token_ids), np.bool_)
        if not is_padding.any():
            return is_padding
        if self.pad_id == self.end_id:
            is_padding[1:] &= is_padding[:-1].copy()
        markers = [span for turn in turns for span in ((turn.marker, turn.start), (turn.end, turn.stop))]
        return is_padding & ~_fill(markers, len(token_ids))


def _fill(spans: Sequence[tuple[int, int]], length: int) -> BoolArray:
    """Return a mask ``[T]`` that is True within the spans."""
    steps = np.zeros(length + 1, np.int32)
    if spans:
        starts, stops = np.array(spans).T
        np.add.at(steps, starts, 1)
        np.subtract.at(steps, stops, 1)
    return np.cumsum(steps[:-1]) > 0

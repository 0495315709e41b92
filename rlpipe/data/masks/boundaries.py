"""Turns of a conversation, found by the tokens that start and end them, and the loss mask they give.

Shapes: T tokens of a sequence, B sequences of equal length.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rlpipe.configs.data_sources import END_TOKEN, ROLE_OPTION, RoleMarkers
from rlpipe.errors import ConfigError
from rlpipe.types import BoolArray, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WORD = "Kestrel"


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
        mask = np.ones(len(token_ids), np.bool_) if self.counts_all else fill(self._spans(turns), len(token_ids))
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
                case ends:
                    end_counts = ends is TrainedEnds.ALL
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
        return is_padding & ~fill(markers, len(token_ids))


def fill(spans: Sequence[tuple[int, int]], length: int) -> BoolArray:
    """Return a mask ``[T]`` that is True within the spans."""
    steps = np.zeros(length + 1, np.int32)
    if spans:
        starts, stops = np.array(spans).T
        np.add.at(steps, starts, 1)
        np.subtract.at(steps, stops, 1)
    return np.cumsum(steps[:-1]) > 0


@dataclass(kw_only=True, slots=True, frozen=True)
class RoleBoundary:
    """The markers around each turn of a role, as token ids; raises ``ValueError`` for an empty role or marker."""

    role: str
    start: tuple[int, ...]
    end: tuple[int, ...] | None
    """End marker; None if turns go to the end of the sequence."""
    include_start: bool = False
    """Whether the start marker belongs to the turn."""
    include_end: bool = True
    """Whether the end marker belongs to the turn. If not, it may also be the start of the next turn."""
    interrupts: bool = False
    """Whether turns of the role can also be within other turns, which continue after them."""
    shares_end: bool = False
    """Whether an end marker that belongs to the turn may also be the start of the next one."""
    other_starts: tuple[tuple[int, ...], ...] = ()
    """Other tokens that the start marker can have, as where its line break merges with the text after it."""

    def __post_init__(self) -> None:
        if not self.role or not self.start or self.end == ():
            raise ValueError(f"a role boundary needs a role and markers of at least one token, found {self}")


class Turn(NamedTuple):
    """The positions of one turn in its sequence; without an end marker its content goes up to T."""

    boundary: RoleBoundary
    marker: int
    """First token of the start marker; for the continuation of an interrupted turn, of its content."""
    start: int
    """First token of the content."""
    end: int
    """First token after the content."""
    stop: int
    """First token after the end marker; for an interrupted turn, after the start marker that interrupts it."""

    @property
    def free(self) -> int:
        """First token that can start another turn."""
        boundary = self.boundary
        return self.stop if boundary.include_end and not boundary.shares_end else self.end


def find_turns(token_ids: IntArray, boundaries: Iterable[RoleBoundary]) -> list[Turn]:
    """Return the turns of ``token_ids`` ``[T]``, from left to right.

    If several start markers match, the longest counts; of roles with the same start marker, the last counts. A turn
    goes to the first end marker after its start, of all boundaries of its role with that start marker. Between its
    markers no other turn starts, except one that interrupts it. The interrupting turn goes to its own end marker, or at
    most to that of the interrupted turn. If no other turn starts right after it, the interrupted turn continues there,
    as a ``Turn`` of its own.
    """
    markers = _Markers(token_ids, boundaries)
    turns: list[Turn] = []
    free = 0
    for position in sorted(markers.starts):
        if position < free:
            continue
        turn = markers.turn(position)
        if markers.interruptions and not turn.boundary.interrupts:
            turns += markers.parts(turn)
        else:
            turns.append(turn)
        free = turns[-1].free
    return turns


class _Markers:
    """The positions of boundaries' markers in a sequence."""

    def __init__(self, token_ids: IntArray, boundaries: Iterable[RoleBoundary]) -> None:
        boundaries = [*boundaries]
        by_start: dict[tuple[int, ...], list[RoleBoundary]] = {}
        for boundary in boundaries:
            for start in (boundary.start, *boundary.other_starts):
                by_start.setdefault(start, []).append(boundary)
        self.starts: dict[int, tuple[int, list[RoleBoundary], bool]] = {}
        """Start markers by position: their length, the boundaries that they belong to, and whether one interrupts."""
        for start in sorted(by_start, key=len):  # longer ones replace shorter ones
            same_role = [boundary for boundary in by_start[start] if boundary.role == by_start[start][-1].role]
            entry = len(start), same_role, any(boundary.interrupts for boundary in same_role)
            self.starts.update(dict.fromkeys(_positions_of(start, token_ids), entry))
        self.interruptions: list[int] = []
        if any(boundary.interrupts for boundary in boundaries):
            self.interruptions = sorted(position for position, (_, _, interrupts) in self.starts.items() if interrupts)
        markers = {boundary.end for boundary in boundaries if boundary.end is not None}
        self._ends = {marker: _positions_of(marker, token_ids) for marker in markers}
        self._length = len(token_ids)

    def turn(self, position: int) -> Turn:
        """Return the turn whose start marker is at a position."""
        length, boundaries, _ = self.starts[position]
        turn = self._turn(boundaries[0], position, position + length)
        for boundary in boundaries[1:]:
            candidate = self._turn(boundary, position, position + length)
            if (candidate.end, -candidate.stop) < (turn.end, -turn.stop):
                turn = candidate
        return turn

    def parts(self, turn: Turn) -> list[Turn]:
        """Return the turns that interrupt a turn, and its segments before, between and after them, in order."""
        segments: list[Turn] = []
        segment = turn
        while (inner := self._interruption(segment)) is not None:
            if segment is turn or segment.start < inner.marker:
                segments.append(Turn(segment.boundary, segment.marker, segment.start, inner.marker, inner.start))
            latest = self._rest(segment, inner.start).end
            if inner.end > latest:
                return [*segments, inner._replace(end=latest, stop=latest)]
            segments.append(inner)
            if inner.free == self._length or (inner.free in self.starts and not self.starts[inner.free][2]):
                return segments
            segment = self._rest(segment, inner.free)
        return [*segments, segment]

    def _turn(self, boundary: RoleBoundary, marker: int, start: int) -> Turn:
        end = stop = self._length
        if boundary.end is not None:
            positions = self._ends[boundary.end]
            following = bisect_left(positions, start)
            if following < len(positions):
                end = positions[following]
                stop = end + len(boundary.end)
        return Turn(boundary, marker, start, end, stop)

    def _rest(self, segment: Turn, position: int) -> Turn:
        """Return the rest of a turn, from a position on."""
        if position <= segment.end:
            return Turn(segment.boundary, position, position, segment.end, segment.stop)
        return self._turn(segment.boundary, position, position)

    def _interruption(self, segment: Turn) -> Turn | None:
        """Return the first turn that interrupts the segment, or None."""
        following = bisect_left(self.interruptions, segment.start)
        if following == len(self.interruptions) or self.interruptions[following] >= segment.end:
            return None
        return self.turn(self.interruptions[following])


def _positions_of(marker: Sequence[int], token_ids: IntArray) -> list[int]:
    """Return the positions where the marker begins, in order."""
    last = len(token_ids) - len(marker)
    positions = np.flatnonzero(token_ids[: max(last + 1, 0)] == marker[0])
    for offset, token_id in enumerate(marker[1:], start=1):
        positions = positions[token_ids[positions + offset] == token_id]
    indices: list[int] = positions.tolist()
    return indices


def encode_markers(
    markers: Sequence[RoleMarkers], tokenizer: PreTrainedTokenizerBase, name: str = ROLE_OPTION
) -> list[RoleBoundary]:
    """Encode the ``markers``, which messages call ``name``, to token ids.

    Raises ``ConfigError`` with a marker's index in the list if it has no tokens, or an unknown one.
    """
    return [_encode(entry, tokenizer, f"{name}[{index}]") for index, entry in enumerate(markers)]


def _encode(markers: RoleMarkers, tokenizer: PreTrainedTokenizerBase, name: str) -> RoleBoundary:
    start = _ids(markers.start, tokenizer, f"{name}.start")
    return RoleBoundary(
        role=markers.role,
        start=start,
        end=None if markers.end is None else _ids(markers.end, tokenizer, f"{name}.end"),
        include_start=markers.include_start,
        include_end=markers.include_end,
        interrupts=markers.interrupts,
        shares_end=markers.shares_end,
        other_starts=tuple(
            alternative for alternative in _alternative_starts(markers.start, tokenizer) if alternative != start
        ),
    )


def _alternative_starts(marker: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, ...]]:
    """Yield the other token sequences of a start marker, whose line breaks may merge with the text after it."""
    shown = marker.rstrip("\n")
    if not shown.strip() or shown == marker:
        return

    def encode(text: str) -> tuple[int, ...]:
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    for end in range(len(shown), len(marker)):
        yield encode(marker[:end])
    word, joined = encode(WORD), encode(marker + WORD)
    if joined[-len(word) :] == word:
        yield joined[: -len(word)]


def _ids(marker: str, tokenizer: PreTrainedTokenizerBase, name: str) -> tuple[int, ...]:
    if marker == END_TOKEN:
        if tokenizer.eos_token_id is None:
            raise ConfigError(
                f"{name}: the tokenizer {tokenizer.name_or_path!r} has no end token; write the marker out"
            )
        return (int(tokenizer.eos_token_id),)
    ids = tuple(tokenizer(marker, add_special_tokens=False)["input_ids"])
    if not ids:
        raise ConfigError(f"{name}: {marker!r} has no tokens in the tokenizer {tokenizer.name_or_path!r}")
    unknown = tokenizer.unk_token
    if unknown is not None and tokenizer.unk_token_id in ids and unknown not in marker:  # GPT-2's is its end token
        raise ConfigError(
            f"{name}: {marker!r} has text that the tokenizer {tokenizer.name_or_path!r} does not know ({unknown}), so "
            "any other unknown text would match it; use a marker of known tokens"
        )
    return ids

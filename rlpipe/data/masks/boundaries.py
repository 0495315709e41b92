"""Turns of a conversation in its tokens, found by the markers that a chat template puts around them.

Shapes: T tokens of one sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rlpipe.types import IntArray


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

    def __post_init__(self) -> None:
        if not self.role or not self.start or self.end == ():
            raise ValueError(f"a role boundary needs a role and markers of at least one token, found {self}")


class Turn(NamedTuple):
    """The places of one turn in its sequence; without an end marker its content goes up to T."""

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
        return self.stop if self.boundary.include_end else self.end


def find_turns(token_ids: IntArray, boundaries: Iterable[RoleBoundary]) -> list[Turn]:
    """Return the turns of ``token_ids`` ``[T]``, from left to right.

    If several start markers match, the longest counts; of boundaries with the same start marker, the last counts. A
    turn goes to the first end marker after its start. Between its markers no other turn starts, except one that
    interrupts it. The interrupting turn goes to its own end marker, or at most to that of the interrupted turn. If no
    other turn starts right after it, the interrupted turn continues there, as a ``Turn`` of its own.
    """
    markers = _Markers(token_ids, boundaries)
    turns: list[Turn] = []
    free = 0
    for place in sorted(markers.starts):
        if place < free:
            continue
        turn = markers.turn(place)
        if markers.interruptions and not turn.boundary.interrupts:
            turns += markers.parts(turn)
        else:
            turns.append(turn)
        free = turns[-1].free
    return turns


class _Markers:
    """The places of boundaries' markers in a sequence."""

    def __init__(self, token_ids: IntArray, boundaries: Iterable[RoleBoundary]) -> None:
        boundaries = sorted(boundaries, key=lambda boundary: len(boundary.start))
        self.starts: dict[int, RoleBoundary] = {}
        for boundary in boundaries:  # longer ones take the place of shorter ones
            self.starts.update(dict.fromkeys(_places_of(boundary.start, token_ids), boundary))
        self.interruptions: list[int] = []
        if any(boundary.interrupts for boundary in boundaries):
            self.interruptions = sorted(place for place, boundary in self.starts.items() if boundary.interrupts)
        markers = {boundary.end for boundary in boundaries if boundary.end is not None}
        self._ends = {marker: _places_of(marker, token_ids) for marker in markers}
        self._length = len(token_ids)

    def turn(self, place: int) -> Turn:
        """Return the turn whose start marker is at a place."""
        boundary = self.starts[place]
        return self._turn(boundary, place, place + len(boundary.start))

    def parts(self, turn: Turn) -> list[Turn]:
        """Return the turns that interrupt a turn, and its own parts before, between and after them, in order."""
        found: list[Turn] = []
        part = turn
        while (inner := self._interruption(part)) is not None:
            if part is turn or part.start < inner.marker:
                found.append(Turn(part.boundary, part.marker, part.start, inner.marker, inner.start))
            latest = self._rest(part, inner.start).end
            if inner.end > latest:
                return [*found, inner._replace(end=latest, stop=latest)]
            found.append(inner)
            following = self.starts.get(inner.free)
            if inner.free == self._length or (following is not None and not following.interrupts):
                return found
            part = self._rest(part, inner.free)
        return [*found, part]

    def _turn(self, boundary: RoleBoundary, marker: int, start: int) -> Turn:
        end = stop = self._length
        if boundary.end is not None:
            places = self._ends[boundary.end]
            following = bisect_left(places, start)
            if following < len(places):
                end = places[following]
                stop = end + len(boundary.end)
        return Turn(boundary, marker, start, end, stop)

    def _rest(self, part: Turn, place: int) -> Turn:
        """Return the rest of a turn, from a place on."""
        if place <= part.end:
            return Turn(part.boundary, place, place, part.end, part.stop)
        return self._turn(part.boundary, place, place)

    def _interruption(self, part: Turn) -> Turn | None:
        """Return the first turn that interrupts the part, or None."""
        following = bisect_left(self.interruptions, part.start)
        if following == len(self.interruptions) or self.interruptions[following] >= part.end:
            return None
        return self.turn(self.interruptions[following])


def _places_of(marker: Sequence[int], token_ids: IntArray) -> list[int]:
    """Return the places where the marker begins, in order."""
    last = len(token_ids) - len(marker)
    places = np.flatnonzero(token_ids[: max(last + 1, 0)] == marker[0])
    for offset, token_id in enumerate(marker[1:], start=1):
        places = places[token_ids[places + offset] == token_id]
    found: list[int] = places.tolist()
    return found

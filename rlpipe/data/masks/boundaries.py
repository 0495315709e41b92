"""Finds the turns of a conversation in its tokens, by the markers that a chat template puts around them.

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
    """The markers around each turn of a role, as token ids. Raises ``ValueError`` if one has none."""

    role: str
    start: tuple[int, ...]
    end: tuple[int, ...] | None
    """None: the turn goes to the end of the sequence."""
    include_start: bool = False
    """Whether the start marker belongs to the turn."""
    include_end: bool = True
    """Whether the end marker does. If not, it may also be the start of the next turn."""

    def __post_init__(self) -> None:
        if not self.role or not self.start or self.end == ():
            raise ValueError(f"a role boundary needs a role and markers of at least one token, found {self}")


class Turn(NamedTuple):
    """One turn's places in its sequence; without an end marker its content goes up to T."""

    boundary: RoleBoundary
    marker: int
    """The first token of its start marker."""
    start: int
    """The first token of its content."""
    end: int
    """The first token behind its content."""
    stop: int
    """The first token behind its end marker."""


def find_turns(token_ids: IntArray, boundaries: Iterable[RoleBoundary]) -> list[Turn]:
    """The turns of ``token_ids`` ``[T]``, from left to right.

    Where several start markers match, the longest counts; a turn goes to the first end marker behind it. What stands
    between its markers starts no other turn. Of boundaries with the same start marker the last one counts.
    """
    boundaries = sorted(boundaries, key=lambda boundary: len(boundary.start))
    starts: dict[int, RoleBoundary] = {}
    for boundary in boundaries:  # longer ones take the place of shorter ones
        starts.update(dict.fromkeys(_places_of(boundary.start, token_ids), boundary))
    markers = {boundary.end for boundary in boundaries if boundary.end is not None}
    ends = {marker: _places_of(marker, token_ids) for marker in markers}

    turns: list[Turn] = []
    free = 0  # the first token that can start a turn
    for place in sorted(starts):
        if place < free:
            continue
        boundary = starts[place]
        start = place + len(boundary.start)
        end = stop = len(token_ids)
        if boundary.end is not None:
            places = ends[boundary.end]
            following = bisect_left(places, start)
            if following < len(places):
                end = places[following]
                stop = end + len(boundary.end)
        turns.append(Turn(boundary, place, start, end, stop))
        free = stop if boundary.include_end else end
    return turns


def _places_of(marker: Sequence[int], token_ids: IntArray) -> list[int]:
    """Where the marker begins, in order."""
    last = len(token_ids) - len(marker)
    places = np.flatnonzero(token_ids[: max(last + 1, 0)] == marker[0])
    for offset, token_id in enumerate(marker[1:], start=1):
        places = places[token_ids[places + offset] == token_id]
    found: list[int] = places.tolist()
    return found

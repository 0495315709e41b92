"""Finds the tokens that sequences share at their beginning, so that they need to be run only once."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class PrefixIndex:
    """The sequences that were added so far, in the order of their tokens.

    Of all sequences, those that are next to a new one in this order share the most with it.
    """

    _ordered: list[tuple[bytes, int]] = field(default_factory=list)
    _sequences: list[NDArray[np.integer]] = field(default_factory=list)

    def add(self, tokens: NDArray[np.integer]) -> tuple[int, int]:
        """Add a sequence ``[T]``; return the number of the one that shares most with it, and how many tokens.

        Sequences are numbered from 0 as they are added. If there is none before, both numbers are 0.
        """
        entry = (tokens.tobytes(), len(self._sequences))
        place = bisect_left(self._ordered, entry)
        found = (0, 0)
        for _, number in self._ordered[max(place - 1, 0) : place + 1]:
            shared = common_length(self._sequences[number], tokens)
            if shared > found[1]:
                found = (number, shared)
        self._ordered.insert(place, entry)
        self._sequences.append(tokens)
        return found


def common_length(first: NDArray[np.integer], second: NDArray[np.integer]) -> int:
    """Return how many tokens two sequences have in common at their beginning."""
    length = min(len(first), len(second))
    differing = np.flatnonzero(first[:length] != second[:length])
    return int(differing[0]) if len(differing) else length

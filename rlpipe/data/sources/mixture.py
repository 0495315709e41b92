"""Even interleaving of the rows of several sources, in proportion to their weights."""

from __future__ import annotations

from collections.abc import Sequence


class Mixture:
    """The assignment of the places of a mix to its sources.

    Row k (from 0) of a source of weight w is due at time (k + 1/2) / w, and places take rows in the order of these
    times; among rows due at the same time, the first source's comes first. So a source's rows among the first n are its
    share of n, give or take one or two, and they are a function of n alone.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = list(weights)
        self._position = 0
        self._counts = [0] * len(self._weights)

    def counts(self, position: int) -> list[int]:
        """Return the number of rows of each source before a place."""
        if not self._position <= position <= self._position + len(self._weights):
            # All of these rows come before the place, since they come before an earlier one.
            time = max(position - len(self._weights), 0) / sum(self._weights)
            self._counts = [int(time * weight) for weight in self._weights]
            self._position = sum(self._counts)
        while self._position < position:
            self._counts[self._next()] += 1
            self._position += 1
        return list(self._counts)

    def draw(self, position: int) -> tuple[int, int]:
        """Return the source of the row at a place, and the number of that source's rows before it."""
        counts = self.counts(position)
        source = self._next()
        return source, counts[source]

    def _next(self) -> int:
        due = [(count + 0.5) / weight for count, weight in zip(self._counts, self._weights, strict=True)]
        return due.index(min(due))

"""Spreads the rows of several sources evenly, each as often as its weight says."""

from __future__ import annotations

from collections.abc import Sequence


class Mixture:
    """Which source each place of a mix takes its row from.

    The row k of a source of weight w, both from 0, is due at (k + 1/2) / w, and places take rows in the order of these
    times; of several at once, the first source's comes first. So a source's rows among the first n are its share of n,
    give or take one or two, and they are a function of n alone.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = list(weights)
        self._position = 0
        self._counts = [0] * len(self._weights)

    def counts(self, position: int) -> list[int]:
        """How many rows of each source stand before a place."""
        if not self._position <= position <= self._position + len(self._weights):
            # All of these rows are surely before the place, as they are before one that lies further ahead.
            time = max(position - len(self._weights), 0) / sum(self._weights)
            self._counts = [int(time * weight) for weight in self._weights]
            self._position = sum(self._counts)
        while self._position < position:
            self._counts[self._next()] += 1
            self._position += 1
        return list(self._counts)

    def draw(self, position: int) -> tuple[int, int]:
        """The source of the place's row, and how many rows of it stand before."""
        counts = self.counts(position)
        source = self._next()
        return source, counts[source]

    def _next(self) -> int:
        due = [(count + 0.5) / weight for count, weight in zip(self._counts, self._weights, strict=True)]
        return due.index(min(due))

"""The order of a source's rows, epoch after epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlpipe.errors import DataError


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A place in the order of rows: the position of the next row in an epoch. In a mix of sources, the epoch is 0."""

    epoch: int = 0
    position: int = 0


class Order(Protocol):
    """An endless order of rows that depends on the place alone."""

    @property
    def num_rows(self) -> int | None:
        """Rows per epoch; None while the number is not known."""

    def row(self, cursor: Cursor) -> int | None:
        """Return the index of the row at a place, or None right after the last row of an epoch.

        Raises ``DataError`` for a place further on.
        """

    def behind(self, count: int) -> Cursor:
        """Return the place of the row that follows the first ``count`` rows, counted over all epochs."""


class PermutedOrder:
    """The order of rows that can be read in any order; with ``shuffle``, each epoch permutes them anew by ``seeds``."""

    def __init__(self, name: str, indices: NDArray[np.int64], *, seeds: Sequence[int], shuffle: bool) -> None:
        self._name, self._indices = name, indices
        self._seeds, self._shuffle = seeds, shuffle
        self._epoch = -1
        self._rows = indices

    @property
    def num_rows(self) -> int:
        return len(self._indices)

    def row(self, cursor: Cursor) -> int | None:
        if cursor.epoch < 0 or not 0 <= cursor.position <= self.num_rows:
            raise DataError(f"{self._name} has {self.num_rows} rows for training, so {cursor} is not of this data")
        if cursor.position == self.num_rows:
            return None
        if self._shuffle and cursor.epoch != self._epoch:
            self._rows = np.random.default_rng([*self._seeds, 0, cursor.epoch]).permutation(self._indices)
            self._epoch = cursor.epoch
        return int(self._rows[cursor.position])

    def behind(self, count: int) -> Cursor:
        return Cursor(*divmod(count, self.num_rows))

"""The order of a source's rows: which row stands at which place, epoch after epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from rlpipe.errors import DataError


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A place: the next entry of the epoch's order. In a mix of sources, all places are of epoch 0."""

    epoch: int = 0
    position: int = 0


class Order(Protocol):
    """Rows without end, as a function of the place alone."""

    @property
    def num_rows(self) -> int | None:
        """Of an epoch; None while it is not known."""

    def row(self, cursor: Cursor) -> int | None:
        """The row's index; None right behind the last one of an epoch. Raises ``DataError`` further behind it."""

    def behind(self, count: int) -> Cursor:
        """Where the source stands behind its first ``count`` rows, over all epochs; a row is there."""


class PermutedOrder:
    """Rows that can be read in any order, permuted anew in each epoch, by ``seeds``, if ``shuffle``."""

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

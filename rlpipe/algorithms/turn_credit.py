"""Advantages of single turns, for episodes whose turns have rewards of their own.

Shapes: S siblings of one group, T turns of the longest, N turns of one sibling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlpipe.types import FloatArray

Values = NDArray[np.float64]


def turn_advantages(rewards: Sequence[Sequence[float]]) -> list[FloatArray]:
    """Return the advantage of each turn ``[N]`` of every sibling, from its turns' rewards ``[N]``.

    It is the turn's return, the sum of the rewards from there on, minus the mean return of the other siblings at that
    turn, with 0 for siblings that have ended. So the baseline depends on nothing that the sibling itself does, its own
    stopping included, and the gradient is unbiased. A mean over the siblings that still play would depend on it, as
    soon as the sibling itself is among them. A single sibling has its returns.
    """
    longest = max(map(len, rewards), default=0)
    returns: Values = np.zeros((len(rewards), longest))
    for own, values in zip(returns, rewards, strict=True):
        own[: len(values)] = np.cumsum(np.asarray(values, np.float64)[::-1])[::-1]
    others = (returns.sum(0) - returns) / max(len(rewards) - 1, 1)
    found = returns - others if len(rewards) > 1 else returns
    return [row[: len(values)].astype(np.float32) for row, values in zip(found, rewards, strict=True)]

"""Decides when supervised fine-tuning has learned enough."""

from __future__ import annotations

from collections import deque
from statistics import fmean

WINDOW = 10


class LossTarget:
    """Reached once the mean loss of the last ``WINDOW`` steps is below the target; never without a target."""

    def __init__(self, target: float | None) -> None:
        self._target = target
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def reached(self, loss: float) -> bool:
        """Takes the next step's loss; one that is not finite keeps the target out of reach for ``WINDOW`` steps."""
        self._losses.append(loss)
        return self._target is not None and len(self._losses) == WINDOW and fmean(self._losses) < self._target

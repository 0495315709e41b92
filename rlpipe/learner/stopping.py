"""The stopping criterion of supervised fine-tuning."""

from __future__ import annotations

from collections import deque
from statistics import fmean

WINDOW = 10


class LossTarget:
    """A target for the mean loss of the last ``WINDOW`` steps; without a target it is never reached."""

    def __init__(self, target: float | None) -> None:
        self._target = target
        self._losses: deque[float] = deque(maxlen=WINDOW)

    def reached(self, loss: float) -> bool:
        """Add the next step's loss, and return whether the mean is below the target.

        A loss that is not finite prevents this for ``WINDOW`` steps.
        """
        self._losses.append(loss)
        return self._target is not None and len(self._losses) == WINDOW and fmean(self._losses) < self._target

"""The statistics of a row's softmax, from which log-probs and entropies follow, also where the row is in parts.

Shapes: R rows, P parts of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True, frozen=True)
class RowStats:
    """Of the softmax of each row: four numbers, from which those of a whole vocabulary follow by its parts.

    ``values`` ``[4, R]``: the largest z, m; the sum s of exp(z - m); that of exp(z - m) (z - m); and the target's z,
    -inf where it is in another part, or in none. All are 0 of an ignored row.
    """

    values: Tensor  # [4, R]

    @classmethod
    def join(cls, parts: Tensor) -> RowStats:
        """Of the values of all parts ``[P, 4, R]``."""
        largest, total, moment, target = parts.unbind(1)  # [P, R]
        most = largest.amax(0)
        lower = largest - most
        shrunk = lower.exp()
        moments = (moment + lower * total) * shrunk
        return cls(torch.stack([most, (total * shrunk).sum(0), moments.sum(0), target.amax(0)]))

    @property
    def largest(self) -> Tensor:  # [R]
        return self.values[0]

    @property
    def total(self) -> Tensor:
        """s ``[R]``; one of the terms is 1, whatever rounding makes of it."""
        return self.values[1].clamp(min=1)

    @property
    def log_total(self) -> Tensor:  # [R]
        return self.total.log()

    @property
    def logprobs(self) -> Tensor:
        """Of the targets ``[R]``; never positive."""
        return (self.values[3] - self.values[0]).clamp(max=0) - self.log_total

    @property
    def entropy(self) -> Tensor:
        """In nats ``[R]``; exact also where nearly all probability is on one token, whose log s nearly vanishes."""
        return self.log_total - self.values[2] / self.total

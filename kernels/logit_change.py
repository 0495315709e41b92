"""What models and sampling do to logits before their softmax: bias, scale, soft cap, temperature.

Shapes: R rows, V columns. A row's logits x become z = cap · tanh(scale · (x + bias) / cap) / temperature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rlpipe.kernels.products import wide


@dataclass(kw_only=True, slots=True, frozen=True)
class LogitChange:
    """What is done to logits before their softmax."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float | Tensor = 1.0  # [R]
    bias: Tensor | None = None  # [V], added before all else

    def of_rows(self, rows: slice) -> LogitChange:
        if not isinstance(self.temperature, Tensor):
            return self
        return replace(self, temperature=self.temperature[rows])

    def of_columns(self, columns: slice) -> LogitChange:
        return self if self.bias is None else replace(self, bias=self.bias[columns])

    def apply(self, logits: Tensor) -> Tensor:
        """``[R, V]`` gives the same, in at least float32; the logits stay as they are, and may be what is returned."""
        changed = logits.to(wide(logits.dtype))
        if self.bias is not None:
            changed = changed + self.bias
        if self.scale != 1.0:
            changed = changed * self.scale
        if self.softcap is not None:
            changed = (changed / self.softcap).tanh_().mul_(self.softcap)
        if isinstance(self.temperature, Tensor):
            changed = changed / self.temperature[:, None]
        elif self.temperature != 1.0:
            changed = changed / self.temperature
        return changed

    def slope(self, changed: Tensor) -> Tensor | float:
        """dz/dx at ``changed`` logits ``[R, V]``."""
        own = self.temperature
        per_row: Any = own.to(changed.dtype)[:, None] if isinstance(own, Tensor) else own
        outer = self.scale / per_row
        if self.softcap is None:
            return outer
        return (changed * (per_row / self.softcap)).square_().neg_().add_(1).mul_(outer)

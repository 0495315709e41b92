"""Changes that models and sampling make to logits before the softmax: bias, scale, soft cap, temperature.

Shapes: R rows, V columns. A row's logits x become z = cap · tanh(scale · (x + bias) / cap) / temperature.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from rlpipe.kernels.products import wide


def split_temperature(temperature: float | Tensor) -> tuple[float, Tensor | None]:
    """Split a temperature into those of a ``LogitChange``: one number for all rows, and one per row or None."""
    return (1.0, temperature.detach()) if isinstance(temperature, Tensor) else (float(temperature), None)


@dataclass(kw_only=True, slots=True, frozen=True)
class LogitChange:
    """The change of logits before their softmax; they are divided by both ``temperature`` and ``temperatures``."""

    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    temperatures: Tensor | None = None  # [R]
    bias: Tensor | None = None  # [V], added before all else

    def of_rows(self, rows: slice) -> LogitChange:
        return self if self.temperatures is None else replace(self, temperatures=self.temperatures[rows])

    def of_columns(self, columns: slice) -> LogitChange:
        return self if self.bias is None else replace(self, bias=self.bias[columns])

    def apply(self, logits: Tensor) -> Tensor:
        """Return changed logits ``[R, V]``, at least float32; the input is not modified, but returned if unchanged."""
        is_none = self.scale == self.temperature == 1.0 and self.softcap is self.temperatures is self.bias is None
        return self.apply_(logits.to(wide(logits.dtype), copy=not is_none))

    def apply_(self, logits: Tensor) -> Tensor:
        """Change logits ``[R, V]`` in place; they must be at least float32."""
        if self.bias is not None:
            logits.add_(self.bias.to(logits.dtype))
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.temperature != 1.0:
            logits.div_(self.temperature)
        if self.temperatures is not None:
            logits.div_(self.temperatures[:, None])
        return logits

    def slope(self, changed: Tensor) -> Tensor | float:
        """Return dz/dx at ``changed`` logits ``[R, V]``."""
        own = self.temperatures
        divisor: Any = self.temperature if own is None else own.to(changed.dtype)[:, None] * self.temperature
        outer = self.scale / divisor
        if self.softcap is None:
            return outer
        return (changed * (divisor / self.softcap)).square_().neg_().add_(1).mul_(outer)

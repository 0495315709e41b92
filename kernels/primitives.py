"""Building blocks that the kernels share: products, changes of logits, and access to rows.

Shapes: R rows, V columns. A row's logits x become z = cap · tanh(scale · (x + bias) / cap) / temperature.

Shapes: R rows, V columns. Pointers in kernels are named like the tensors. Row indices are 64-bit, because R V may
exceed 2^31.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, no_type_check

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type that logits of weights of type ``dtype`` are computed in, at least float32."""
    return torch.promote_types(dtype, torch.float32)


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """Write ``left @ right`` to ``out``, whose type may be wider; on the CPU the product is rounded to the factors'."""
    if out.dtype == left.dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    return out.copy_(left @ right)


def add_product(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Compute ``out += left @ right``; types as in ``product``."""
    if out.dtype == left.dtype:
        return out.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    return out.add_(left @ right)


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
        is_identity = self.scale == self.temperature == 1.0 and self.softcap is self.temperatures is self.bias is None
        return self.apply_(logits.to(wide(logits.dtype), copy=not is_identity))

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
        temperatures = self.temperatures
        divisor: Any = (
            self.temperature if temperatures is None else temperatures.to(changed.dtype)[:, None] * self.temperature
        )
        outer = self.scale / divisor
        if self.softcap is None:
            return outer
        return (changed * (divisor / self.softcap)).square_().neg_().add_(1).mul_(outer)


try:
    import triton
    import triton.language as tl

    jit: Callable[..., Any] = triton.jit
except ModuleNotFoundError:  # then there is no CUDA either
    triton = tl = None  # type: ignore[assignment]

    def jit(*_: Any, **__: Any) -> Any:
        """Stand in for ``triton.jit``, so that this module can be imported without Triton; no kernel is called then."""
        return lambda function: function


IGNORED = -100
"""The target of a token that does not count; its log-prob and entropy are 0 and have no gradient."""
BLOCK, NUM_WARPS = 4096, 8
"""Columns that a Triton program holds in registers at one time, and the warps that share them."""
GROUP_ELEMENTS = 2**20
"""Elements per group of rows in the torch references, small enough for a core's cache."""


def runs_triton(logits: Tensor, chosen: bool | None) -> bool:
    """Return ``chosen`` if set; else True for CUDA tensors except float64, which Triton's kernels don't compute in."""
    return logits.is_cuda and logits.dtype is not torch.float64 if chosen is None else chosen


def pack_change(change: LogitChange) -> tuple[Tensor | None, Tensor | None, float, float | None, float]:
    """Return the fields of a ``LogitChange`` in the types that a torch operator takes."""
    return change.bias, change.temperatures, float(change.scale), change.softcap, change.temperature


def unpack_change(
    bias: Tensor | None, temperatures: Tensor | None, scale: float, softcap: float | None, temperature: float
) -> LogitChange:
    return LogitChange(scale=scale, softcap=softcap, temperature=temperature, temperatures=temperatures, bias=bias)


def row_groups(logits: Tensor) -> Iterator[slice]:
    """Return slices that together cover all rows of ``[R, V]`` logits, in order."""
    size = max(GROUP_ELEMENTS // logits.shape[1], 1)
    return (slice(start, start + size) for start in range(0, len(logits), size))


def find_targets(targets: Tensor, first_column: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Return each target's index among these columns ``[R]`` (0 if it is not there), and whether it is there."""
    local = targets - first_column
    is_inside = (local >= 0) & (local < num_columns) & (targets != IGNORED)
    return torch.where(is_inside, local, 0), is_inside


@jit
@no_type_check
def exp(x):
    """Compute exp by ``exp2``, which Triton compiles to a single instruction that flushes subnormal numbers to 0."""
    return tl.exp2(x * 1.4426950408889634)


@jit
@no_type_check
def change_logits(x, factor, scale, softcap, CAPPED: tl.constexpr):
    """Return z and dz/dx; ``factor`` is the product of all factors of x, apart from the soft cap."""
    slope = factor
    if CAPPED:
        bounded = 1 - 2 / (1 + exp(x * (2 * scale / softcap)))  # tanh
        x = bounded * (softcap / scale)
        slope *= 1 - bounded * bounded
    return x * factor, slope


@jit
@no_type_check
def load_logits(logits, bias, columns, mask, BIASED: tl.constexpr):
    """Load logits plus bias in float32, with 0 where the mask is False; with None, load all columns unmasked."""
    x = tl.load(logits + columns, mask=mask).to(tl.float32)
    if BIASED:
        x += tl.load(bias + columns, mask=mask).to(tl.float32)
    if mask is not None:
        x = tl.where(mask, x, 0.0)
    return x


def kernel_arguments(change: LogitChange, unused: Tensor) -> dict[str, Any]:
    """Return the change as arguments of both kernels; ``unused`` takes the place of missing tensors."""
    return {
        "bias": unused if change.bias is None else change.bias.contiguous(),
        "temperatures": unused if change.temperatures is None else change.temperatures.float().contiguous(),
        "factor": change.scale / change.temperature,
        "scale": float(change.scale),
        "softcap": float(change.softcap or 1.0),
        "BIASED": change.bias is not None,
        "CAPPED": change.softcap is not None,
        "PER_ROW": change.temperatures is not None,
        "IGNORED": IGNORED,
    }


def block_of(num_columns: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(num_columns)))

"""The product of an adapter merged into its base weight, with the same bits on every device.

Engines and the learner compute the same weights on different devices, with different numbers of threads, and of shards,
and compare their digests. A product of two matrices in floating point depends on the order of its sums, so here no sum
is ever rounded: both factors are first rounded to multiples of a power of two, the rows of B and the columns of A each
to a fraction of their largest element, such that float64 holds every partial sum exactly (for a rank of 32, to 24 bits,
as many as float32 has; this is one slice of Ozaki et al. 2012, "Error-free transformations of matrix multiplication").
Everything else is done element by element. The sum of base and product is rounded to float32, and that to the type of
the engine.

DoRA (Liu et al., arXiv:2402.09353): the norms of the rows are sums of pairs, of pairs of pairs, and so on.

Shapes: O outputs, I inputs, r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlpipe.errors import ModelError

MANTISSA_BITS, EXPONENT_MASK = 52, 0x7FF
"""Layout of a float64."""
CPU_CHUNK, DEVICE_CHUNK = 2**15, 2**25
"""Elements that are computed at a time: on a CPU, those that its cache holds in float64."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """An adapter's change of a weight ``[O, I]``, ready for exact products; made by ``low_rank``."""

    rows: Tensor  # [O, r], float64
    columns: Tensor  # [r, I], float64
    magnitude: Tensor | None = None  # [O], float64, DoRA's norms of the rows

    @torch.no_grad()
    def merge_into(self, base: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``base`` [O, I] with the change, in ``dtype``, laid out in memory as ``base`` is."""
        if base.shape != (len(self.rows), self.columns.shape[1]):
            raise ModelError(
                f"an adapter changes a weight of shape {[len(self.rows), self.columns.shape[1]]}, but the base has "
                f"{list(base.shape)}"
            )
        merged = torch.empty_like(base, dtype=dtype)
        step = max(1, (CPU_CHUNK if base.device.type == "cpu" else DEVICE_CHUNK) // base.shape[1])
        for start in range(0, len(base), step):
            chunk = slice(start, start + step)
            weight = (self.rows[chunk] @ self.columns).add_(base[chunk])
            if self.magnitude is not None:
                weight *= (self.magnitude[chunk] / _norms(weight))[:, None]
            merged[chunk] = weight if dtype is torch.float32 else weight.float()
        return merged


@torch.no_grad()
def low_rank(a: Tensor, b: Tensor, scaling: float, magnitude: Tensor | None = None) -> LowRank:
    """Return the change ``scaling`` · B·A of a weight, for A ``[r, I]`` and B ``[O, r]``.

    Raises ``ModelError`` if a value is not finite.
    """
    if not all(tensor.isfinite().all() for tensor in (a, b, magnitude) if tensor is not None):
        raise ModelError("the adapter has values that are not finite")
    bits = (MANTISSA_BITS + 1 - (len(a) - 1).bit_length()) // 2
    return LowRank(
        rows=_on_grid(b.double() * scaling, bits),
        columns=_on_grid(a.double().T, bits).T.contiguous(),
        magnitude=None if magnitude is None else magnitude.double().flatten(),
    )


def _on_grid(values: Tensor, bits: int) -> Tensor:
    """Round each row to multiples of a power of two, of which its largest element is about 2^``bits``."""
    largest = values.abs().amax(1, keepdim=True)
    exponent = (largest.view(torch.int64) >> MANTISSA_BITS) & EXPONENT_MASK
    grid = ((exponent + 1 - bits).clamp(min=1) << MANTISSA_BITS).view(torch.float64)
    return (values / grid).round_().mul_(grid)


def _norms(rows: Tensor) -> Tensor:
    sums = rows * rows
    while (width := sums.shape[1]) > 1:
        half = width // 2
        sums, rest = sums[:, :half] + sums[:, half : 2 * half], sums[:, 2 * half :]
        if width % 2:
            sums[:, :1] += rest
    return sums[:, 0].sqrt_()

"""Matrix products whose results have a wider type than their factors, so that they are rounded only when used."""

from __future__ import annotations

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

"""Matrix products whose results are wider than their factors: rounded once, when they are used."""

from __future__ import annotations

import torch
from torch import Tensor


def wide(dtype: torch.dtype) -> torch.dtype:
    """What logits of weights of a type are computed with."""
    return torch.promote_types(dtype, torch.float32)


def product(left: Tensor, right: Tensor, out: Tensor) -> Tensor:
    """``left @ right``, into ``out``, whose type may be wider; on the CPU it is then rounded to that of the factors."""
    if out.dtype == left.dtype:
        return torch.mm(left, right, out=out)
    if left.is_cuda:
        return torch.mm(left, right, out_dtype=out.dtype, out=out)
    return out.copy_(left @ right)


def add_product(out: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """``out += left @ right``; as ``product``."""
    if out.dtype == left.dtype:
        return out.addmm_(left, right)
    if left.is_cuda:
        return torch.addmm(out, left, right, out_dtype=out.dtype, out=out)
    return out.add_(left @ right)

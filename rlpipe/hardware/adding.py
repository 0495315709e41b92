"""Adds up tensors of different types on the host without the detour that torch takes."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2**22
"""Elements: few enough that their converted copies stay in the caches, and enough that threads seldom wait for each
other, which takes long where something else runs on the cores."""


def add_to(total: Tensor, part: Tensor) -> None:
    """Adds ``part`` to ``total`` in place; both are flat, ``[N]``.

    On the CPU torch first converts whole operands of another type into new memory, which takes several times as long.
    """
    if total.is_cuda or total.dtype is part.dtype:
        total.add_(part)
        return
    wide = torch.promote_types(total.dtype, part.dtype)
    room = torch.empty(min(BLOCK, len(total)), dtype=wide, device=total.device)
    for own, other in zip(total.split(BLOCK), part.split(BLOCK), strict=True):
        converted = room[: len(own)]
        if total.dtype is wide:
            own.add_(converted.copy_(other))
        else:
            own.copy_(converted.copy_(own).add_(other))

"""Accumulation of gradients on the host, without torch's slow path for mixed dtypes."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 2**22
"""Elements per block: few enough that a block and its converted copies stay in the caches, and enough that threads
seldom wait for each other, which takes long if other work runs on the cores.
"""


def add_up(total: Tensor, part: Tensor, *, is_first: bool = False) -> Tensor:
    """Add ``part`` to ``total`` in place, or copy it there if it is the first; both are flat, ``[N]``, and on the CPU.

    Returns the sum of squares of the new ``total`` (scalar, float64), which is cheap while a block is in the caches and
    would take another pass over memory later. On the CPU torch would convert whole operands of another dtype into new
    memory, which takes several times as long. Neither dtype is wider than float32.
    """
    wide = torch.float32
    room = torch.empty(room_bytes(len(total), total.dtype, part.dtype) // wide.itemsize, dtype=wide)
    squared = torch.zeros((), dtype=torch.float64)
    for own, other in zip(total.split(BLOCK), part.split(BLOCK), strict=True):
        converted = room[: len(own)]
        if is_first:
            own.copy_(other)
        elif own.dtype is other.dtype is wide:
            own.add_(other)
        elif own.dtype is wide:
            own.add_(converted.copy_(other))
        else:
            own.copy_(converted.copy_(own).add_(other))
        values = own if own.dtype is wide else converted.copy_(own)
        squared += torch.dot(values, values)
    return squared


def room_bytes(num_elements: int, *dtypes: torch.dtype) -> int:
    """Return the temporary bytes that ``add_up`` needs for converted copies of ``num_elements`` of these dtypes."""
    return 0 if all(dtype is torch.float32 for dtype in dtypes) else min(BLOCK, num_elements) * torch.float32.itemsize

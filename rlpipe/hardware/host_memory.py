"""Work in the host's memory: pinned buffers, and adding gradients."""

from __future__ import annotations

from weakref import finalize

import torch
from torch import Tensor


class HostBuffer:
    """A buffer of bytes on the host, page-locked if ``pin`` is set.

    torch's own pinned memory comes in powers of two, up to twice what was asked for; this one locks the pages of
    ordinary memory. Raises ``RuntimeError`` if CUDA refuses. A buffer that was not closed is unlocked when it is
    garbage-collected.
    """

    def __init__(self, num_bytes: int, *, pin: bool) -> None:
        self._tensor: Tensor | None = torch.empty(num_bytes, dtype=torch.uint8)
        self._finalizer: finalize[..., HostBuffer] | None = None
        if pin and num_bytes:
            _check(torch.cuda.cudart().cudaHostRegister(self._tensor.data_ptr(), num_bytes, 0), "lock", num_bytes)
            self._finalizer = finalize(self, _unlock_late, self._tensor)
            self._finalizer.atexit = False

    @property
    def bytes(self) -> Tensor:
        """The buffer as uint8 ``[num_bytes]``; raises ``RuntimeError`` after ``close``."""
        if self._tensor is None:
            raise RuntimeError("the host buffer is closed")
        return self._tensor

    def close(self) -> None:
        """Free the memory; may be called again, also after it has raised."""
        if self._tensor is not None and self._finalizer is not None:
            _unlock(self._tensor)
            self._finalizer.detach()
            self._finalizer = None
        self._tensor = None


def _unlock(tensor: Tensor) -> None:
    _check(torch.cuda.cudart().cudaHostUnregister(tensor.data_ptr()), "unlock", len(tensor))


def _unlock_late(tensor: Tensor) -> None:
    torch.cuda.synchronize()  # nothing has waited for its copies yet
    _unlock(tensor)


def _check(error: object, action: str, num_bytes: int) -> None:
    if int(error) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"CUDA could not {action} {num_bytes} bytes of host memory: {error}")


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
    buffer = torch.empty(room_bytes(len(total), total.dtype, part.dtype) // wide.itemsize, dtype=wide)
    squared = torch.zeros((), dtype=torch.float64)
    for total_block, part_block in zip(total.split(BLOCK), part.split(BLOCK), strict=True):
        converted = buffer[: len(total_block)]
        if is_first:
            total_block.copy_(part_block)
        elif total_block.dtype is part_block.dtype is wide:
            total_block.add_(part_block)
        elif total_block.dtype is wide:
            total_block.add_(converted.copy_(part_block))
        else:
            total_block.copy_(converted.copy_(total_block).add_(part_block))
        values = total_block if total_block.dtype is wide else converted.copy_(total_block)
        squared += torch.dot(values, values)
    return squared


def room_bytes(num_elements: int, *dtypes: torch.dtype) -> int:
    """Return the temporary bytes that ``add_up`` needs for converted copies of ``num_elements`` of these dtypes."""
    return 0 if all(dtype is torch.float32 for dtype in dtypes) else min(BLOCK, num_elements) * torch.float32.itemsize

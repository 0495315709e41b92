"""Host memory of exact size, page-locked so that a GPU can copy from and to it at full speed."""

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


def _check(error: object, what: str, num_bytes: int) -> None:
    if int(error) != 0:  # type: ignore[call-overload]
        raise RuntimeError(f"CUDA could not {what} {num_bytes} bytes of host memory: {error}")

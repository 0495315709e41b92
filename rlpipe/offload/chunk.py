"""One chunk: its bytes on the host, its storage on the device, and the tensors of the model that lie in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlpipe.offload.host import HostBuffer
from rlpipe.offload.layout import Chunk


@dataclass(kw_only=True, slots=True, frozen=True)
class Member:
    """A tensor of the model, where it is held, and how another is put in its place."""

    name: str
    get: Callable[[], Tensor]
    put: Callable[[Tensor], None]

    @classmethod
    def of_parameter(cls, name: str, parameter: torch.nn.Parameter) -> Member:
        def put(tensor: Tensor) -> None:
            parameter.data = tensor

        return cls(name=name, get=lambda: parameter.data, put=put)

    @classmethod
    def of_attribute(cls, name: str, owner: object, attribute: str) -> Member:
        """A tensor that belongs to a parameter, such as the scales of a 4-bit one."""
        return cls(
            name=name,
            get=lambda: getattr(owner, attribute),
            put=lambda tensor: setattr(owner, attribute, tensor),
        )


class ChunkMemory:
    """Moves a chunk's tensors between host and device.

    Its storage on the device stays the same object, of which the memory comes and goes: what autograd and kernels
    remembered of the tensors is right again as soon as the chunk is back. While it is out, the model's tensors have
    their shapes, and read as NaN.
    """

    def __init__(self, chunk: Chunk, members: Sequence[Member], *, device: torch.device, pin: bool) -> None:
        assert [member.name for member in members] == [place.name for place in chunk.places]
        self.chunk = chunk
        self._members = list(members)
        self._host = HostBuffer(chunk.num_bytes, pin=pin)
        tensors = [member.get() for member in members]
        self._storage = torch.UntypedStorage(chunk.num_bytes, device=device)
        self._bytes = self._alias(torch.uint8, 0, torch.Size([chunk.num_bytes]))
        self._views = [
            self._alias(tensor.dtype, place.offset, tensor.shape)
            for tensor, place in zip(tensors, chunk.places, strict=True)
        ]
        self._placeholders = [_placeholder(view) for view in self._views]
        for tensor, place in zip(tensors, chunk.places, strict=True):
            target = self._host.bytes[place.offset : place.offset + place.num_bytes]
            target.copy_(tensor.contiguous().flatten().view(torch.uint8))
        self.is_resident = True
        self.is_closed = False
        self.release()

    @property
    def host_bytes(self) -> Tensor:
        return self._host.bytes

    def load(self) -> None:
        """Brings the tensors to the device, on the current stream; they are the model's at once."""
        assert not self.is_resident
        self._storage.resize_(self.chunk.num_bytes)
        self._bytes.copy_(self._host.bytes, non_blocking=True)
        self._put(self._views)
        self.is_resident = True

    def release(self) -> None:
        """Frees the memory on the device; what was written there is lost."""
        assert self.is_resident
        self._put(self._placeholders)
        self._storage.resize_(0)
        self.is_resident = False

    def write_back(self) -> None:
        """Copies the device's bytes to the host, on the current stream."""
        assert self.is_resident
        self._host.bytes.copy_(self._bytes, non_blocking=True)

    def close(self) -> None:
        """Gives the model tensors of its own, with the host's bytes, and frees all memory; may be called again, also after
        it has raised."""
        if not self.is_closed:
            for member, view, place in zip(self._members, self._views, self.chunk.places, strict=True):
                own = self._host.bytes[place.offset : place.offset + place.num_bytes].clone()
                member.put(own.view(view.dtype).view(view.shape))
            self._storage.resize_(0)
            self.is_closed = True
        self._host.close()

    def _alias(self, dtype: torch.dtype, offset: int, shape: torch.Size) -> Tensor:
        """A tensor on the storage, with a version counter of its own: loading must not count as a change."""
        empty = torch.empty(0, dtype=dtype, device=self._storage.device)
        return empty.set_(self._storage, offset // dtype.itemsize, shape)  # type: ignore[call-overload, no-any-return]

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for member, tensor in zip(self._members, tensors, strict=True):
            member.put(tensor)


def _placeholder(tensor: Tensor) -> Tensor:
    value = float("nan") if tensor.dtype.is_floating_point else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

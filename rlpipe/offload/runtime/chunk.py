"""One chunk: its bytes on the host, its storage on the device, and the tensors of the model that lie in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor

from rlpipe.hardware.host import HostBuffer
from rlpipe.offload.layout import ALIGNMENT, Chunk, aligned
from rlpipe.offload.runtime.chunk_ranks import ChunkRanks
from rlpipe.offload.runtime.streams import Lane, StreamEvent

Fill = Callable[[str, Tensor], None]
"""Gives a tensor, on the host, the values of the one of this name; for models without memory of their own."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Member:
    """A tensor of the model, where it is held, and how another is put in its place."""

    name: str
    get: Callable[[], Tensor]
    put: Callable[[Tensor], None]
    dtype: torch.dtype
    """That it is computed with."""

    @classmethod
    def of_parameter(cls, name: str, parameter: torch.nn.Parameter, dtype: torch.dtype | None = None) -> Member:
        def put(tensor: Tensor) -> None:
            set_values(parameter, tensor)

        return cls(name=name, get=lambda: parameter.data, put=put, dtype=dtype or parameter.dtype)

    @classmethod
    def of_attribute(cls, name: str, owner: object, path: str) -> Member:
        """A tensor that belongs to a parameter, such as the scales of a 4-bit one."""
        *owners, attribute = path.split(".")
        holder = attrgetter(".".join(owners))(owner) if owners else owner
        return cls(
            name=name,
            get=lambda: getattr(holder, attribute),
            put=lambda tensor: setattr(holder, attribute, tensor),
            dtype=getattr(holder, attribute).dtype,
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class ChunkPiece:
    """A tensor of a chunk, and the elements of it that this rank has."""

    dtype: torch.dtype
    shape: torch.Size
    in_whole: slice
    """Of the flat chunk in its type."""
    in_part: slice
    """Of this rank's flat part; empty where it has none of it."""
    in_tensor: slice
    """Of the flattened tensor."""

    @property
    def num_elements(self) -> int:
        """That this rank has."""
        return int(self.in_part.stop - self.in_part.start)


class ChunkMemory:
    """Moves a chunk's tensors between host and device.

    Its storage on the device stays the same object, of which the memory comes and goes: what autograd and kernels
    remembered of the tensors is right again as soon as the chunk is back. While it is out, the model's tensors have
    their shapes, and read as NaN. A persistent one is always there, and has no memory on the host.
    """

    def __init__(
        self,
        chunk: Chunk,
        members: Sequence[Member],
        *,
        device: torch.device,
        ranks: ChunkRanks,
        is_persistent: bool = False,
        room: int = 0,
        state_dtype: torch.dtype | None = None,
        fill: Fill | None = None,
    ) -> None:
        """Takes the tensors out of the model, or, if it raises, none of them.

        ``room`` is what is asked of the device's memory, at least; ``state_dtype`` what trained weights are updated in,
        if that is not what they are computed with.
        """
        assert [member.name for member in members] == [place.name for place in chunk.places]
        self.chunk, self.is_persistent, self.device = chunk, is_persistent, device
        self._members, self._ranks = list(members), ranks
        self.num_bytes = aligned(chunk.num_bytes, ALIGNMENT * ranks.num_parts)
        self.room = max(room, self.num_bytes)
        self._part = ranks.part(self.num_bytes)
        self._storage = torch.empty(self.room, dtype=torch.uint8, device=device).untyped_storage()
        self._bytes = self._alias(torch.uint8, 0, torch.Size([self.num_bytes]))
        shapes = [member.get().shape for member in members]
        self._views = [
            self._alias(member.dtype, place.offset, shape)
            for member, place, shape in zip(members, chunk.places, shapes, strict=True)
        ]
        self._placeholders = [_placeholder(view) for view in self._views]
        self.pieces = {name: self._piece(name, ranks.rank % ranks.num_parts) for name in self.names}
        self._origins = [_origin(member.get()) for member in members]
        self._host: HostBuffer | None = None
        if not is_persistent:
            self._host = HostBuffer(self._part.stop - self._part.start, pin=device.type == "cuda")
        self.is_resident, self.is_closed = True, False
        self.master: Tensor | None = None
        """This rank's part of the trained weights, flat, in the type that they are updated in."""
        try:
            self._copy(state_dtype or self.work_dtype, fill)
        except BaseException:
            if self._host is not None:
                self._host.close()
            raise
        if is_persistent:
            self._put(self._views)
        else:
            self.release()

    def _copy(self, state_dtype: torch.dtype, fill: Fill | None) -> None:
        """Copies the model's tensors to where this rank keeps its part."""
        work = torch.empty(self.num_bytes, dtype=torch.uint8)
        is_wider = self.has_own_master = self.chunk.is_trained and state_dtype is not self.work_dtype
        wide = torch.zeros(self.num_bytes // self.work_dtype.itemsize if is_wider else 0, dtype=state_dtype)
        for member, place in zip(self._members, self.chunk.places, strict=True):
            values = make_real(member.name, member.get(), fill)
            narrow = values.to("cpu", member.dtype).contiguous()
            work[place.offset : place.offset + place.num_bytes] = narrow.flatten().view(torch.uint8)
            if is_wider:
                begin = place.offset // member.dtype.itemsize
                wide[begin : begin + values.numel()] = values.flatten()
        if self.is_persistent:
            self._bytes.copy_(work)
        else:
            self.host_bytes.copy_(work[self._part])
        if is_wider:
            self.master = wide[self._ranks.part(len(wide))].to(self._work_bytes().device, copy=True)
        elif self.chunk.is_trained:
            self.master = self.work

    @property
    def host_bytes(self) -> Tensor:
        assert self._host is not None
        return self._host.bytes

    def _work_bytes(self) -> Tensor:
        return self._bytes[self._part] if self.is_persistent else self.host_bytes

    @property
    def work(self) -> Tensor:
        """This rank's part of a trained chunk as it is computed with, flat, where it is kept."""
        assert self.chunk.is_trained
        return self._work_bytes().view(self._members[0].dtype)

    @property
    def work_dtype(self) -> torch.dtype:
        return self._members[0].dtype

    @property
    def storage_key(self) -> int:
        """By which tensors that lie in it are known."""
        return self._storage._cdata

    @property
    def names(self) -> list[str]:
        return [place.name for place in self.chunk.places]

    def load(self, lane: Lane, behind: StreamEvent | None = None) -> StreamEvent:
        """Brings the tensors to the device; they are the model's at once, and right after the event.

        ``behind`` is as ``Lane.submit`` has it; the memory that the chunk takes must be free by then.
        Where there is no room, raises what torch raises, and leaves the chunk out.
        """
        assert not self.is_resident
        assert not self.is_persistent
        source = self.host_bytes

        def work() -> None:
            self._storage.resize_(self.room)
            self._bytes[self._part].copy_(source, non_blocking=True)
            self._ranks.gather(self._bytes)

        try:
            event = lane.submit(work, behind)
        except BaseException:
            self._storage.resize_(0)
            raise
        self._put(self._views)
        self.is_resident = True
        return event

    def release(self) -> None:
        """Frees the memory on the device; what was written there is lost."""
        assert self.is_resident
        assert not self.is_persistent
        self._put(self._placeholders)
        self._storage.resize_(0)
        self.is_resident = False

    def part(self, name: str) -> Tensor:
        """What this rank has of a tensor, flat, as it is updated if it is trained; shares the chunk's memory."""
        piece = self.pieces[name]
        flat = self._work_bytes().view(piece.dtype) if self.master is None else self.master
        return flat[piece.in_part]

    def whole(self, name: str) -> Tensor:
        """A tensor, as it is updated if it is trained; shares the chunk's memory where that has all of it. All ranks
        must call it."""
        own, num_parts = self.part(name), self._ranks.num_parts
        if self.is_persistent and not self.has_own_master:
            return self._views[self.names.index(name)]
        if num_parts == 1:
            return own.view(self.pieces[name].shape)
        sizes = [self._piece(name, part).num_elements for part in range(num_parts)]
        gathered = torch.empty(num_parts, max(sizes), dtype=own.dtype, device=self.device)
        gathered[self._ranks.rank, : len(own)] = own
        self._ranks.gather(gathered.view(-1).view(torch.uint8))
        parts = [row[:size] for row, size in zip(gathered, sizes, strict=True)]
        return torch.cat(parts).view(self.pieces[name].shape)

    def write(self, name: str, values: Tensor) -> None:
        """Changes a tensor to ``values``, all of it; they count once it is loaded again. All ranks must call it."""
        self.part(name).copy_(values.flatten()[self.pieces[name].in_tensor])
        self.spread()

    def spread(self) -> None:
        """Brings what was changed to where it is computed with: into that type, and for a persistent one to the other
        ranks, which all must call it."""
        if self.master is not None and self.has_own_master:
            self.work.copy_(self.master)
        if self.is_persistent:
            self._ranks.gather(self._bytes)

    def close(self) -> None:
        """Gives the model tensors of its own, where they lay before, and frees all memory; may be called again, also
        after it has raised. All ranks must call it."""
        if not self.is_closed:
            for member, (device, dtype) in zip(self._members, self._origins, strict=True):
                member.put(self.whole(member.name).to(device, dtype, copy=True))
            self._storage.resize_(0)
            self.is_closed = True
            self.master = None
        if self._host is not None:
            self._host.close()

    def _piece(self, name: str, part: int) -> ChunkPiece:
        index = self.names.index(name)
        view, dtype = self._views[index], self._members[index].dtype
        length = self.num_bytes // self._ranks.num_parts // dtype.itemsize
        begin = self.chunk.places[index].offset // dtype.itemsize
        end = begin + view.numel()
        first = max(begin, part * length)
        last = max(first, min(end, (part + 1) * length))
        return ChunkPiece(
            dtype=dtype,
            shape=view.shape,
            in_whole=slice(begin, end),
            in_part=slice(first - part * length, last - part * length),
            in_tensor=slice(first - begin, last - begin),
        )

    def _alias(self, dtype: torch.dtype, offset: int, shape: torch.Size) -> Tensor:
        """A tensor on the storage, with a version counter of its own: loading must not count as a change."""
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(self._storage, offset // dtype.itemsize, shape)  # type: ignore[call-overload, no-any-return]

    def _put(self, tensors: Sequence[Tensor]) -> None:
        for member, tensor in zip(self._members, tensors, strict=True):
            member.put(tensor)


def set_values(parameter: torch.nn.Parameter, values: Tensor) -> None:
    """Has a parameter lie where ``values`` do; it stays the same object."""
    if parameter.is_meta and not values.is_meta:  # which .data refuses
        real = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, real)
    else:
        parameter.data = values


def make_real(name: str, tensor: Tensor, fill: Fill | None) -> Tensor:
    """The tensor itself, or one on the host with the values of ``fill`` for one on the meta device."""
    if not tensor.is_meta:
        return tensor
    if fill is None:
        raise ValueError(f"{name} is on the meta device and has no values: give fill")
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    fill(name, values)
    return values


def _origin(tensor: Tensor) -> tuple[torch.device, torch.dtype]:
    """Where a tensor is to lie again; what had no values comes to the CPU."""
    return torch.device("cpu") if tensor.is_meta else tensor.device, tensor.dtype


def _placeholder(tensor: Tensor) -> Tensor:
    value = float("nan") if tensor.dtype.is_floating_point else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

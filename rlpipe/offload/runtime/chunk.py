"""A chunk of weights: its memory on host and device, and its parts on each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.hardware.host_memory import HostBuffer
from rlpipe.offload.layout import ALIGNMENT, Chunk, aligned
from rlpipe.offload.runtime.activations import CopyStream, StreamEvent
from rlpipe.offload.units import Fill, Member, materialize


class ChunkRanks(Protocol):
    """One rank's view of the group; all ranks must make the same calls of ``gather``, ``reduce`` and ``sum``."""

    rank: int
    num_ranks: int
    num_parts: int
    """Number of parts that every chunk is cut into."""

    def part(self, length: int) -> slice:
        """Return the slice of ``length`` elements, a multiple of ``num_parts``, that this rank holds."""

    def gather(self, whole: Tensor) -> None:
        """Fill ``whole``, in which this rank's part is set, with the parts of the other ranks."""

    def reduce(self, whole: Tensor) -> Tensor:
        """Return this rank's part of the sum over all ranks."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum ``values`` over all ranks, in place, and return them."""


class OneRank:
    """A group of one rank, which has all of every chunk."""

    rank, num_ranks, num_parts = 0, 1, 1

    def part(self, length: int) -> slice:
        return slice(0, length)

    def gather(self, whole: Tensor) -> None:
        pass

    def reduce(self, whole: Tensor) -> Tensor:
        return whole

    def sum(self, values: Tensor) -> Tensor:
        return values


class Replicated(OneRank):
    """Ranks that each hold and update all of every chunk."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()

    def reduce(self, whole: Tensor) -> Tensor:
        whole = whole.float()
        dist.all_reduce(whole)
        return whole

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values


class Sharded:
    """Ranks that each hold and update one part of every chunk."""

    def __init__(self) -> None:
        self.rank, self.num_ranks = dist.get_rank(), dist.get_world_size()
        self.num_parts = self.num_ranks

    def part(self, length: int) -> slice:
        assert length % self.num_parts == 0
        size = length // self.num_parts
        return slice(self.rank * size, (self.rank + 1) * size)

    def gather(self, whole: Tensor) -> None:
        dist.all_gather_single(whole, whole[self.part(len(whole))].clone())

    def reduce(self, whole: Tensor) -> Tensor:
        whole = whole.float()
        part = torch.empty(len(whole) // self.num_parts, dtype=whole.dtype, device=whole.device)
        dist.reduce_scatter_single(part, whole)
        return part

    def sum(self, values: Tensor) -> Tensor:
        dist.all_reduce(values)
        return values


@dataclass(kw_only=True, slots=True, frozen=True)
class ChunkPiece:
    """A tensor of a chunk, and the position of this rank's elements."""

    dtype: torch.dtype
    shape: torch.Size
    in_whole: slice
    """Elements of the flat chunk that hold the whole tensor."""
    in_part: slice
    """Elements of this rank's flat part that belong to the tensor; empty if there are none."""
    in_tensor: slice
    """Elements of the flattened tensor that this rank has."""

    @property
    def num_elements(self) -> int:
        """Number of the tensor's elements on this rank."""
        return int(self.in_part.stop - self.in_part.start)


class ChunkMemory:
    """Host and device memory of a chunk, and the transfers between them.

    The device storage stays the same object while its memory is freed and allocated again, so that references of
    autograd and kernels to the tensors are valid again once the chunk is loaded. While the chunk is released, the
    model's tensors keep their shapes and read as NaN. A persistent chunk is always on the device and has no host
    memory.
    """

    def __init__(
        self,
        chunk: Chunk,
        members: Sequence[Member],
        *,
        device: torch.device,
        ranks: ChunkRanks,
        is_persistent: bool = False,
        min_bytes: int = 0,
        state_dtype: torch.dtype | None = None,
        fill: Fill | None = None,
    ) -> None:
        """Move the members' tensors out of the model; if this raises, the model keeps all of them.

        At least ``min_bytes`` are allocated on the device; ``state_dtype`` is the dtype in which trained
        weights are updated, if it is not the compute dtype.
        """
        assert [member.name for member in members] == [span.name for span in chunk.spans]
        self.chunk, self.is_persistent, self.device = chunk, is_persistent, device
        self._members, self._ranks = list(members), ranks
        self.num_bytes = aligned(chunk.num_bytes, ALIGNMENT * ranks.num_parts)
        self.allocated_bytes = max(min_bytes, self.num_bytes)
        self._part = ranks.part(self.num_bytes)
        self._storage = torch.empty(self.allocated_bytes, dtype=torch.uint8, device=device).untyped_storage()
        self._bytes = self._alias(torch.uint8, 0, torch.Size([self.num_bytes]))
        shapes = [member.get().shape for member in members]
        self._views = [
            self._alias(member.dtype, span.offset, shape)
            for member, span, shape in zip(members, chunk.spans, shapes, strict=True)
        ]
        self._placeholders = [_placeholder(view) for view in self._views]
        self.pieces = {name: self._piece(name, ranks.rank % ranks.num_parts) for name in self.names}
        self._origins = [_origin(member.get()) for member in members]
        self._host: HostBuffer | None = None
        if not is_persistent:
            self._host = HostBuffer(self._part.stop - self._part.start, pin=device.type == "cuda")
        self.is_resident, self.is_closed = True, False
        self.master: Tensor | None = None
        """This rank's part of the trained weights, flat, in the optimizer's dtype; None for a frozen chunk."""
        try:
            self._copy(state_dtype or self.work_dtype, fill)
        except BaseException:
            if self._host is not None:
                self._host.close()
            raise
        if is_persistent:
            self._set_tensors(self._views)
        else:
            self.release()

    def _copy(self, state_dtype: torch.dtype, fill: Fill | None) -> None:
        """Copy the model's tensors into the memory in which this rank keeps its part."""
        work = torch.empty(self.num_bytes, dtype=torch.uint8)
        is_wider = self.has_own_master = self.chunk.is_trained and state_dtype is not self.work_dtype
        wide = torch.zeros(self.num_bytes // self.work_dtype.itemsize if is_wider else 0, dtype=state_dtype)
        for member, span in zip(self._members, self.chunk.spans, strict=True):
            values = materialize(member.name, member.get(), fill)
            narrow = values.to("cpu", member.dtype).contiguous()
            work[span.offset : span.offset + span.num_bytes] = narrow.flatten().view(torch.uint8)
            if is_wider:
                begin = span.offset // member.dtype.itemsize
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
        """This rank's part of a trained chunk, flat, in the compute dtype; on the device if persistent."""
        assert self.chunk.is_trained
        return self._work_bytes().view(self._members[0].dtype)

    @property
    def work_dtype(self) -> torch.dtype:
        return self._members[0].dtype

    @property
    def storage_key(self) -> int:
        """Key that identifies the device storage of a tensor in this chunk."""
        return self._storage._cdata

    @property
    def names(self) -> list[str]:
        return [span.name for span in self.chunk.spans]

    def load(self, stream: CopyStream, after: StreamEvent | None = None) -> StreamEvent:
        """Begin to copy the chunk to the device, and return the event after which its values are valid.

        The model gets the device tensors at once. The copy waits for ``after``, as in ``CopyStream.submit``, by which
        the memory that the chunk takes must be free. If memory runs out, torch's error is raised and the chunk stays
        released.
        """
        assert not self.is_resident
        assert not self.is_persistent
        source = self.host_bytes

        def work() -> None:
            self._storage.resize_(self.allocated_bytes)
            self._bytes[self._part].copy_(source, non_blocking=True)
            self._ranks.gather(self._bytes)

        try:
            event = stream.submit(work, after)
        except BaseException:
            self._storage.resize_(0)
            raise
        self._set_tensors(self._views)
        self.is_resident = True
        return event

    def release(self) -> None:
        """Free the device memory; values written there are lost."""
        assert self.is_resident
        assert not self.is_persistent
        self._set_tensors(self._placeholders)
        self._storage.resize_(0)
        self.is_resident = False

    def part(self, name: str) -> Tensor:
        """Return this rank's elements of a tensor, flat; they share the chunk's memory.

        A trained tensor has the optimizer's dtype.
        """
        piece = self.pieces[name]
        flat = self._work_bytes().view(piece.dtype) if self.master is None else self.master
        return flat[piece.in_part]

    def whole(self, name: str) -> Tensor:
        """Return a whole tensor, in the optimizer's dtype if it is trained; all ranks must call it.

        It shares the chunk's memory if this rank has all of it.
        """
        local, num_parts = self.part(name), self._ranks.num_parts
        if self.is_persistent and not self.has_own_master:
            return self._views[self.names.index(name)]
        if num_parts == 1:
            return local.view(self.pieces[name].shape)
        sizes = [self._piece(name, number).num_elements for number in range(num_parts)]
        gathered = torch.empty(num_parts, max(sizes), dtype=local.dtype, device=self.device)
        gathered[self._ranks.rank, : len(local)] = local
        self._ranks.gather(gathered.view(-1).view(torch.uint8))
        rank_parts = [row[:size] for row, size in zip(gathered, sizes, strict=True)]
        return torch.cat(rank_parts).view(self.pieces[name].shape)

    def write(self, name: str, values: Tensor) -> None:
        """Overwrite a whole tensor with ``values``; all ranks must call it.

        If the chunk is not persistent, the values are used from its next load on.
        """
        self.part(name).copy_(values.flatten()[self.pieces[name].in_tensor])
        self.spread()

    def spread(self) -> None:
        """Convert updated weights to the compute dtype, and exchange those of a persistent chunk between the ranks.

        All ranks must call it.
        """
        if self.master is not None and self.has_own_master:
            self.work.copy_(self.master)
        if self.is_persistent:
            self._ranks.gather(self._bytes)

    def close(self) -> None:
        """Give the model tensors of its own on their original devices, and free all memory of the chunk.

        It may be called again, also after it has raised. All ranks must call it.
        """
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
        begin = self.chunk.spans[index].offset // dtype.itemsize
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
        """Create a tensor on the device storage, with its own version counter: loading must not count as a change."""
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(self._storage, offset // dtype.itemsize, shape)  # type: ignore[call-overload, no-any-return]

    def _set_tensors(self, tensors: Sequence[Tensor]) -> None:
        for member, tensor in zip(self._members, tensors, strict=True):
            member.put(tensor)


def _origin(tensor: Tensor) -> tuple[torch.device, torch.dtype]:
    """Return the device and dtype to restore a tensor to; a meta tensor goes to the CPU."""
    return torch.device("cpu") if tensor.is_meta else tensor.device, tensor.dtype


def _placeholder(tensor: Tensor) -> Tensor:
    value = float("nan") if tensor.dtype.is_floating_point else 0
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device).expand(tensor.shape)

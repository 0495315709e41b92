"""What autograd keeps of a unit's forward pass: weights are left to the chunks, the rest stays or goes to the host."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from rlpipe.hardware.host import HostBuffer
from rlpipe.offload.layout import aligned
from rlpipe.offload.runtime.streams import Queues

MOST_SPARE = 4 * 2**30
"""Bytes that an arena grows by beyond what it needs, at most: what is planned for leaves a tenth of the host's free."""


@dataclass(slots=True, eq=False)
class Weight:
    """A tensor that lies in a chunk."""

    index: int
    tensor: Tensor


class WeightHooks:
    """Has a chunk back before the backward pass uses what was saved of it; all else stays as it is."""

    def __init__(self, chunks: Mapping[int, int], ensure: Callable[[int], None]) -> None:
        """``chunks`` finds a chunk's number by its storage's key."""
        self._chunks, self._ensure = chunks, ensure

    def watch(self) -> AbstractContextManager[None]:
        return saved_tensors_hooks(self._pack, self._unpack)

    def weight(self, tensor: Tensor) -> Weight | None:
        # The storage's own address stays, while that of its memory comes and goes.
        index = self._chunks.get(tensor.untyped_storage()._cdata)
        return None if index is None else Weight(index, tensor)

    def restore(self, weight: Weight) -> Tensor:
        self._ensure(weight.index)
        return weight.tensor

    def _pack(self, tensor: Tensor) -> Tensor | Weight:
        # A tensor that holds the graph that saves it would keep both for ever, where no backward pass frees the graph.
        return self.weight(tensor) or tensor.detach()

    def _unpack(self, packed: Tensor | Weight) -> Tensor:
        return self.restore(packed) if isinstance(packed, Weight) else packed


class HostArena:
    """Host memory for swapped activations: what one step took is there at once for the next.

    Grows between two steps; what does not fit before that has memory of its own.
    """

    def __init__(self, queues: Queues, *, pin: bool) -> None:
        """``queues`` has the lanes that copy from and to it."""
        self._lanes, self._pin = (queues.copies_in, queues.copies_out), pin
        self._buffer: HostBuffer | None = None
        self._used = 0

    @property
    def num_bytes(self) -> int:
        return 0 if self._buffer is None else len(self._buffer.bytes)

    def take(self, num_bytes: int) -> Tensor:
        """Bytes that are the caller's until ``reset``."""
        begin, self._used = self._used, self._used + aligned(num_bytes)
        if self._buffer is None or self._used > len(self._buffer.bytes):
            return torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer.bytes[begin : begin + num_bytes]

    def reset(self) -> None:
        """Nothing that was taken is in use any more."""
        if self._used > self.num_bytes:
            # Locking pages is slow: micro batches that are each a little longer must not do it each.
            room = self.num_bytes + min(self.num_bytes // 4, MOST_SPARE)
            self.close()
            self._buffer = HostBuffer(max(self._used, room), pin=self._pin)
        self._used = 0

    def close(self) -> None:
        """Frees the memory, once the device is through with it."""
        if self._buffer is not None:
            # The host is up to a micro batch ahead of the device.
            for lane in self._lanes:
                lane.block_host()
            self._buffer.close()
            self._buffer = None


class Swapped:
    """Saved bytes that are on the host between forward and backward pass."""

    def __init__(self, tensor: Tensor, host: Tensor, queues: Queues) -> None:
        """``tensor`` is ``[N]``."""
        # Without it, another storage could take the address by which this one is known.
        self._origin = StorageWeakRef(tensor.untyped_storage())
        self._host = host.view(tensor.dtype)
        self._device, self._queues = tensor.device, queues
        self._tensor: Tensor | None = None

        def leave() -> None:
            self._host.copy_(tensor, non_blocking=True)
            _record(tensor)

        self._event = queues.copies_out.submit(leave)

    def fetch(self) -> None:
        """Brings them back, beside what is computed, and beside gradients that leave.

        What leaves next may take their place on the host: it waits for the computation, which waits for what it uses
        of what came back.
        """
        if self._tensor is None:
            # Made by the computation's stream, which also frees it.
            tensor, left = torch.empty_like(self._host, device=self._device), self._event

            def come() -> None:
                left.block_device()
                tensor.copy_(self._host, non_blocking=True)
                _record(tensor)

            self._event = self._queues.copies_in.submit(come)
            self._tensor = tensor

    def restore(self) -> Tensor:
        self.fetch()
        self._event.block_device()
        assert self._tensor is not None
        return self._tensor


@dataclass(slots=True, eq=False)
class View:
    """A saved tensor, as a part of what was swapped."""

    swapped: Swapped
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def restore(self) -> Tensor:
        return self.swapped.restore().as_strided(self.shape, self.stride, self.offset)


def _record(tensor: Tensor) -> None:
    """Its memory is the computation's, which may free it before this lane is through with it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class SwapHooks:
    """Of one call of a unit: what autograd saves goes to the host, but weights and what stays on the device anyway."""

    def __init__(self, weights: WeightHooks, arena: HostArena, queues: Queues, stays: Callable[[Tensor], bool]) -> None:
        self._weights, self._arena, self._queues, self._stays = weights, arena, queues, stays
        # Only autograd holds them: each goes as soon as it has been used.
        self._swapped: WeakValueDictionary[Hashable, Swapped] = WeakValueDictionary()

    def watch(self) -> AbstractContextManager[None]:
        return saved_tensors_hooks(self._pack, self._unpack)

    def fetch(self) -> None:
        """Begins to bring all of it back."""
        for swapped in list(self._swapped.values()):
            swapped.fetch()

    def _pack(self, tensor: Tensor) -> Tensor | Weight | View:
        weight = self._weights.weight(tensor)
        if weight is not None:
            return weight
        if self._stays(tensor):
            return tensor.detach()
        saved = find_saved(tensor, self._swapped)
        swapped = self._swapped.get(saved.key)
        if swapped is None:
            flat = saved.flatten(tensor)
            swapped = self._swapped[saved.key] = Swapped(flat, self._arena.take(flat.nbytes), self._queues)
        return View(swapped, tensor.shape, tensor.stride(), int(tensor.storage_offset()) - saved.offset)

    def _unpack(self, packed: Tensor | Weight | View) -> Tensor:
        if isinstance(packed, View):
            return packed.restore()
        return self._weights.restore(packed) if isinstance(packed, Weight) else packed


@dataclass(slots=True, frozen=True)
class Saved:
    """What of a storage is to be kept of a tensor: all of it, for all its views, but for a small part."""

    key: Hashable
    offset: int
    num_elements: int

    def flatten(self, tensor: Tensor) -> Tensor:
        return tensor.detach().as_strided((self.num_elements,), (1,), self.offset)


def find_saved(tensor: Tensor, known: Container[Hashable]) -> Saved:
    """``known`` are keys of what is kept already."""
    storage, size = tensor.untyped_storage(), tensor.dtype.itemsize
    key = (storage._cdata, tensor._version, tensor.dtype)
    is_small = 2 * tensor.numel() * size < storage.nbytes()
    if is_small and key not in known and _is_dense(tensor):
        own = (*key, tensor.storage_offset(), tensor.shape, tensor.stride())
        return Saved(own, int(tensor.storage_offset()), tensor.numel())
    return Saved(key, 0, storage.nbytes() // size)


def _is_dense(tensor: Tensor) -> bool:
    """Whether it has one element for each place in its memory, in any order."""
    sizes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in sizes:
        if stride != expected:
            return False
        expected *= size
    return True

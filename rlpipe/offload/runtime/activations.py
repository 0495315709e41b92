"""Activations that move to the host between forward and backward, and the streams that they move on."""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from rlpipe.hardware.host_memory import HostBuffer
from rlpipe.offload.layout import aligned

Work = Callable[[], None]


class StreamEvent(Protocol):
    """A point in a queue."""

    def block_device(self) -> None:
        """Make later computation wait until the queue is past this point; in a stream's work, make that stream wait."""

    def block_host(self) -> None:
        """Block the calling thread until the queue is past this point."""


class CopyStream(Protocol):
    """A stream that runs work in order, beside the device's computation."""

    def mark(self) -> StreamEvent:
        """Return an event at the end of all computation that the device was given so far."""

    def submit(self, work: Work, after: StreamEvent | None = None) -> StreamEvent:
        """Queue work after the stream's earlier work and after the event ``after`` (None: ``mark()``)."""

    def block_host(self) -> None:
        """Block the calling thread until all submitted work is done."""


class Done:
    """The event of work that is done."""

    def block_device(self) -> None:
        pass

    def block_host(self) -> None:
        pass


class InlineStream:
    """A stream of the CPU, which runs all work immediately."""

    def mark(self) -> StreamEvent:
        return Done()

    def submit(self, work: Work, after: StreamEvent | None = None) -> StreamEvent:
        work()
        return Done()

    def block_host(self) -> None:
        pass


class CudaStream:
    """Copies on a CUDA stream of their own; create it once, since every stream keeps memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> StreamEvent:
        return CudaEvent(torch.cuda.current_stream(self._device), self._device)

    def submit(self, work: Work, after: StreamEvent | None = None) -> StreamEvent:
        after = after or self.mark()
        with torch.cuda.stream(self._stream):
            after.block_device()
            work()
            return CudaEvent(self._stream, self._device)

    def block_host(self) -> None:
        self._stream.synchronize()


class CudaEvent:
    """An event on a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def block_device(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def block_host(self) -> None:
        self._event.synchronize()


@dataclass(kw_only=True, slots=True, frozen=True)
class Streams:
    """The streams and the worker that run beside the computation."""

    copies_in: CopyStream
    copies_out: CopyStream
    worker: Executor
    """Executor of the host's arithmetic, one task after another."""


def make_streams(device: torch.device) -> Streams:
    def make_stream() -> CopyStream:
        return CudaStream(device) if device.type == "cuda" else InlineStream()

    # One thread, since each operator uses all of torch's threads: what is needed first is ready soonest. On a GPU one
    # core is left to the thread that launches kernels: a team whose last thread waits for a core waits with it.
    spare = 1 if device.type == "cuda" else 0
    num_threads = max(1, torch.get_num_threads() - spare)
    worker = ThreadPoolExecutor(
        max_workers=1, thread_name_prefix="offload", initializer=torch.set_num_threads, initargs=(num_threads,)
    )
    return Streams(copies_in=make_stream(), copies_out=make_stream(), worker=worker)


MAX_SPARE = 4 * 2**30
"""Most bytes that an arena allocates beyond its need; plans leave a tenth of the host's free memory for this."""


@dataclass(slots=True, eq=False)
class Weight:
    """A saved tensor that lies in a chunk."""

    index: int
    tensor: Tensor


class WeightHooks:
    """Saved-tensor hooks that load a chunk before the backward pass uses its tensors; others stay as they are."""

    def __init__(self, chunks: Mapping[int, int], ensure: Callable[[int], None]) -> None:
        """Create the hooks; ``chunks`` maps storage keys to chunk indices, and ``ensure`` loads a chunk."""
        self._chunks, self._ensure = chunks, ensure

    def watch(self) -> AbstractContextManager[None]:
        return saved_tensors_hooks(self._pack, self._unpack)

    def weight(self, tensor: Tensor) -> Weight | None:
        # The storage object keeps its address, while its memory is freed and allocated again.
        index = self._chunks.get(tensor.untyped_storage()._cdata)
        return None if index is None else Weight(index, tensor)

    def restore(self, weight: Weight) -> Tensor:
        self._ensure(weight.index)
        return weight.tensor

    def _pack(self, tensor: Tensor) -> Tensor | Weight:
        # A saved tensor that refers to its own graph is a cycle, which only a backward pass would free.
        return self.weight(tensor) or tensor.detach()

    def _unpack(self, packed: Tensor | Weight) -> Tensor:
        return self.restore(packed) if isinstance(packed, Weight) else packed


class HostArena:
    """Host memory for swapped activations, which each step reuses.

    It grows only between steps; until then, activations that do not fit have memory of their own.
    """

    def __init__(self, queues: Streams, *, pin: bool) -> None:
        """Create an empty arena; ``queues`` has the streams that copy from and to it."""
        self._streams, self._pin = (queues.copies_in, queues.copies_out), pin
        self._buffer: HostBuffer | None = None
        self._used = 0

    @property
    def num_bytes(self) -> int:
        return 0 if self._buffer is None else len(self._buffer.bytes)

    def take(self, num_bytes: int) -> Tensor:
        """Return memory that the caller may use until ``reset``."""
        begin, self._used = self._used, self._used + aligned(num_bytes)
        if self._buffer is None or self._used > len(self._buffer.bytes):
            return torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer.bytes[begin : begin + num_bytes]

    def reset(self) -> None:
        """Make all memory available again; nothing that was taken may still be in use."""
        if self._used > self.num_bytes:
            # Pinning is slow: micro batches that are each a little longer must not pin memory every time.
            larger = self.num_bytes + min(self.num_bytes // 4, MAX_SPARE)
            self.close()
            self._buffer = HostBuffer(max(self._used, larger), pin=self._pin)
        self._used = 0

    def close(self) -> None:
        """Free the memory once the device is done with it."""
        if self._buffer is not None:
            # The host is up to a micro batch ahead of the device.
            for stream in self._streams:
                stream.block_host()
            self._buffer.close()
            self._buffer = None


class Swapped:
    """A saved tensor that is on the host between the forward and the backward pass."""

    def __init__(self, tensor: Tensor, host: Tensor, queues: Streams) -> None:
        """Begin to copy ``tensor``, ``[N]``, to the bytes ``host``."""
        # Keeps another storage from getting the address that identifies this one.
        self._origin = StorageWeakRef(tensor.untyped_storage())
        self._host = host.view(tensor.dtype)
        self._device, self._queues = tensor.device, queues
        self._tensor: Tensor | None = None

        def leave() -> None:
            self._host.copy_(tensor, non_blocking=True)
            _record(tensor)

        self._event = queues.copies_out.submit(leave)

    def fetch(self) -> None:
        """Begin to copy the tensor back, overlapping with computation and with gradients on their way to the host.

        Its host memory may be reused by the next swaps: they wait for the computation, which waits for the tensors that
        it uses to come back.
        """
        if self._tensor is None:
            # Allocated on the computation's stream, which also frees it.
            tensor, copied_out = torch.empty_like(self._host, device=self._device), self._event

            def copy_in() -> None:
                copied_out.block_device()
                tensor.copy_(self._host, non_blocking=True)
                _record(tensor)

            self._event = self._queues.copies_in.submit(copy_in)
            self._tensor = tensor

    def restore(self) -> Tensor:
        self.fetch()
        self._event.block_device()
        assert self._tensor is not None
        return self._tensor


@dataclass(slots=True, eq=False)
class View:
    """A saved tensor as a view of a swapped one."""

    swapped: Swapped
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def restore(self) -> Tensor:
        return self.swapped.restore().as_strided(self.shape, self.stride, self.offset)


def _record(tensor: Tensor) -> None:
    """Keep a tensor's memory from being reused by the computation before this stream is done with it."""
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


class SwapHooks:
    """Saved-tensor hooks of one call of a unit, which swap all but weights and what stays on the device anyway."""

    def __init__(
        self, weights: WeightHooks, arena: HostArena, queues: Streams, stays: Callable[[Tensor], bool]
    ) -> None:
        self._weights, self._arena, self._queues, self._stays = weights, arena, queues, stays
        # Only autograd holds the values, so each is freed as soon as it has been used.
        self._swapped: WeakValueDictionary[Hashable, Swapped] = WeakValueDictionary()

    def watch(self) -> AbstractContextManager[None]:
        return saved_tensors_hooks(self._pack, self._unpack)

    def fetch(self) -> None:
        """Begin to copy all swapped tensors back."""
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
    """The elements of a storage to keep for a saved tensor: all, shared by its views, unless it is a small part."""

    key: Hashable
    offset: int
    num_elements: int

    def flatten(self, tensor: Tensor) -> Tensor:
        return tensor.detach().as_strided((self.num_elements,), (1,), self.offset)


def find_saved(tensor: Tensor, known: Container[Hashable]) -> Saved:
    """Return which elements to keep for ``tensor``; ``known`` holds the keys of what is kept already."""
    storage, size = tensor.untyped_storage(), tensor.dtype.itemsize
    key = (storage._cdata, tensor._version, tensor.dtype)
    is_small = 2 * tensor.numel() * size < storage.nbytes()
    if is_small and key not in known and _is_dense(tensor):
        dense_key = (*key, tensor.storage_offset(), tensor.shape, tensor.stride())
        return Saved(dense_key, int(tensor.storage_offset()), tensor.numel())
    return Saved(key, 0, storage.nbytes() // size)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor has one element for each position of its memory, in any order."""
    sizes = sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in sizes:
        if stride != expected:
            return False
        expected *= size
    return True

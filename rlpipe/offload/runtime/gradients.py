"""Gradients of chunks: from the device to the host, summed over passes and ranks, to the optimizer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from weakref import WeakMethod
from zlib import crc32

import torch
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.hardware.host_memory import HostBuffer
from rlpipe.offload.runtime.activations import StreamEvent, Streams
from rlpipe.offload.runtime.chunk import ChunkMemory, ChunkRanks
from rlpipe.offload.runtime.chunk_adam import Casts, ChunkAdam

NUM_STAGED = 2
"""Chunks whose gradients are in flight: one is copied while another is added up on the host."""


class Gradients:
    """Gradients of all trained chunks of a model; ``adams`` has their optimizers by chunk index."""

    def __init__(
        self,
        adams: Mapping[int, ChunkAdam],
        parameters: Mapping[str, nn.Parameter],
        *,
        device: torch.device,
        ranks: ChunkRanks,
        queues: Streams,
    ) -> None:
        self._device = device
        self._adams, self._ranks, self._stream, self._worker = adams, ranks, queues.copies_out, queues.worker
        self._open: dict[int, tuple[Tensor, set[str]]] = {}
        self._sent: dict[tuple[int, torch.dtype], list[Sent]] = defaultdict(list)
        self._num_same_size = Counter((adam.memory.allocated_bytes, adam.memory.work_dtype) for adam in adams.values())
        """Chunks per buffer size and dtype: a tied embedding, larger than the rest, needs one buffer only."""
        self._staging = [Staging(pin=device.type == "cuda") for _ in range(NUM_STAGED)]
        self._pending: list[Future[None]] = []
        take = WeakMethod(self._take)  # the garbage collector does not see what a parameter's hooks hold
        self._handles = [
            parameters[name].register_post_accumulate_grad_hook(partial(_take_for, take, index, name))
            for index, adam in adams.items()
            for name in adam.pieces
        ]

    def begin(self, indices: Iterable[int]) -> None:
        """Check, before a backward pass, that it makes gradients of the same chunks on all ranks.

        Raises ``RuntimeError`` on all ranks otherwise, since their collectives would not match. All ranks must call it.
        """
        if self._ranks.num_ranks == 1 or not self._adams:
            return
        chunks = sorted(index for index in indices if index in self._adams)
        mark = crc32(repr(chunks).encode()) % 2**24
        total, squares = self._ranks.sum(torch.tensor([mark, mark**2], device=self._device)).tolist()
        if total**2 != self._ranks.num_ranks * squares:  # equal only if all marks are
            raise RuntimeError(
                f"this rank's backward pass used the chunks {', '.join(map(str, chunks)) or 'none'}, another rank's "
                "other chunks: have all ranks call the same units of the model in each pass"
            )

    def finish(self, indices: Iterable[int]) -> None:
        """Send a backward pass's gradients of chunks to their optimizers.

        All ranks must call it with the same chunks, even if they have no gradients of them.
        """
        for index in indices:
            if index in self._adams and (index in self._open or self._ranks.num_ranks > 1):
                flat, names = self._open.pop(index) if index in self._open else self._open_buffer(index)
                self._send(self._adams[index], flat, names)

    def finish_rest(self) -> None:
        """Send the gradients of all chunks that are not finished."""
        self.finish(sorted(self._open))

    @property
    def device_bytes(self) -> int:
        """Bytes of the gradient buffers on the device, and of the ranks' sums of them."""
        tensors = [sent.flat for buffers in self._sent.values() for sent in buffers]
        tensors += [flat for flat, _ in self._open.values()]
        tensors += [part for part in (staging.part for staging in self._staging) if part is not None]
        # A sum may lie in the buffer itself.
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
        return sum(storages.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of the staging buffers on the host."""
        return sum(staging.num_bytes for staging in self._staging)

    def settle(self) -> None:
        """Wait until all gradients that were sent have been added up."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()

    def drop(self) -> None:
        self.settle()
        self._open.clear()
        for adam in self._adams.values():
            adam.drop()

    def close(self) -> None:
        self.settle()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for staging in self._staging:
            staging.close()

    def _take(self, index: int, name: str, parameter: Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if index not in self._open:
            self._open[index] = self._open_buffer(index)
        flat, names = self._open[index]
        target = flat[self._adams[index].pieces[name].in_whole].view(gradient.shape)
        target.add_(gradient) if name in names else target.copy_(gradient)
        names.add(name)

    def _open_buffer(self, index: int) -> tuple[Tensor, set[str]]:
        memory = self._adams[index].memory
        key = (memory.allocated_bytes, memory.work_dtype)
        sent = self._sent[key]
        if len(sent) >= min(NUM_STAGED, self._num_same_size[key]):
            oldest = sent.pop(0)
            oldest.event.block_device()
            flat = oldest.flat
        else:
            flat = torch.empty(
                memory.allocated_bytes // memory.work_dtype.itemsize, dtype=memory.work_dtype, device=memory.device
            )
        return flat, set()

    def _send(self, adam: ChunkAdam, flat: Tensor, names: set[str]) -> None:
        memory, is_first = adam.memory, adam.expect(names)
        for name, piece in adam.pieces.items():
            if name not in names:
                flat[piece.in_whole] = 0
        gradients = flat[: memory.num_bytes // memory.work_dtype.itemsize]
        if memory.is_persistent:
            adam.add(self._ranks.reduce(gradients), is_first=is_first)
            event = self._stream.submit(lambda: None)
        else:
            event = self._send_to_host(adam, gradients, is_first)
        self._sent[memory.allocated_bytes, memory.work_dtype].append(Sent(event, flat))

    def _send_to_host(self, adam: ChunkAdam, gradients: Tensor, is_first: bool) -> StreamEvent:
        staging = self._staging.pop(0)
        self._staging.append(staging)
        staging.wait()  # now, so that no more than NUM_STAGED sums are on the device
        part = self._ranks.reduce(gradients)
        host = staging.take(part)

        def copy() -> None:
            host.copy_(part, non_blocking=True)

        event = self._stream.submit(copy)
        staging.part = part

        def add() -> None:
            event.block_host()
            staging.part = None
            adam.add(host, is_first=is_first)

        staging.user = self._worker.submit(add)
        self._pending.append(staging.user)
        return event


@dataclass(slots=True)
class Sent:
    """A device buffer that is read until the event."""

    event: StreamEvent
    flat: Tensor


class Staging:
    """A buffer on the host in which gradients arrive."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._buffer: HostBuffer | None = None
        self.user: Future[None] | None = None
        self.part: Tensor | None = None
        """Source of the copy on the device, held until it has been read."""

    @property
    def num_bytes(self) -> int:
        return 0 if self._buffer is None else len(self._buffer.bytes)

    def wait(self) -> None:
        """Wait until the last user of the buffer is done, and raise what it raised."""
        user, self.user = self.user, None
        if user is not None:
            user.result()

    def take(self, like: Tensor) -> Tensor:
        """Return memory for a tensor of this size and dtype; call ``wait`` first."""
        if self._buffer is None or self.num_bytes < like.nbytes:
            self.close()
            self._buffer = HostBuffer(like.nbytes, pin=self._pin)
        return self._buffer.bytes[: like.nbytes].view(like.dtype)

    def close(self) -> None:
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None


def _take_for(
    take: Callable[[], Callable[[int, str, Tensor], None] | None], index: int, name: str, parameter: Tensor
) -> None:
    method = take()
    if method is not None:
        method(index, name, parameter)


class ChunkOptimizer:
    """AdamW with exact clipping for chunks, whose updates on the host overlap with the next forward pass.

    The norm is known only after the last gradient. Each update is given the learning rate and scale of its step when it
    is submitted.
    """

    def __init__(
        self,
        memories: Mapping[int, ChunkMemory],
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        device: torch.device,
        gradient_dtype: torch.dtype,
        ranks: ChunkRanks,
        queues: Streams,
        drop: Callable[[int], None],
    ) -> None:
        """Create the optimizer of trained chunks; ``drop`` frees the slots of a chunk that is about to change."""
        self._ranks, self._drop, self._device = ranks, drop, device
        self.casts = Casts()
        self.adams = {
            index: ChunkAdam(memory, config, gradient_dtype=gradient_dtype, casts=self.casts)
            for index, memory in memories.items()
        }
        self._worker = queues.worker
        self._updates: dict[int, Future[None]] = {}
        self.gradients = Gradients(self.adams, parameters, device=device, ranks=ranks, queues=queues)

    def squared_norm(self) -> Tensor:
        """Return the squared norm of this rank's part of the gradients (scalar, float32).

        If every rank holds all gradients, only the first counts them, and the others return 0.
        """
        self.gradients.finish_rest()
        self.gradients.settle()
        self._agree()
        for index in self._changing():
            self.await_update(index)
        norms = [adam.squared_norm().to(self._device) for adam in self.adams.values()]
        total = torch.stack(norms).sum() if norms else torch.zeros((), device=self._device)
        counts = self._ranks.num_parts > 1 or self._ranks.rank == 0
        return total if counts else torch.zeros_like(total)

    def _agree(self) -> None:
        """Mark the tensors that had a gradient on any rank as having one on all."""
        if self._ranks.num_ranks == 1 or not self.adams:
            return
        flags = [is_set for adam in self.adams.values() for is_set in adam.has_gradient.values()]
        counts = iter(self._ranks.sum(torch.tensor(flags, dtype=torch.int32, device=self._device)).tolist())
        for adam in self.adams.values():
            adam.has_gradient = {name: next(counts) > 0 for name in adam.has_gradient}

    def _changing(self) -> list[int]:
        return [index for index, adam in self.adams.items() if any(adam.has_gradient.values())]

    def apply(self, learning_rate: float, scale: float) -> None:
        """Begin the update of all chunks, after ``squared_norm``; ``await_update`` waits for a chunk's.

        The updates keep their gradients: those of the next update may arrive or be dropped while they run.
        """
        for index in self._changing():
            adam = self.adams[index]
            if adam.memory.is_persistent:
                adam.update(adam.take(), learning_rate, scale)
            else:
                self._drop(index)
                assert index not in self._updates, "squared_norm waits for the update before"
                self._updates[index] = self._worker.submit(adam.update, adam.take(), learning_rate, scale)

    def await_update(self, index: int) -> None:
        """Wait for a chunk's update, if one is running; raise what it raised."""
        update = self._updates.pop(index, None)
        if update is not None:
            update.result()

    def is_updated(self, index: int) -> bool:
        """Return whether ``await_update`` returns at once; if ranks hold parts, only if all of them know that."""
        if index not in self._updates:
            return True
        # Ranks that hold parts must gather in the same order, which may not depend on the progress of their hosts.
        return self._ranks.num_parts == 1 and self._updates[index].done()

    def flush(self) -> None:
        """Wait for all updates."""
        for index in list(self._updates):
            self.await_update(index)

    def drop(self) -> None:
        """Drop the gradients that are not applied; updates that have begun go on."""
        self.gradients.drop()

    def close(self) -> None:
        """Finish the updates, and drop the gradients that are not applied.

        Raises what an update raises; may be called again then.
        """
        self.flush()
        self.gradients.close()
        self._worker.shutdown()
        self.adams.clear()  # frees their memory

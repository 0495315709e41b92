"""Hooks around the units of a model that fetch chunks, and the record of which are on the device."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from rlpipe.offload.decision import Mode, swap_spans
from rlpipe.offload.runtime.activations import CopyStream, Done, HostArena, StreamEvent, Streams, SwapHooks, WeightHooks
from rlpipe.offload.runtime.chunk import ChunkMemory
from rlpipe.offload.units import Unit


class OutOfSlots(RuntimeError):
    """Error of a model whose chunks in use at one time need more slots than there are."""


class Residency:
    """Slots on the device, and the chunks that occupy them.

    A step uses the chunks in order and then in reverse. The victim is always the chunk whose next use is farthest away,
    and a prefetched chunk replaces only one whose next use is farther than its own. So the last chunks of the forward
    pass stay for the backward pass, and its last ones for the next forward pass.
    """

    def __init__(
        self,
        memories: Sequence[ChunkMemory],
        *,
        num_slots: int,
        slots_of: Sequence[int],
        stream: CopyStream,
        await_update: Callable[[int], None] | None = None,
        is_updated: Callable[[int], bool] | None = None,
    ) -> None:
        """Create ``num_slots`` slots for chunks that each take ``slots_of`` slots.

        ``await_update`` returns once a chunk's bytes on the host are up to date; chunks are prefetched only if they are
        (``is_updated``), except for those that are used next.
        """
        self._memories, self._slots_of, self._stream = memories, slots_of, stream
        self._await_update, self._is_updated = await_update, is_updated
        self.num_slots = num_slots
        self._free = num_slots
        self._events: dict[int, StreamEvent] = {}
        self._pins: Counter[int] = Counter()
        self._position, self._is_backward = 0, False
        self._mark: StreamEvent | None = None
        """Event after which the device no longer uses unpinned chunks; None: after all work submitted so far."""
        self.is_closed = False

    @property
    def resident(self) -> list[int]:
        """Chunks that have slots."""
        return sorted(self._events)

    def ensure(self, index: int) -> None:
        """Load a chunk, unless it is resident, for the computation from here on; raise ``OutOfSlots`` without room."""
        self._check_open()
        self._mark = None
        if self._memories[index].is_persistent:
            return
        if index not in self._events:
            self._free_slots(index)
            self._load(index)
        self._events[index].block_device()
        self._events[index] = Done()

    def enter(self, indices: Iterable[int], *, is_backward: bool) -> None:
        """Load chunks and pin them until ``leave``; prefetch those that come next."""
        needed = sorted(indices)
        if not needed:
            return
        self._position, self._is_backward = (needed[0] if is_backward else needed[-1]), is_backward
        self._pins.update(needed)
        for index in needed:
            self.ensure(index)
        self.fetch_ahead()
        self._mark = self._stream.mark()

    def leave(self, indices: Iterable[int]) -> None:
        self._mark = None
        self._pins.subtract(indices)
        self._pins += Counter()

    def leave_all(self) -> None:
        """Unpin all chunks after a pass, however it ended."""
        self._mark = None
        self._pins.clear()

    def turn(self) -> None:
        """Set the position to the first chunk, as the next one to be used."""
        self._position, self._is_backward = 0, False

    def drop(self, indices: Iterable[int]) -> None:
        """Free the slots of chunks whose bytes on the host change."""
        for index in indices:
            if index in self._events:
                assert not self._pins[index], "a chunk is updated while it is in use"
                self._release(index)

    def close(self) -> None:
        self.leave_all()
        self.drop(self.resident)
        self._stream.block_host()  # the host's memory, which copies may still read, is freed next
        self.is_closed = True

    def fetch_ahead(self) -> None:
        """Prefetch chunks in the order of their use, up to the first that would have to wait."""
        for index in self._upcoming():
            if self._is_updated is not None and not self._is_updated(index):
                return
            if not self._fetch(index):
                return

    def fetch_next(self, indices: Iterable[int]) -> None:
        """Prefetch the chunks that are used right after those entered last, waiting for their updates.

        The copies overlap with the computation on the entered chunks, which must be submitted already. Call it before
        ``leave``.
        """
        for index in sorted(indices):
            if not self._fetch(index, self._mark):
                return

    def _fetch(self, index: int, after: StreamEvent | None = None) -> bool:
        """Load a chunk without evicting any that is used sooner; return whether it is resident then."""
        if index in self._events or self._memories[index].is_persistent:
            return True
        while self._free < self._slots_of[index]:
            victim = self._victim()
            if victim is None or self._distance(victim) <= self._distance(index):
                return False
            self._release(victim)
        self._load(index, after)
        return True

    def _upcoming(self) -> Iterable[int]:
        step = -1 if self._is_backward else 1
        end = -1 if self._is_backward else len(self._memories)
        return range(self._position + step, end, step)

    def _distance(self, index: int) -> int:
        """Return the number of steps until a chunk is used: in this direction, or after the turn at its end."""
        ahead = self._position - index if self._is_backward else index - self._position
        if ahead >= 0:
            return ahead
        last = len(self._memories) - 1
        return self._position + index + 1 if self._is_backward else 2 * last - self._position - index + 1

    def _victim(self) -> int | None:
        return max((index for index in self._events if not self._pins[index]), key=self._distance, default=None)

    def _free_slots(self, index: int) -> None:
        while self._free < self._slots_of[index]:
            victim = self._victim()
            if victim is None:
                raise OutOfSlots(
                    f"chunk {index} needs {self._slots_of[index]} slots, but all {self.num_slots} are in use by chunks "
                    f"{', '.join(map(str, self.resident)) or 'none'}: set a larger num_slots"
                )
            self._release(victim)

    def _load(self, index: int, after: StreamEvent | None = None) -> None:
        if self._await_update is not None:
            self._await_update(index)
        self._events[index] = self._memories[index].load(self._stream, after)
        self._free -= self._slots_of[index]

    def _release(self, index: int) -> None:
        # The chunk may still be copied to the device; freed memory must not be written to.
        self._events.pop(index).block_device()
        self._memories[index].release()
        self._free += self._slots_of[index]

    def _check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("the offloaded model is closed")


@dataclass(slots=True, eq=False, weakref_slot=True)
class Call:
    """A forward run of a unit that a backward pass may follow; only autograd's graph holds it."""

    chunks: frozenset[int]
    swap: SwapHooks | None = None
    brings: list[Callable[[], Call | None]] = field(default_factory=list)
    """Weak references to earlier swapped calls, whose activations are fetched when its backward pass begins."""
    has_begun: bool = False
    """Whether its backward pass has begun."""
    has_ended: bool = False


class UnitCalls:
    """Replacement of the ``forward`` methods of a model and its units, until ``remove``."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        chunks: Sequence[Collection[int]],
        modes: Sequence[Mode],
        *,
        residency: Residency,
        weights: WeightHooks,
        arena: HostArena,
        queues: Streams,
        stays: Callable[[Tensor], bool],
        begin: Callable[[Collection[int]], None],
        finish: Callable[[Collection[int]], None],
        finish_rest: Callable[[], None],
    ) -> None:
        """Replace the ``forward`` of the model and its ``units``, which have these ``chunks`` and ``modes``.

        ``stays`` returns whether a tensor is on the device anyway. ``begin`` is called with the chunks of which a
        backward pass makes gradients, ``finish`` with chunks whose gradients are complete. ``finish_rest`` is called
        before the next pass: gradients of a unit that the loss does not depend on are not noticed as complete.
        """
        self._indices = {id(unit.module): index for index, unit in enumerate(units)}
        self._chunks = [frozenset(numbers) for numbers in chunks]
        self._next_chunks = [
            next((indices for indices in self._chunks[index + 1 :] if indices), frozenset[int]())
            for index in range(len(units))
        ]
        self._modes = list(modes)
        self._residency, self._weights, self._arena, self._queues = residency, weights, arena, queues
        self._stays, self._begin_gradients, self._finish, self._finish_rest = stays, begin, finish, finish_rest
        self._calls: WeakSet[Call] = WeakSet()
        self._swapped: dict[int, Callable[[], Call | None]] = {}
        self._fetches: list[list[int]] = [[] for _ in units]
        last_block = max((index for index, unit in enumerate(units) if unit.is_block), default=0)
        for swapped, trigger in swap_spans(modes, last_block):
            self._fetches[trigger].append(swapped)
        self._to_finish: set[int] = set()
        self._busy: Counter[int] = Counter()
        self._graph_task = -1
        self._replaced: list[tuple[nn.Module, Any]] = []
        self.began_s: float | None = None
        """Start of the first pass with gradients since the last update."""
        self.num_passes = 0
        """Number of passes with gradients since the last update."""
        for index, unit in enumerate(units):
            self._replace(unit.module, partial(self._run, index))
        self._replace(model, self._run_model)

    def remove(self) -> None:
        """Restore the modules' original ``forward``."""
        while self._replaced:
            module, original = self._replaced.pop()
            if original is None:
                del module.forward
            else:
                module.forward = original

    def read(self, module: nn.Module) -> None:
        """Load a unit's weights now, for code that reads them without calling the unit."""
        chunks = self._chunks[self._indices[id(module)]]
        if torch.is_grad_enabled():
            self._to_finish |= chunks
        for index in sorted(chunks):
            self._residency.ensure(index)

    def _replace(self, module: nn.Module, run: Callable[..., Any]) -> None:
        original = module.forward

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return run(original, *args, **kwargs)

        self._replaced.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def _run_model(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if all(call.has_ended for call in self._calls):
            self._arena.reset()
            self._busy.clear()
            self._to_finish.clear()
            self._swapped.clear()
        if not _in_backward():
            self._residency.leave_all()  # a pass that raised may have left some in use
        self._residency.turn()
        try:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            self._finish_rest()
            self._count_pass()
            with self._weights.watch():
                return original(*args, **kwargs)
        finally:
            self._residency.leave_all()

    def _count_pass(self) -> None:
        self.began_s = time.perf_counter() if self.began_s is None else self.began_s
        self.num_passes += 1

    def _run(self, index: int, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        chunks, is_backward = self._chunks[index], _in_backward()
        self._residency.enter(chunks, is_backward=is_backward)
        try:
            if torch.is_grad_enabled():
                output = self._run_with_graph(index, original, args, kwargs)
            else:
                output = original(*args, **kwargs)
            if not is_backward:
                self._residency.fetch_next(self._next_chunks[index])
            return output
        finally:
            self._residency.leave(chunks)

    def _run_with_graph(
        self, index: int, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = Call(self._chunks[index], brings=self._find_swapped(index))
        args, kwargs = mark_inputs(partial(self._leave, call), (args, kwargs))
        mode = self._modes[index]
        if mode is Mode.CHECKPOINT:
            output = self._checkpoint(call, original, args, kwargs)
        elif mode is Mode.SWAP:
            call.swap = SwapHooks(self._weights, self._arena, self._queues, self._stays)
            self._swapped[index] = ref(call)
            with call.swap.watch():
                output = original(*args, **kwargs)
        else:
            with self._weights.watch():
                output = original(*args, **kwargs)
        outputs_with_grad = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for tensor in outputs_with_grad:
            tensor.register_hook(partial(self._begin_call, call))
        if outputs_with_grad:
            self._calls.add(call)
            self._busy.update(call.chunks)
            self._to_finish |= call.chunks
        return output

    def _find_swapped(self, index: int) -> list[Callable[[], Call | None]]:
        return [self._swapped[swapped] for swapped in self._fetches[index] if swapped in self._swapped]

    def _checkpoint(self, call: Call, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))

        def run(*leaves: Any) -> Any:
            if _in_backward():
                for index in sorted(call.chunks):
                    self._residency.ensure(index)
            args, kwargs = tree_unflatten(leaves, tree)
            return original(*args, **kwargs)

        return checkpoint(run, *leaves, use_reentrant=False)

    def _begin_call(self, call: Call, _: Tensor) -> None:
        if call.has_begun:
            return
        call.has_begun = True
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            self._begin_gradients(self._to_finish)
            Variable._execution_engine.queue_callback(self._end_backward)
        self._finish_complete()
        if call.swap is not None:
            call.swap.fetch()  # before prefetched chunks, which use the same stream
        self._residency.enter(call.chunks, is_backward=True)
        for find in call.brings:
            swapped = find()
            if swapped is not None and swapped.swap is not None:
                swapped.swap.fetch()

    def _leave(self, call: Call) -> None:
        if call.has_begun and not call.has_ended:
            self._end_call(call)
            self._residency.leave(call.chunks)
            self._finish_complete()

    def _end_call(self, call: Call) -> None:
        call.has_ended = True
        self._busy.subtract(call.chunks)

    def _finish_complete(self) -> None:
        complete = sorted(index for index in self._to_finish if self._busy[index] <= 0)
        self._to_finish.difference_update(complete)
        self._finish(complete)

    def _end_backward(self) -> None:
        for call in self._calls:
            if call.has_begun and not call.has_ended:
                self._end_call(call)
        self._residency.leave_all()
        self._finish_complete()


def mark_inputs(leave: Callable[[], None], inputs: Any) -> Any:
    """Pass the tensors of a tree through a function that calls ``leave`` when the backward pass reaches them."""
    leaves, tree = tree_flatten(inputs)
    indices = [index for index, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not indices:
        return inputs
    marked = _Inputs.apply(leave, *(leaves[index] for index in indices))
    for index, tensor in zip(indices, marked, strict=True):
        leaves[index] = tensor
    return tree_unflatten(leaves, tree)


class _Inputs(torch.autograd.Function):
    """The identity on a unit's inputs, whose backward is the last of the unit's backward pass."""

    @staticmethod
    def forward(ctx: Any, leave: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.leave = leave
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.leave()
        return (None, *gradients)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1

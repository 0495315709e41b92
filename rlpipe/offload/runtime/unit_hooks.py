"""Runs of a model's units with their chunks on the device: forward, backward, and recomputation."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import checkpoint

from rlpipe.offload.planner.cost import swap_spans
from rlpipe.offload.planner.profile import Mode
from rlpipe.offload.runtime.activations import HostArena, SwapHooks, WeightHooks
from rlpipe.offload.runtime.residency import Residency
from rlpipe.offload.runtime.streams import Queues
from rlpipe.offload.units import Unit


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
        queues: Queues,
        stays: Callable[[Tensor], bool],
        begin: Callable[[Collection[int]], None],
        finish: Callable[[Collection[int]], None],
    ) -> None:
        """Replace the ``forward`` of the model and its ``units``, which have these ``chunks`` and ``modes``.

        ``stays`` returns whether a tensor is on the device anyway. ``begin`` is called with the chunks of which a
        backward pass makes gradients, ``finish`` with chunks whose gradients are complete.
        """
        self._indices = {id(unit.module): index for index, unit in enumerate(units)}
        self._chunks = [frozenset(numbers) for numbers in chunks]
        self._next_chunks = [
            next((later for later in self._chunks[index + 1 :] if later), frozenset[int]())
            for index in range(len(units))
        ]
        self._modes = list(modes)
        self._residency, self._weights, self._arena, self._queues = residency, weights, arena, queues
        self._stays, self._begin_gradients, self._finish = stays, begin, finish
        self._calls: WeakSet[Call] = WeakSet()
        self._swapped: dict[int, Callable[[], Call | None]] = {}
        self._brings: list[list[int]] = [[] for _ in units]
        last_block = max((index for index, unit in enumerate(units) if unit.is_block), default=0)
        for swapped, until in swap_spans(modes, last_block):
            self._brings[until].append(swapped)
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
        """Restore the modules' own ``forward``."""
        while self._replaced:
            module, own = self._replaced.pop()
            if own is None:
                del module.forward
            else:
                module.forward = own

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
            self._note_begin()
            with self._weights.watch():
                return original(*args, **kwargs)
        finally:
            self._residency.leave_all()

    def _note_begin(self) -> None:
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
        has_gradient = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]
        for tensor in has_gradient:
            tensor.register_hook(partial(self._begin, call))
        if has_gradient:
            self._calls.add(call)
            self._busy.update(call.chunks)
            self._to_finish |= call.chunks
        return output

    def _find_swapped(self, index: int) -> list[Callable[[], Call | None]]:
        return [self._swapped[swapped] for swapped in self._brings[index] if swapped in self._swapped]

    def _checkpoint(self, call: Call, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        leaves, tree = tree_flatten((args, kwargs))

        def run(*leaves: Any) -> Any:
            if _in_backward():
                for index in sorted(call.chunks):
                    self._residency.ensure(index)
            args, kwargs = tree_unflatten(leaves, tree)
            return original(*args, **kwargs)

        return checkpoint(run, *leaves, use_reentrant=False)

    def _begin(self, call: Call, _: Tensor) -> None:
        if call.has_begun:
            return
        call.has_begun = True
        task = torch._C._current_graph_task_id()
        if task != self._graph_task:
            self._graph_task = task
            self._begin_gradients(self._to_finish)
            Variable._execution_engine.queue_callback(self._end_backward)
        self._finish_whole()
        if call.swap is not None:
            call.swap.fetch()  # before prefetched chunks, which use the same lane
        self._residency.enter(call.chunks, is_backward=True)
        for find in call.brings:
            swapped = find()
            if swapped is not None and swapped.swap is not None:
                swapped.swap.fetch()

    def _leave(self, call: Call) -> None:
        if call.has_begun and not call.has_ended:
            self._end_call(call)
            self._residency.leave(call.chunks)
            self._finish_whole()

    def _end_call(self, call: Call) -> None:
        call.has_ended = True
        self._busy.subtract(call.chunks)

    def _finish_whole(self) -> None:
        whole = sorted(index for index in self._to_finish if self._busy[index] <= 0)
        self._to_finish.difference_update(whole)
        self._finish(whole)

    def _end_backward(self) -> None:
        for call in self._calls:
            if call.has_begun and not call.has_ended:
                self._end_call(call)
        self._residency.leave_all()
        self._finish_whole()


def mark_inputs(leave: Callable[[], None], inputs: Any) -> Any:
    """Pass the tensors of a tree through a function that calls ``leave`` when the backward pass reaches them."""
    leaves, tree = tree_flatten(inputs)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places:
        return inputs
    marked = _Inputs.apply(leave, *(leaves[place] for place in places))
    for place, tensor in zip(places, marked, strict=True):
        leaves[place] = tensor
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

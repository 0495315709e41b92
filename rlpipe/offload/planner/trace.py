"""Trace of one forward and backward pass of a model, with the bytes and the work of each unit.

Fake tensors suffice: nothing is computed, and no memory is needed. What runs between units, such as the loss, forms
stages, too. Tensors that flow from a stage to the next are counted with the one that takes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from rlpipe.offload.planner.profile import StageProfile
from rlpipe.offload.planner.tensor_tracker import Operator, TensorTracker
from rlpipe.offload.runtime.activations import find_saved
from rlpipe.offload.runtime.unit_hooks import mark_inputs
from rlpipe.offload.units import Unit

Seconds = Callable[[Operator], float]
"""Function that returns the seconds of an operator on some machine."""


@dataclass(slots=True, eq=False)
class Stage:
    """A call of a unit, or what runs before the next call."""

    unit: int | None
    reads: set[int] = field(default_factory=set)
    """Units whose weights it uses, including its own."""
    flow_in: int = 0
    flow_out: int = 0
    before: int = 0
    after: int = 0
    forward_peak: int = 0
    backward_peak: int = 0
    entering: int = 0
    """Live bytes when its backward pass begins."""
    forward_s: float = 0.0
    backward_s: float = 0.0
    has_work: bool = False
    is_left: bool = False
    """Whether the end of its backward pass is noticed, because its inputs have gradients."""
    swapped: dict[Hashable, int] = field(default_factory=dict)
    """Bytes of the tensors that autograd saves in it, each counted once."""


@dataclass(slots=True)
class Input:
    """A tensor that is given to blocks."""

    storage: weakref.ref[torch.UntypedStorage]
    num_bytes: int
    is_of_block: bool
    """Whether a block has made it."""
    count: int = 0
    """Number of blocks that it is given to."""

    @property
    def is_shared(self) -> bool:
        """Whether it takes memory, beside what flows from block to block, only if all blocks are recomputed."""
        return self.count > 1 if self.is_of_block else self.storage() is None


class Trace:
    """Trace of a function that returns a model's loss, which ``run`` calls once; use ``profiles`` afterwards."""

    def __init__(self, units: Sequence[Unit], seconds: Seconds) -> None:
        self._units, self._seconds = units, seconds
        self._tracker = TensorTracker(self._observe)
        self.stages: list[Stage] = [Stage(None)]
        self._current = self.stages[0]
        self._is_backward = self._has_run = False
        self._inputs: dict[int, Input] = {}
        self._given: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """Storages that were given to the last unit that was called."""
        self._made: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.shared_bytes = 0
        """Bytes of inputs that blocks share, such as masks, which are dropped after them unless one is recomputed."""

    def run(self, run: Callable[[], Tensor], parameters: Iterable[Tensor]) -> TensorTracker:
        """Trace ``run``, which returns a loss, and the backward pass of that loss; return the tracker.

        Raises whatever ``run`` raises. Gradients of the ``parameters``, which are trained, stay as they were.
        """
        if self._has_run:
            raise RuntimeError("a trace is of one run: make another one")
        self._has_run = True
        handles = [
            handle
            for index, unit in enumerate(self._units)
            for handle in (
                unit.module.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True),
                unit.module.register_forward_hook(self._leave, with_kwargs=True),
            )
        ]
        kept = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in kept:
            parameter.grad = None
            handles.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))
        try:
            with self._tracker:
                with saved_tensors_hooks(self._note_saved, lambda tensor: tensor):
                    loss = run()
                self._close_stage([loss])
                self.shared_bytes = sum(given.num_bytes for given in self._inputs.values() if given.is_shared)
                self._is_backward = True
                loss.backward()
        finally:
            for handle in handles:
                handle.remove()
            for parameter, gradient in kept:
                parameter.grad = gradient
        return self._tracker

    def read(self, module: nn.Module) -> None:
        """Note that weights of a unit are used without a call of it."""
        if not self._is_backward:
            self._current.reads.update(index for index, unit in enumerate(self._units) if unit.module is module)

    def profiles(self) -> list[StageProfile]:
        return [
            StageProfile(
                is_block=stage.unit is not None and self._units[stage.unit].is_block,
                forward_s=stage.forward_s,
                backward_s=stage.backward_s,
                swapped_bytes=sum(stage.swapped.values()),
                saved_bytes=(stage.after - stage.flow_out) - (stage.before - stage.flow_in),
                input_bytes=stage.flow_in,
                entering_bytes=max(0, stage.entering - (stage.after - stage.flow_out)),
                forward_peak=stage.forward_peak - (stage.after - stage.flow_out),
                backward_peak=max(0, stage.backward_peak - (stage.after - stage.flow_out)),
            )
            for stage in self.stages
        ]

    def _observe(self, operator: Operator) -> None:
        stage, seconds = self._current, self._seconds(operator)
        if self._is_backward:
            stage.backward_s += seconds
            stage.backward_peak = max(stage.backward_peak, self._tracker.live)
        else:
            stage.has_work |= operator.num_bytes > 0
            stage.forward_s += seconds
            stage.forward_peak = max(stage.forward_peak, self._tracker.live)

    def _enter(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_backward:
            return None
        self._close_stage([args, kwargs])
        inputs = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        self._given = weakref.WeakSet(leaf.untyped_storage() for leaf in inputs)
        if self._units[unit].is_block:
            self._note_inputs(inputs)
        stage = self._open_stage(unit)
        return mark_inputs(partial(self._end_backward, stage), (args, kwargs))

    def _note_inputs(self, inputs: Sequence[Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in inputs if self._tracker.counts(tensor)):
            given = self._inputs.get(storage._cdata)
            if given is None or given.storage() is not storage:
                given = Input(weakref.ref(storage), storage.nbytes(), storage in self._made)
                self._inputs[storage._cdata] = given
            given.count += 1

    def _note_saved(self, tensor: Tensor) -> Tensor:
        swapped = self._current.swapped
        if self._tracker.counts(tensor):
            saved = find_saved(tensor, swapped)
            swapped[saved.key] = saved.num_elements * tensor.dtype.itemsize
        return tensor

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self._is_backward:
            return
        stage = self._current
        self._close_stage([output])
        if stage.unit is not None and self._units[stage.unit].is_block:
            self._made.update(leaf.untyped_storage() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._begin_backward, stage))
        self._open_stage(None)

    def _open_stage(self, unit: int | None) -> Stage:
        live = self._tracker.live
        stage = Stage(unit, reads=set() if unit is None else {unit}, before=live, after=live, forward_peak=live)
        last = self._current
        if last.unit is None and not last.has_work and not last.reads and len(self.stages) > 1:
            # What is dropped between two units is what the first one did not need to keep.
            self.stages.pop()
            last = self.stages[-1]
            last.after, last.flow_out = self._current.after, self._current.flow_out
        stage.flow_in = last.flow_out
        self._current = stage
        self.stages.append(stage)
        return stage

    def _close_stage(self, flowing: Any) -> None:
        """Close the current stage, and note the largest tensor that it made and passes on to the next one."""
        stage = self._current
        stage.after = self._tracker.live
        sizes = [
            leaf.untyped_storage().nbytes()
            for leaf in tree_leaves(flowing)
            if isinstance(leaf, Tensor) and self._tracker.counts(leaf) and leaf.is_floating_point()
            if leaf.untyped_storage() not in self._given
        ]
        stage.flow_out = max(sizes, default=0)

    def _begin_backward(self, stage: Stage, _: Tensor) -> None:
        self._current = stage
        stage.entering = max(stage.entering, self._tracker.live)

    def _end_backward(self, stage: Stage) -> None:
        stage.is_left = True
        index = self.stages.index(stage)
        self._current = self.stages[max(0, index - 1)]


def _drop_gradient(parameter: Tensor) -> None:
    parameter.grad = None

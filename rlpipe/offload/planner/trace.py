"""Traces of a training pass: the operators of each unit, and the tensors that they keep.

Fake tensors suffice: nothing is computed, and no memory is needed. What runs between units, such as the loss, forms
stages, too. Tensors that flow from a stage to the next are counted with the one that takes them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from rlpipe.offload.planner.cost import StageProfile
from rlpipe.offload.runtime.activations import find_saved
from rlpipe.offload.runtime.unit_hooks import mark_inputs
from rlpipe.offload.units import Unit

Observe = Callable[["Operator"], None]


@dataclass(slots=True, frozen=True)
class Operator:
    """An operator that has run."""

    name: str
    flops: int
    num_bytes: int
    """Bytes read and written; 0 for views."""
    dtype: torch.dtype


class TensorTracker(TorchDispatchMode):
    """Mode that counts the bytes of the tensors that operators make: ``live`` at the moment, and ``peak`` at most.

    Tensors that existed before, such as weights, do not count. ``observe`` is called with every operator after it has
    run.
    """

    def __init__(self, observe: Observe | None = None) -> None:
        super().__init__()
        self._observe = observe
        self._known: set[int] = set()
        self.live = 0
        self.peak = 0

    def counts(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made within the mode."""
        return tensor.untyped_storage()._cdata in self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        input_storages = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in input_storages]
        for tensor in fresh:
            self._count(tensor)
        self.peak = max(self.peak, self.live)
        if self._observe is not None:
            self._observe(self._describe(func, args, kwargs, result, outputs, is_view=not fresh and not _writes(func)))
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += num_bytes
        weakref.finalize(storage, self._drop, key, num_bytes)

    def _drop(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes

    def _describe(
        self, func: Any, args: Any, kwargs: Any, result: Any, outputs: list[Tensor], *, is_view: bool
    ) -> Operator:
        packet = func._overloadpacket
        flops = int(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0
        touched = [] if is_view else [*_tensors((args, kwargs)), *outputs]
        return Operator(
            name=str(packet),
            flops=flops,
            num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in touched),
            dtype=outputs[0].dtype if outputs else torch.float32,
        )


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _writes(func: Any) -> bool:
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)


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
    forward_starts: int = 0
    backward_starts: int = 0
    """Operators that the host starts on the device, views left out."""
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
    """Trace of a function that returns a model's loss, which ``run`` calls once; use ``profiles`` afterwards.

    ``start_s`` is the time in which the host starts an operator: a stage takes at least that for all of its operators.
    """

    def __init__(self, units: Sequence[Unit], seconds: Seconds, *, start_s: float = 0.0) -> None:
        self._units, self._seconds, self._start_s = units, seconds, start_s
        self._tracker = TensorTracker(self._observe)
        self.stages: list[Stage] = [Stage(None)]
        self._current = self.stages[0]
        self._is_backward = self._has_run = False
        self._inputs: dict[int, Input] = {}
        self._unit_inputs: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        """Storages that were given to the last unit that was called."""
        self._block_outputs: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.shared_bytes = 0
        """Bytes of inputs that blocks share, such as masks, which are dropped after them unless one is recomputed."""

    def run(self, run: Callable[[], Tensor], parameters: Iterable[Tensor]) -> TensorTracker:
        """Trace ``run``, which returns a loss, and the backward pass of that loss; return the tracker.

        Raises whatever ``run`` raises. Gradients of the ``parameters``, which are trained, stay as they were.
        """
        if self._has_run:
            raise RuntimeError("a trace records one run: create another one")
        self._has_run = True
        handles = [
            handle
            for index, unit in enumerate(self._units)
            for handle in (
                unit.module.register_forward_pre_hook(partial(self._enter, index), with_kwargs=True),
                unit.module.register_forward_hook(self._leave, with_kwargs=True),
            )
        ]
        saved_gradients = [(parameter, parameter.grad) for parameter in parameters]
        for parameter, _ in saved_gradients:
            parameter.grad = None
            handles.append(parameter.register_post_accumulate_grad_hook(_drop_gradient))
        try:
            with self._tracker:
                with saved_tensors_hooks(self._note_saved, lambda tensor: tensor):
                    loss = run()
                self._close_stage([loss])
                self.shared_bytes = sum(entry.num_bytes for entry in self._inputs.values() if entry.is_shared)
                self._is_backward = True
                loss.backward()
            for stage in self.stages:
                stage.forward_s = max(stage.forward_s, stage.forward_starts * self._start_s)
                stage.backward_s = max(stage.backward_s, stage.backward_starts * self._start_s)
        finally:
            for handle in handles:
                handle.remove()
            for parameter, gradient in saved_gradients:
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
                input_bytes=stage.flow_in if stage.swapped else 0,  # what is frozen is not recomputed
                entering_bytes=max(0, stage.entering - (stage.after - stage.flow_out)),
                forward_peak=stage.forward_peak - (stage.after - stage.flow_out),
                backward_peak=max(0, stage.backward_peak - (stage.after - stage.flow_out)),
            )
            for stage in self.stages
        ]

    def _observe(self, operator: Operator) -> None:
        stage, seconds, has_work = self._current, self._seconds(operator), operator.num_bytes > 0
        if self._is_backward:
            stage.backward_s += seconds
            stage.backward_starts += has_work
            stage.backward_peak = max(stage.backward_peak, self._tracker.live)
        else:
            stage.has_work |= has_work
            stage.forward_s += seconds
            stage.forward_starts += has_work
            stage.forward_peak = max(stage.forward_peak, self._tracker.live)

    def _enter(self, unit: int, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._is_backward:
            return None
        self._close_stage([args, kwargs])
        inputs = [leaf for leaf in tree_leaves([args, kwargs]) if isinstance(leaf, Tensor)]
        self._unit_inputs = weakref.WeakSet(leaf.untyped_storage() for leaf in inputs)
        if self._units[unit].is_block:
            self._note_inputs(inputs)
        stage = self._open_stage(unit)
        return mark_inputs(partial(self._end_backward, stage), (args, kwargs))

    def _note_inputs(self, inputs: Sequence[Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in inputs if self._tracker.counts(tensor)):
            entry = self._inputs.get(storage._cdata)
            if entry is None or entry.storage() is not storage:
                entry = Input(weakref.ref(storage), storage.nbytes(), storage in self._block_outputs)
                self._inputs[storage._cdata] = entry
            entry.count += 1

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
            self._block_outputs.update(
                leaf.untyped_storage() for leaf in tree_leaves(output) if isinstance(leaf, Tensor)
            )
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
            if leaf.untyped_storage() not in self._unit_inputs
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


def choose_blocks(kinds: Sequence[Hashable]) -> dict[int, int]:
    """Return for every block the index of a block of its kind that stands for it.

    The first and the last block stand for themselves; other blocks have the first of their kind between these.
    """
    inner: dict[Hashable, int] = {}
    for index, kind in enumerate(kinds[1:-1], 1):
        inner.setdefault(kind, index)
    ends = {0, len(kinds) - 1}
    return {index: index if index in ends else inner[kind] for index, kind in enumerate(kinds)}


def unfold(stages: Sequence[Stage], representative: Mapping[int, int]) -> list[Stage]:
    """Return the stages of all blocks, in order, from those of the traced blocks.

    ``representative`` maps each block's unit to the traced unit whose stage is like its own; the first and the last
    block are among the traced ones. A block's group has its own stage and those up to the next block. The live bytes of
    a stage grow by what the blocks inserted before it keep. Raises ``ValueError`` if a block was not traced exactly
    once.
    """
    traced = set(representative.values())
    starts = [index for index, stage in enumerate(stages) if stage.unit in traced]
    if sorted(stages[index].unit or 0 for index in starts) != sorted(traced):
        raise ValueError("a block was not traced exactly once")
    groups = {
        stages[start].unit: stages[start:end] for start, end in zip(starts, [*starts[1:], len(stages)], strict=True)
    }
    unfolded = [*stages[: starts[0]]] if starts else [*stages]
    for unit, model in representative.items():
        group = groups[model]
        moved = (unfolded[-1].after if unfolded else 0) - (
            stages[_index_before(stages, group)].after if unfolded else 0
        )
        unfolded += [_moved(stage, moved, {model: unit}) for stage in group]
    return unfolded


def _index_before(stages: Sequence[Stage], group: Sequence[Stage]) -> int:
    return next(index for index, stage in enumerate(stages) if stage is group[0]) - 1


def _moved(stage: Stage, num_bytes: int, units: Mapping[int, int]) -> Stage:
    return replace(
        stage,
        unit=None if stage.unit is None else units.get(stage.unit, stage.unit),
        reads={units.get(unit, unit) for unit in stage.reads},
        before=stage.before + num_bytes,
        after=stage.after + num_bytes,
        forward_peak=stage.forward_peak + num_bytes,
        backward_peak=stage.backward_peak + num_bytes,
        entering=stage.entering + num_bytes,
    )

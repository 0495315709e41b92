"""Runtime of a model in chunks: weights move to the device before they are used and leave it afterwards.

units (calls) ──enter──> residency ──load──> chunks: host bytes ──copy, gather──> device storage
  │   forward, backward     slots, who is next          ^
  │                                                     │ update, before the chunk is next loaded
  └──gradients──> gradients ──reduce, copy──> optimizer (AdamW where the chunk's state lies)

Tensors are this rank's parts of whole ones, and share the chunks' memory; torch's distributed checkpoint writes and
reads them in place, on any number of ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NoReturn, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.offload.decision import Arrangement, Capacity, Decision, Mode
from rlpipe.offload.layout import CHUNK_SIZES, ChunkLayout, make_layout
from rlpipe.offload.runtime.activations import HostArena, Streams, WeightHooks, make_streams
from rlpipe.offload.runtime.chunk import ChunkMemory, ChunkRanks, OneRank
from rlpipe.offload.runtime.gradients import ChunkOptimizer
from rlpipe.offload.runtime.unit_hooks import Residency, UnitCalls
from rlpipe.offload.units import Fill, Inventory, Unit, find_rest, find_units, move_rest, return_rest, take_inventory

_open: WeakSet[OffloadedModel] = WeakSet()
"""Offloaded models that are open or lost; only their models keep them alive."""
LOST = "an error ended the offloaded model while ranks shared its weights, which are lost: load the model again"


@dataclass(kw_only=True, slots=True, frozen=True)
class Precision:
    """Dtypes of a trained chunk; None stands for the dtype of the given weights."""

    compute: torch.dtype | None = None
    """Dtype of the weights on the device, and of their gradients there."""
    state: torch.dtype | None = None
    """Dtype of the weights that the optimizer updates, and of its moments."""
    gradient: torch.dtype = torch.float32
    """Dtype in which gradients are accumulated."""


class OffloadedModel:
    """A model that is offloaded in place until ``close``; use it as a context manager.

    ``model`` is any module of transformers or PEFT; its blocks are found by their module lists. Call it, and
    ``backward`` of a loss, as before. With an ``optimizer`` it can be trained; ``OffloadedAdamW`` has the step for a
    plain loop. Parameters in ``resident`` stay on the device, and the caller updates them. All ranks of ``ranks`` must
    make the same calls, down to the units in each pass; within a unit they may differ, as in the experts that they run.
    Raises ``ValueError`` if the arrangement does not suit the model, ``RuntimeError`` if the model or a part of it is
    offloaded already. After an error the model is as it was, but tensors from the meta device may have their values.

    If ranks share the chunks (``num_parts`` > 1) and an error leaves the context or the constructor on one of them,
    the others are at other points of the program, so nothing waits for them. The model is then lost, and has to be
    loaded again.
    """

    def __init__(
        self,
        model: nn.Module,
        arrangement: Arrangement,
        *,
        device: torch.device,
        optimizer: OptimizerConfig | None = None,
        precision: Precision | None = None,
        ranks: ChunkRanks | None = None,
        sizes: Sequence[int] = CHUNK_SIZES,
        fill: Fill | None = None,
        queues: Streams | None = None,
    ) -> None:
        """Offload ``model``, trying chunk ``sizes`` in bytes; ``fill`` has the values of models on the meta device."""
        check_free(model, optimizer)
        precision, ranks = precision or Precision(), ranks or OneRank()
        self.model, self.device, self.ranks, self.arrangement = model, device, ranks, arrangement
        units = find_units(model)
        self.inventory = take_inventory(model, units, trained=optimizer is not None, compute_dtype=precision.compute)
        self.layout = make_layout(self.inventory.tensors, sizes=sizes)
        self.unit_chunks = chunks_of_units(self.layout, self.inventory)
        _check(arrangement, self.layout, self.unit_chunks, self.inventory)
        self._parameters = dict(model.named_parameters())
        self._memories: list[ChunkMemory] = []
        self._queues = queues or make_streams(device)
        self._undo: list[Callable[[], None]] = []
        """Functions that restore what was taken from the model, called in reverse order."""
        self.is_closed = self.is_lost = False
        self.decision: Decision | None = None
        """Decision of the planner that made the arrangement, if any."""
        try:
            self._take(units, optimizer or OptimizerConfig(), precision, fill)
        except BaseException as error:
            self._restore_or_invalidate(error)
            raise
        _open.add(self)

    def _take(self, units: Sequence[Unit], config: OptimizerConfig, precision: Precision, fill: Fill | None) -> None:
        self._take_chunks(precision, fill)
        self._undo.append(partial(return_rest, self.model, self.inventory, find_rest(self.model, self.inventory)))
        move_rest(self.model, self.inventory, self.device, fill)
        self.optimizer = ChunkOptimizer(
            {memory.chunk.index: memory for memory in self._memories if memory.chunk.is_trained},
            self._parameters,
            config,
            device=self.device,
            gradient_dtype=precision.gradient,
            ranks=self.ranks,
            queues=self._queues,
            drop=self.drop_chunk,
        )
        self._undo.append(self.optimizer.close)
        self._residency = Residency(
            self._memories,
            num_slots=self.arrangement.num_slots,
            slots_of=[self.layout.slots_of(chunk) for chunk in self.layout.chunks],
            stream=self._queues.copies_in,
            await_update=self.optimizer.await_update,
            is_updated=self.optimizer.is_updated,
        )
        self._undo.append(self._residency.close)
        self._arena = HostArena(self._queues, pin=self.device.type == "cuda")
        self._undo.append(self._arena.close)
        self._calls = self._watch_calls(units)
        self._undo.append(self._calls.remove)

    def _take_chunks(self, precision: Precision, fill: Fill | None) -> None:
        for chunk in self.layout.chunks:
            memory = ChunkMemory(
                chunk,
                [self.inventory.members[span.name] for span in chunk.spans],
                device=self.device,
                ranks=self.ranks,
                is_persistent=chunk.index < self.arrangement.num_persistent,
                min_bytes=self.layout.slots_of(chunk) * self.layout.slot_bytes,
                state_dtype=precision.state,
                fill=fill,
            )
            self._memories.append(memory)
            self._undo.append(memory.close)
        self._chunk_of = {
            id(self._parameters[name]): (memory.chunk.index, name)
            for memory in self._memories
            for name in memory.names
            if name in self._parameters
        }

    def _watch_calls(self, units: Sequence[Unit]) -> UnitCalls:
        keys = {memory.storage_key: memory.chunk.index for memory in self._memories}
        resident = [*self.inventory.resident.values(), *self.model.buffers()]
        staying = {tensor.untyped_storage()._cdata for tensor in resident}
        return UnitCalls(
            self.model,
            units,
            self.unit_chunks,
            self.arrangement.modes,
            residency=self._residency,
            weights=WeightHooks(keys, self._residency.ensure),
            arena=self._arena,
            queues=self._queues,
            stays=lambda tensor: tensor.untyped_storage()._cdata in staying,
            begin=self.optimizer.gradients.begin,
            finish=self.optimizer.gradients.finish,
            finish_rest=self.optimizer.gradients.finish_rest,
        )

    @property
    def resident(self) -> dict[str, nn.Parameter]:
        """Parameters that are always on the device, by name."""
        return self.inventory.resident

    def resident_squared_norm(self) -> Tensor:
        """Sum the gradients of resident parameters over the ranks, and return their squared norm.

        All ranks then hold the sums, so the norm is 0 on all but the first.
        """
        norms = [
            torch.linalg.vector_norm(gradient, dtype=torch.float32).square() for gradient in self._summed_gradients()
        ]
        if not norms or self.ranks.rank:
            return torch.zeros((), device=self.device)
        return torch.stack(norms).sum()

    def _summed_gradients(self) -> list[Tensor]:
        trained = [parameter for parameter in self.resident.values() if parameter.requires_grad]
        if self.ranks.num_ranks > 1 and trained:
            flags = torch.tensor([parameter.grad is not None for parameter in trained], dtype=torch.int32)
            counts = self.ranks.sum(flags.to(self.device)).tolist()
            for parameter, count in zip(trained, counts, strict=True):
                if count:
                    gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad = self.ranks.sum(gradient)
        return [parameter.grad for parameter in trained if parameter.grad is not None]

    @property
    def device_bytes(self) -> int:
        """Bytes on the device of chunks, their gradients and their optimizer states, at this moment."""
        chunks = sum(memory.allocated_bytes for memory in self._memories if memory.is_resident)
        states = sum(adam.num_bytes for adam in self.optimizer.adams.values() if adam.memory.is_persistent)
        return chunks + states + self.optimizer.gradients.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes on the host of chunks, their gradients and states, and swapped activations, at this moment."""
        chunks = sum(len(memory.host_bytes) for memory in self._memories if not memory.is_persistent)
        states = sum(adam.num_bytes for adam in self.optimizer.adams.values() if not adam.memory.is_persistent)
        passing = self.optimizer.gradients.host_bytes + self.optimizer.casts.num_bytes + self._arena.num_bytes
        return chunks + states + passing

    def end_update(self) -> tuple[float, int]:
        """Return the seconds since the update's first forward pass began, and the number of its forward passes.

        Call it once per update.
        """
        began_s, num_passes = self._calls.began_s, self._calls.num_passes
        self._calls.began_s, self._calls.num_passes = None, 0
        return 0.0 if began_s is None else time.perf_counter() - began_s, num_passes

    def read(self, module: nn.Module) -> None:
        """Load the weights of a unit for code that reads them without calling it, within the model's ``forward``."""
        self._calls.read(module)

    def values(self, parameter: Tensor) -> Tensor:
        """Return a parameter's whole values, in the optimizer's dtype if it is trained; all ranks must call it.

        They share the chunk's memory if possible.
        """
        self.check_open()
        location = self._chunk_of.get(id(parameter))
        if location is None:
            return parameter.detach()
        index, name = location
        self.optimizer.await_update(index)
        return self._memories[index].whole(name)

    def part(self, parameter: Tensor) -> tuple[Tensor, int]:
        """Return this rank's part of a parameter, flat, and its first index in the flattened parameter.

        The part shares the chunk's memory, and has the optimizer's dtype if the parameter is trained.
        """
        self.check_open()
        location = self._chunk_of.get(id(parameter))
        if location is None:
            return parameter.detach().flatten(), 0
        index, name = location
        self.optimizer.await_update(index)
        return self._memories[index].part(name), self._memories[index].pieces[name].in_tensor.start

    def assign(self, parameter: Tensor, values: Tensor) -> None:
        """Overwrite a parameter with ``values``, which are whole on every rank; all ranks must call it."""
        self.check_open()
        location = self._chunk_of.get(id(parameter))
        if location is None:
            parameter.detach().copy_(values)
            return
        index, name = location
        self.optimizer.await_update(index)
        self._residency.drop([index])
        self._memories[index].write(name, values)

    def chunk_of(self, parameter: Tensor) -> tuple[int, str] | None:
        """Return the index of a parameter's chunk and its name there, or None if it is in no chunk."""
        return self._chunk_of.get(id(parameter))

    def close(self) -> None:
        """Give the model weights of its own again on their original devices, and end all threads.

        Does nothing if it is closed already. If this raises, the model is still offloaded, and ``close`` can be called
        again. All ranks must call it.
        """
        if self.is_closed:
            return
        self.optimizer.flush()
        self._restore_model()
        self.is_closed = True
        _open.discard(self)

    def _restore_model(self) -> None:
        # Prefetched chunks may still be copied from host memory that is freed here.
        self._queues.copies_in.block_host()
        self._queues.copies_out.block_host()
        while self._undo:
            self._undo[-1]()
            self._undo.pop()

    def _restore_or_invalidate(self, error: BaseException) -> None:
        """Restore the model after an error, or mark it as lost if that would need the other ranks."""
        if self.ranks.num_parts == 1:
            self._restore_model()
        elif self._memories:
            self._invalidate(error)

    def _invalidate(self, error: BaseException) -> None:
        """Mark the model as lost, without waiting for pending work, which may wait for other ranks.

        The memory is freed with the model.
        """
        self._queues.worker.shutdown(wait=False, cancel_futures=True)
        self.is_closed = self.is_lost = True
        self.model.forward = self._refuse
        _open.add(self)
        error.add_note(LOST)

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise RuntimeError(LOST)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or self.ranks.num_parts == 1:
            self.close()
        elif not self.is_closed:
            self._residency.is_closed = True  # no part of the model may load a chunk: that would need all ranks
            self._invalidate(error)

    def drop_chunk(self, index: int) -> None:
        """Release a chunk that changes on the host, so that it is loaded again at its next use."""
        self._residency.drop([index])

    def check_open(self) -> None:
        """Raise ``RuntimeError`` if the offloaded model is closed or lost."""
        if self.is_closed:
            raise RuntimeError(LOST if self.is_lost else "the offloaded model is closed")


def least_arrangement(model: nn.Module, *, sizes: Sequence[int] = CHUNK_SIZES) -> Arrangement:
    """Return the arrangement with the least device memory, plus one slot for prefetch, for a model without training."""
    units = find_units(model)
    inventory = take_inventory(model, units, trained=False)
    layout = make_layout(inventory.tensors, sizes=sizes)
    slots = least_slots(layout, chunks_of_units(layout, inventory), 0)
    return Arrangement(num_persistent=0, num_slots=slots + 1, modes=[Mode.KEEP] * len(units))


def least_memory(model: nn.Module, *, sizes: Sequence[int] = CHUNK_SIZES) -> Capacity:
    """Return the memory that the model takes with ``least_arrangement``, with whole chunks on this rank's host."""
    inventory = take_inventory(model, find_units(model), trained=False)
    layout = make_layout(inventory.tensors, sizes=sizes)
    resident = [*inventory.resident.values(), *model.buffers()]
    num_slots = least_arrangement(model, sizes=sizes).num_slots
    return Capacity(
        device_bytes=num_slots * layout.slot_bytes + sum(tensor.nbytes for tensor in resident),
        host_bytes=sum(chunk.num_bytes for chunk in layout.chunks),
    )


def chunks_of_units(layout: ChunkLayout, inventory: Inventory) -> list[frozenset[int]]:
    """Return the indices of the chunks that each unit uses."""
    by_unit: list[set[int]] = [set() for _ in inventory.units]
    for chunk in layout.chunks:
        for span in chunk.spans:
            for unit in inventory.uses[span.name]:
                by_unit[unit].add(chunk.index)
    return [frozenset(numbers) for numbers in by_unit]


def least_slots(layout: ChunkLayout, unit_chunks: Sequence[frozenset[int]], num_persistent: int) -> int:
    """Return the fewest slots with which every unit can run."""
    return max(
        (
            sum(layout.slots_of(layout.chunks[index]) for index in chunks if index >= num_persistent)
            for chunks in unit_chunks
        ),
        default=0,
    )


def check_free(model: nn.Module, optimizer: OptimizerConfig | None) -> None:
    """Raise ``RuntimeError`` if the model is offloaded already or lost, and ``ValueError`` if it can't be offloaded."""
    if optimizer is not None and optimizer.name != "adamw":
        raise ValueError(f"optimizer.name={optimizer.name}: chunks are updated by adamw")
    parameter_ids = {id(parameter) for parameter in model.parameters()}
    for offloaded in _open:
        if not parameter_ids.isdisjoint(map(id, offloaded._parameters.values())):
            raise RuntimeError(LOST if offloaded.is_lost else "the model is offloaded already: close it first")
    if any(parameter.grad is not None for parameter in model.parameters()):
        raise ValueError("the model has gradients: call zero_grad(set_to_none=True) first")
    if getattr(model, "is_gradient_checkpointing", False):
        raise ValueError("the model has gradient checkpointing of its own: call gradient_checkpointing_disable()")


def _check(
    arrangement: Arrangement, layout: ChunkLayout, unit_chunks: Sequence[frozenset[int]], inventory: Inventory
) -> None:
    count, min_slots = len(layout.chunks), least_slots(layout, unit_chunks, arrangement.num_persistent)
    if not 0 <= arrangement.num_persistent <= count:
        raise ValueError(f"num_persistent={arrangement.num_persistent}: the model has {count} chunks")
    if arrangement.num_slots < min_slots:
        raise ValueError(f"num_slots={arrangement.num_slots}: one unit of the model needs {min_slots} at one time")
    if len(arrangement.modes) != len(inventory.units):
        raise ValueError(f"{len(arrangement.modes)} modes for the model's {len(inventory.units)} units")

"""Profile of a model in chunks, from a trace and the device's rates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from heapq import nlargest

import torch
from torch import Tensor, nn

from rlpipe.hardware.device import Device, adding
from rlpipe.hardware.host_memory import room_bytes
from rlpipe.offload.layout import ALIGNMENT, Chunk, ChunkLayout, aligned
from rlpipe.offload.planner.cost import FREE_LINK, ChunkProfile, Profile, Rates
from rlpipe.offload.planner.fake_trace import trace_model
from rlpipe.offload.planner.trace import Operator, Seconds, Stage, Trace
from rlpipe.offload.runtime.gradients import NUM_STAGED
from rlpipe.offload.runtime.runtime import Precision
from rlpipe.offload.units import Inventory, Unit
from rlpipe.weights.dcp import MOMENTS

DEVICES_PER_MACHINE = 8
"""Ranks per machine; further ranks count as running on other machines, each with the same host memory."""


def rates_of(device: Device, *, num_ranks: int = 1) -> Rates:
    """Return the rates of one of ``num_ranks`` ranks, which share their hosts' memory and cores, but no PCIe slot."""
    neighbours = min(num_ranks, DEVICES_PER_MACHINE)
    return Rates(
        host_to_device=device.host_to_device,
        device_to_host=device.device_to_host,
        both=device.both,
        device_adam=device.device_adam,
        host_adam=_divide(device.host_adam, neighbours),
        host_adding=_divide(device.host_adding, neighbours),
        device_bandwidth=device.memory_bandwidth,
        host_bandwidth=device.host_bandwidth / neighbours,
        link=device.exchange if num_ranks > 1 else FREE_LINK,
    )


def _divide(rates: Mapping[str, float], count: int) -> dict[str, float]:
    return {name: rate / count for name, rate in rates.items()}


GPU_START_S = 22e-6
"""Seconds in which a host starts an operator of a model on a GPU, with the Python and autograd code around it."""
GPU_COPY_SHARE = 0.7
"""Bandwidth of a model's operators without products on a GPU, over a copy's: many are strided, casting or small."""


def start_seconds(device: Device) -> float:
    """Return the least seconds of an operator; both constants fit learners of 0.6B to 1.7B parameters on one H200."""
    return GPU_START_S if device.kind == "cuda" else 0.0


def roofline(device: Device) -> Seconds:
    """Return a function for an operator's seconds: the time of its arithmetic or of its memory, whichever is longer."""
    slowest = min(device.matmul_flops.values())
    bandwidth_share = GPU_COPY_SHARE if device.kind == "cuda" else 1.0

    def seconds(operator: Operator) -> float:
        flops = device.matmul_flops.get(str(operator.dtype).removeprefix("torch."), slowest)
        bandwidth = device.memory_bandwidth * (1.0 if operator.flops else bandwidth_share)
        return max(operator.flops / flops, operator.num_bytes / bandwidth)

    return seconds


def trace_on(
    device: Device,
    model: nn.Module,
    units: Sequence[Unit],
    loss_of: Callable[[Trace], Tensor],
    *,
    compute_dtype: torch.dtype | None = None,
) -> Trace:
    """Trace ``loss_of`` with the times that it takes on a device; see ``trace_model``."""
    seconds, start_s = roofline(device), start_seconds(device)
    return trace_model(model, units, loss_of, seconds, compute_dtype=compute_dtype, start_s=start_s)


def make_profile(
    model: nn.Module,
    inventory: Inventory,
    layout: ChunkLayout,
    trace: Trace,
    *,
    precision: Precision,
    num_ranks: int = 1,
    num_parts: int = 1,
    num_micro_batches: int = 1,
) -> Profile:
    """Make the profile of a training step; ``num_parts`` is the number of parts per chunk (1: each rank holds all)."""
    stages = stages_of_chunks(trace.stages, layout, inventory)
    chunks = [
        _profile_chunk(chunk, layout, inventory, stages[chunk.index], precision, num_ranks, num_parts)
        for chunk in layout.chunks
    ]
    in_flight_bytes = _gradient_bytes(layout, stages, trace.stages) + _gather_bytes(layout, num_parts)
    if num_ranks > 1:
        in_flight_bytes += _sum_bytes(layout, inventory, num_parts)
    return Profile(
        stages=trace.profiles(),
        chunks=chunks,
        slot_bytes=layout.slot_bytes,
        resident_bytes=resident_bytes(model, inventory) + in_flight_bytes,
        shared_bytes=trace.shared_bytes,
        num_micro_batches=num_micro_batches,
    )


def stages_of_chunks(stages: Sequence[Stage], layout: ChunkLayout, inventory: Inventory) -> list[dict[int, float]]:
    """Return for every chunk the stages that use it, with the share of their weights that it holds.

    A stage without weights in chunks counts in full for the last chunk used before it.
    """
    used: dict[int, Counter[int]] = defaultdict(Counter)  # bytes by unit, then by chunk
    for chunk in layout.chunks:
        for span in chunk.spans:
            for unit in inventory.uses[span.name]:
                used[unit][chunk.index] += span.num_bytes
    by_chunk: list[dict[int, float]] = [{} for _ in layout.chunks]
    last = 0
    for index, stage in enumerate(stages):
        weights: Counter[int] = sum((used[unit] for unit in stage.reads), Counter())
        total = sum(weights.values())
        for chunk_index, num_bytes in weights.items():
            by_chunk[chunk_index][index] = num_bytes / total
            last = chunk_index
        if not total:
            by_chunk[last][index] = 1.0
    return by_chunk


def resident_bytes(model: nn.Module, inventory: Inventory) -> int:
    """Return the device bytes outside of chunks: trained parameters with gradient and moments, others, and buffers."""
    parameters = inventory.resident.values()
    copies = 2 + len(MOMENTS)
    parameter_bytes = sum(parameter.nbytes * (copies if parameter.requires_grad else 1) for parameter in parameters)
    return parameter_bytes + sum(buffer.nbytes for buffer in model.buffers())


def _profile_chunk(
    chunk: Chunk,
    layout: ChunkLayout,
    inventory: Inventory,
    stages: dict[int, float],
    precision: Precision,
    num_ranks: int,
    num_parts: int,
) -> ChunkProfile:
    num_bytes = aligned(chunk.num_bytes, ALIGNMENT * num_parts)
    slots = layout.slots_of(chunk)
    gathered = max(slots * layout.slot_bytes, num_bytes)
    profile = ChunkProfile(
        stages=stages,
        num_bytes=num_bytes // num_parts,
        gathered_bytes=gathered,
        slots=slots,
        gather_bytes=num_bytes - num_bytes // num_parts,
    )
    if not chunk.is_trained:
        return profile
    dtype = inventory.members[chunk.spans[0].name].dtype
    state = precision.state or dtype
    elements = num_bytes // num_parts // dtype.itemsize
    copies = len(MOMENTS) + (state is not dtype)
    sent = dtype if num_ranks == 1 else torch.float32
    exchanged = elements * num_parts * torch.float32.itemsize * (num_ranks - 1) // num_ranks
    gradient_bytes = elements * sent.itemsize
    largest = min(elements, max(span.num_bytes for span in chunk.spans) // dtype.itemsize)
    return replace(
        profile,
        scatter_bytes=exchanged if num_parts > 1 else 0,
        reduce_bytes=0 if num_parts > 1 else 2 * exchanged,  # the sums are sent back, too
        gradient_bytes=gradient_bytes,
        adding=adding(_name(sent), _name(precision.gradient)),
        state_bytes=elements * (precision.gradient.itemsize + copies * state.itemsize),
        staging_bytes=NUM_STAGED * gradient_bytes,
        adding_bytes=room_bytes(largest, sent, precision.gradient),
        update_bytes=0 if precision.gradient is state else largest * state.itemsize,
        num_trained=elements,
        state_dtype=_name(state),
        cast_bytes=elements * (_cast_bytes(precision.gradient, state) + _cast_bytes(state, dtype)),
    )


def _cast_bytes(source: torch.dtype, target: torch.dtype) -> int:
    """Return the bytes that the cast of one element reads and writes."""
    return 0 if source is target else source.itemsize + target.itemsize


def _name(dtype: torch.dtype) -> str:
    """Return the name that a dtype has in the rates."""
    return str(dtype).removeprefix("torch.")


def _gradient_bytes(layout: ChunkLayout, uses: Sequence[dict[int, float]], stages: Sequence[Stage]) -> int:
    """Return the bytes of the device's buffers in which gradients are collected and sent, which are reused.

    A chunk's buffer is open from the backward pass of the last stage that uses the chunk to that of the first one, or
    to the end of the backward pass if the end of that stage is not noticed.
    """
    by_size: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in layout.chunks:
        if chunk.is_trained:
            by_size[layout.slots_of(chunk) * layout.slot_bytes].append(chunk)
    total = 0
    for size, chunks in by_size.items():
        num_open: Counter[int] = Counter()
        for used in filter(None, (uses[chunk.index] for chunk in chunks)):
            first = min(used)
            num_open.update(range(first if stages[first].is_left else 0, max(used) + 1))
        total += min(len(chunks), max(num_open.values(), default=0) + NUM_STAGED - 1) * size
    return total


def _sum_bytes(layout: ChunkLayout, inventory: Inventory, num_parts: int) -> int:
    """Return the device bytes of the ranks' float32 sums in flight to the host, and of the largest one's input.

    Whole sums of float32 gradients lie in the gradients' buffers.
    """
    copies, sums = [0], []
    for chunk in layout.chunks:
        if chunk.is_trained:
            dtype = inventory.members[chunk.spans[0].name].dtype
            size = aligned(chunk.num_bytes, ALIGNMENT * num_parts) // dtype.itemsize * torch.float32.itemsize
            copy = 0 if dtype is torch.float32 else size
            copies.append(0 if num_parts == 1 else copy)
            sums.append(copy if num_parts == 1 else size // num_parts)
    return max(copies) + sum(nlargest(NUM_STAGED, sums))


def _gather_bytes(layout: ChunkLayout, num_parts: int) -> int:
    """Return the bytes of a rank's part of the largest chunk, of which a gather makes a copy."""
    largest = max(chunk.num_bytes for chunk in layout.chunks)
    return 0 if num_parts == 1 else aligned(largest, ALIGNMENT * num_parts) // num_parts

"""rlpipe's side of ``benchmarks.offload``: decides as a run does, trains, and computes the roof."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.offload_cases import COMPUTE, Case, Values, loss_of, make_module, make_row
from benchmarks.update_times import measure_updates
from rlpipe.common.formatting import MIB
from rlpipe.configs.schema.learner_config import ChunkedConfig, OptimizerConfig
from rlpipe.hardware.device import Device
from rlpipe.learner.forward import LogprobModel
from rlpipe.learner.strategies.chunked import capacity
from rlpipe.offload.api import OffloadedAdamW
from rlpipe.offload.decision import Decision, Knobs, Mode
from rlpipe.offload.layout import CHUNK_SIZES, make_layout
from rlpipe.offload.planner.cost import ChunkProfile, Profile, Rates, arrange, first_cached
from rlpipe.offload.planner.fake_trace import trace_model
from rlpipe.offload.planner.planner import decide
from rlpipe.offload.planner.profiler import make_profile, rates_of, roofline, start_seconds
from rlpipe.offload.planner.trace import Operator, TensorTracker, Trace
from rlpipe.offload.runtime.runtime import OffloadedModel, Precision
from rlpipe.offload.units import find_units, take_inventory

MAX_NORM = 1.0
BACKWARD_OVER_FORWARD = 2
"""FLOPs of attention's backward over its forward products, without the recomputation in fast kernels."""


@dataclass(kw_only=True, frozen=True)
class Roof:
    """Least seconds of an update, for each resource alone at its measured rate."""

    compute_s: float
    """Matrix products, including recomputation by the chosen schedule; attention counts half, because it is causal."""
    recomputed_s: float
    """Part of ``compute_s`` that is recomputation."""
    to_device_s: float
    to_host_s: float
    adam_s: float

    @property
    def bound(self) -> str:
        parts = {name: getattr(self, f"{name}_s") for name in ("compute", "to_device", "to_host", "adam")}
        return max(parts, key=lambda name: parts[name])

    @property
    def seconds(self) -> float:
        return float(getattr(self, f"{self.bound}_s"))


@dataclass(kw_only=True, frozen=True)
class Plan:
    decision: Decision
    profile: Profile
    roof: Roof


def run_chunked(case: Case, machine: Device, device: torch.device, *, warmup: int, updates: int) -> dict[str, Any]:
    """Train a case with chunked offload; raise ``DoesNotFit`` if no schedule fits."""
    module = make_module(case)
    num_parameters = sum(parameter.numel() for parameter in module.parameters())
    plan = make_plan(module, case, machine, device)
    print(plan.decision.describe(), flush=True)
    config = OptimizerConfig(lr=1e-5)
    # Never closed: that would restore the model with all its weights, which may exceed the host's memory.
    offloaded = OffloadedModel(
        module,
        plan.decision.arrangement,
        device=device,
        optimizer=config,
        precision=precision_of(case),
        sizes=sizes_of(case),
        fill=Values(),
    )
    module.announce = offloaded.read
    optimizer = OffloadedAdamW(offloaded, config)

    def update(number: int) -> None:
        for index in range(case.micro_batches):
            loss_of(module, case, make_row(case, number * case.micro_batches + index, device)).backward()
        norm = optimizer.step(max_norm=MAX_NORM)
        if not math.isfinite(norm):
            raise RuntimeError(f"the gradients of update {number} have the norm {norm}: nothing was updated")
        print(f"update {number}: gradient norm {norm:.4g}", flush=True)

    measured = measure_updates(update, device, warmup=warmup, updates=updates)
    if measured.peak_bytes is None:
        measured = replace(measured, peak_bytes=count_peak(offloaded, lambda: update(warmup + updates)))
    offloaded.optimizer.flush()
    prediction = plan.decision.prediction
    return {
        "num_parameters": num_parameters,
        "decision": plan.decision.describe(),
        "knobs": asdict(plan.decision.knobs),
        "num_chunks": plan.decision.num_chunks,
        **asdict(measured),
        "predicted_s": prediction.seconds,
        "predicted_peak_bytes": prediction.device_bytes,
        "predicted_host_bytes": prediction.host_bytes,
        "roof": {**asdict(plan.roof), "bound": plan.roof.bound, "seconds": plan.roof.seconds},
    }


def make_plan(module: LogprobModel, case: Case, machine: Device, device: torch.device) -> Plan:
    units = find_units(module)
    row = make_row(case, 0, torch.device("cpu"))
    flops: Counter[str] = Counter()
    seconds = roofline(machine)

    def observe(operator: Operator) -> float:
        if "attention" not in operator.name:  # added below, because not every attention kernel is counted
            flops[str(operator.dtype).removeprefix("torch.")] += operator.flops
        return seconds(operator)

    def run(trace: Trace) -> Tensor:
        module.announce = trace.read
        return loss_of(module, case, row)

    precision = precision_of(case)
    trace = trace_model(module, units, run, observe, compute_dtype=precision.compute, start_s=start_seconds(machine))
    inventory = take_inventory(module, units, compute_dtype=precision.compute)
    layout = make_layout(inventory.tensors, sizes=sizes_of(case))
    profile = make_profile(module, inventory, layout, trace, precision=precision, num_micro_batches=case.micro_batches)
    rates = rates_of(machine)
    limits = capacity(ChunkedConfig(device_memory_gib=case.device_gib), device, replaced=module)
    decision = decide(trace, {1: profile}, num_units=len(units), rates=rates, capacity=limits, fixed={})
    block = next(unit.module for unit in units if unit.is_block)
    block_elements = sum(parameter.numel() for parameter in block.parameters() if parameter.ndim > 1)
    products_s = sum(count / machine.flops(dtype) for dtype, count in flops.items() if count)
    return Plan(
        decision=decision,
        profile=profile,
        roof=make_roof(case, profile, decision, rates, machine, products_s=products_s, block_elements=block_elements),
    )


def make_roof(
    case: Case,
    profile: Profile,
    decision: Decision,
    rates: Rates,
    machine: Device,
    *,
    products_s: float,
    block_elements: int,
) -> Roof:
    """Return the roof; ``products_s`` is a micro batch's time without attention and recomputation."""
    knobs, shape, rate = decision.knobs, case.shape, machine.flops("bfloat16")
    attention = 2 * case.tokens**2 * shape.heads * shape.head_dim  # of a layer, forward
    recomputed_s = knobs.num_checkpointed * (2 * case.tokens * block_elements + attention) / rate
    attention_s = (1 + BACKWARD_OVER_FORWARD) * shape.layers * attention / rate
    to_device, to_host = moved_bytes(profile, knobs, rates)
    prediction = decision.prediction
    return Roof(
        compute_s=case.micro_batches * (products_s + attention_s + recomputed_s),
        recomputed_s=case.micro_batches * recomputed_s,
        to_device_s=to_device / rates.host_to_device,
        to_host_s=to_host / rates.device_to_host,
        adam_s=max(prediction.host_adam_s, prediction.device_adam_s),
    )


def moved_bytes(profile: Profile, knobs: Knobs, rates: Rates) -> tuple[int, int]:
    """Return the least bytes moved to the device and to the host per update.

    The slots stay full when a pass turns around, at either end of the model.
    """
    passes = profile.num_micro_batches
    moving = profile.chunks[knobs.num_persistent :]
    at_the_end = sum(chunk.num_bytes for chunk in profile.chunks[first_cached(profile, knobs.num_slots) :])
    at_the_start = _filling(moving, knobs.num_slots)
    is_trained = any(chunk.num_trained for chunk in moving)
    loads = 2 * passes * sum(chunk.num_bytes for chunk in moving)
    # Trained weights change with the update, and have to be loaded again.
    loads -= passes * at_the_end + (passes - is_trained) * at_the_start
    modes = arrange(profile, knobs, rates)
    stages = zip(profile.stages, modes, strict=True)
    swapped = passes * sum(stage.swapped_bytes for stage, mode in stages if mode is Mode.SWAP)
    return loads + swapped, passes * sum(chunk.gradient_bytes for chunk in moving) + swapped


def _filling(chunks: Sequence[ChunkProfile], num_slots: int) -> int:
    """Return the bytes of the first chunks that fit in ``num_slots`` slots."""
    total = 0
    for chunk in chunks:
        num_slots -= chunk.slots
        if num_slots < 0:
            break
        total += chunk.num_bytes
    return total


def precision_of(case: Case) -> Precision:
    return Precision(compute=COMPUTE, state=getattr(torch, case.states), gradient=getattr(torch, case.gradients))


def sizes_of(case: Case) -> tuple[int, ...]:
    return CHUNK_SIZES if case.chunk_mib is None else (int(case.chunk_mib * MIB),)


def count_peak(offloaded: OffloadedModel, update: Callable[[], object]) -> int:
    """Return the peak device bytes of an update, counted on the CPU."""
    most = 0

    def look(_: Operator) -> None:
        nonlocal most
        most = max(most, tracker.live + offloaded.device_bytes)

    tracker = TensorTracker(look)
    with tracker:
        update()
    held = sum(
        parameter.nbytes * (3 if parameter.requires_grad else 1) for parameter in offloaded.resident.values()
    )  # with two moments; gradients are included in the counted bytes
    return most + held + sum(buffer.nbytes for buffer in offloaded.model.buffers())

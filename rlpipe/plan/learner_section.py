"""The report's section on the learner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any

from rlpipe.common.formatting import count, gib
from rlpipe.hardware.device import Device
from rlpipe.plan.learner_memory import DeviceBytes, HostBytes
from rlpipe.plan.learner_plan import LearnerPlan
from rlpipe.plan.learner_time import StepTime
from rlpipe.plan.section import Section

DEVICE_LABELS = {
    "weights": "weights",
    "gathered": "gathered",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "slots": "chunk slots",
    "reference": "reference",
}


def learner_section(plan: LearnerPlan, device: Device) -> Section:
    """Return the section; ``data`` has the plan's fields and the values derived from them."""
    return Section(name="learner", title="learner", rows=[*_rows(plan, device)], data=_data(plan))


def unplanned_section(kind: str) -> Section:
    """Return the section of an algorithm whose learner is not planned."""
    text = f"no: algorithm.kind={kind} samples in the learner, which a plan does not know"
    return Section(name="learner", title="learner", rows=[("planned", text)], data={"planned": False})


def _data(plan: LearnerPlan) -> dict[str, Any]:
    work = {name: value for name, value in vars_of(plan.work).items() if name != "row"}
    found = {"fits": plan.fits, **vars_of(plan), "work": work, "notes": plan.notes, "tokens_per_s": plan.tokens_per_s}
    found |= {"room": asdict(plan.room), "changes": [asdict(change) for change in plan.changes]}
    if plan.memory is not None:
        found["memory"] = asdict(plan.memory)
        for name, part in (("device", plan.memory.device), ("host", plan.memory.host)):
            found["memory"][name]["total"] = part.total
    if plan.time is not None:
        found["time"] = {**asdict(plan.time), "seconds": plan.time.seconds, "bottleneck": plan.time.bottleneck}
    return found


def vars_of(entry: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, without converting nested ones."""
    return {name: getattr(entry, name) for name in entry.__dataclass_fields__}


def _rows(plan: LearnerPlan, device: Device) -> Iterator[tuple[str, str]]:
    yield "fits", "yes" if plan.problem is None else f"NO: {plan.problem}"
    ranks = f"{plan.num_ranks} ranks" if plan.num_ranks > 1 else "1 rank"
    yield "ranks", f"{ranks}, strategy {plan.strategy}, offload {plan.offload}"
    yield "parameters", f"{count(plan.num_parameters)}, {count(plan.num_trained)} trained"
    if plan.decision is not None:
        yield "decision", plan.decision
    if plan.memory is not None:
        yield from _memory_rows(plan, plan.memory.device, plan.memory.host, device)
    work = plan.work
    micro = f"{work.num_updates:,} x {work.num_micro_batches:,} micro batches a rank"
    yield "a step's work", f"{work.num_sequences:,} sequences of {work.sequence_tokens:,} tokens: {micro}"
    if plan.time is not None:
        yield from _time_rows(plan, plan.time)
    for note in plan.notes:
        yield "note", note
    yield from _change_rows(plan)


def _memory_rows(
    plan: LearnerPlan, on_device: DeviceBytes, on_host: HostBytes, device: Device
) -> Iterator[tuple[str, str]]:
    room = plan.room
    engines = "engine takes" if room.engines == 1 else "engines take"
    beside = f"; {room.engines} {engines} {gib(room.engine_bytes)}" if room.engines else ""
    yield "memory", f"{gib(on_device.total)} of the {gib(device.memory_bytes)} of its device{beside}"
    for name, label in DEVICE_LABELS.items():
        if getattr(on_device, name):
            yield f"  {label}", gib(getattr(on_device, name))
    parts = {
        "process": on_host.process,
        "weights": on_host.weights,
        "gradients": on_host.gradients,
        "optimizer": on_host.optimizer,
        "activations": on_host.activations,
        "reference": on_host.reference,
    }
    held = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
    loading = f"; {gib(on_host.loading)} while it loads" if on_host.loading else ""
    yield "host memory", f"{gib(on_host.total)} a rank: {held}{loading}"


def _time_rows(plan: LearnerPlan, time: StepTime) -> Iterator[tuple[str, str]]:
    phases = {"log-probs": time.logprob_s, "forward": time.forward_s, "backward": time.backward_s}
    shown = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in phases.items() if seconds)
    yield "time", f"{time.seconds:.1f} s a step: {shown}, optimizer {_seconds(time.optimizer_s)}"
    alone: Mapping[str, float] = {
        "computing": time.compute_s,
        "transfers": time.transfer_s,
        "exchange": time.exchange_s,
        "adding gradients": time.adding_s,
        "Adam on the device": time.device_adam_s,
        "on the host": time.host_adam_s,
    }
    yield "  each alone", ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in alone.items() if seconds)
    yield "speed", f"{plan.tokens_per_s:,.0f} tokens/s; bottleneck: {time.bottleneck}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.3f}"


def _change_rows(plan: LearnerPlan) -> Iterator[tuple[str, str]]:
    label = "fits with"
    if not plan.fits and not plan.changes:
        yield label, "no change, nor two of them, that a plan knows; take a smaller model, or shorter sequences"
    for entry in plan.changes:
        yield label, f"{entry.change} ({entry.seconds:.1f} s a step, {gib(entry.device_bytes)})"
        label = ""

"""The report's section on the scorers that run a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from rlpipe.common.formatting import gib
from rlpipe.hardware.device import Device
from rlpipe.plan.scorer_case import describe_neighbours
from rlpipe.plan.scorer_plan import ScorerPlan, UnplannedScorer
from rlpipe.plan.section import Section


def scorers_section(plans: Sequence[ScorerPlan | UnplannedScorer], device: Device) -> Section:
    """Return the section; ``data`` has an object for each scorer, by its name."""
    rows = [row for plan in plans for row in _rows(plan, device)]
    return Section(name="scorers", title="scorers", rows=rows, data={plan.name: _data(plan) for plan in plans})


def _data(plan: ScorerPlan | UnplannedScorer) -> dict[str, Any]:
    if isinstance(plan, UnplannedScorer):
        return {"planned": False, "reason": plan.reason}
    setup = {name: getattr(plan.setup, name) for name in ("copies", "num_gpus", "batch", "sequence_tokens")}
    return {
        "planned": True,
        "fits": plan.fits,
        "problem": plan.problem,
        "model": plan.model,
        "dtype": plan.dtype,
        **setup,
        "memory": {**asdict(plan.memory), "total": plan.memory.total},
        "host_bytes": plan.actor.host_bytes,
        "room_bytes": plan.room_bytes,
        "seconds": plan.seconds,
        "changes": [asdict(change) for change in plan.changes],
    }


def _rows(plan: ScorerPlan | UnplannedScorer, device: Device) -> Iterator[tuple[str, str]]:
    if isinstance(plan, UnplannedScorer):
        yield plan.name, plan.reason
        return
    setup, memory = plan.setup, plan.memory
    copies = f"{setup.copies} processes, each" if setup.copies > 1 else "1 process,"
    where = f"on {setup.num_gpus:g} GPU" if setup.num_gpus else "on the CPU"
    yield plan.name, f"{plan.kind} {plan.model}: {copies} {where}"
    yield "  fits", "yes" if plan.problem is None else f"NO: {plan.problem}"
    rest = f", CUDA {gib(memory.beside)}" if memory.beside else ""
    of = f"of the {gib(device.memory_bytes)} of its device" if setup.num_gpus else "of the host's"
    parts = f"weights {gib(memory.weights)} in {plan.dtype}, activations {gib(memory.activations)}{rest}"
    yield "  memory", f"{gib(memory.total)} {of}: {parts}"
    if plan.neighbours:
        yield "  its GPU", f"{gib(plan.room_bytes)} are left{describe_neighbours(plan.neighbours)}"
    loading = f"; {gib(memory.loading)} of it while it loads" if memory.loading else ""
    yield "  host memory", f"{gib(plan.actor.host_bytes)} a process{loading}"
    sequences = setup.groups_per_copy * setup.sequences_per_group
    yield (
        "  work",
        (f"{sequences:,} sequences a process, of {setup.sequence_tokens:,} tokens, {setup.batch:,} in a pass"),
    )
    if plan.seconds is not None:
        yield "  time", f"{plan.seconds:.1f} s a step"
    elif plan.fits:
        yield "  time", "not known: it computes on the host's CPU"
    if plan.note is not None:
        yield "  note", plan.note
    yield from _change_rows(plan)


def _change_rows(plan: ScorerPlan) -> Iterator[tuple[str, str]]:
    label = "  fits with"
    if not plan.fits and not plan.changes:
        yield label, "no single change that a plan knows; take a smaller model, or shorter sequences"
    for entry in plan.changes:
        time = "" if entry.seconds is None else f"{entry.seconds:.1f} s a step, "
        yield label, f"{entry.change} ({time}{gib(entry.num_bytes)})"
        label = ""

"""The report's section on the host memory of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rlpipe.common.formatting import gib
from rlpipe.hardware.device import Device
from rlpipe.plan.machine import MachinePlan
from rlpipe.plan.section import Section


def machine_section(plan: MachinePlan, device: Device) -> Section:
    return Section(name="machine", title="machine", rows=[*_rows(plan, device)], data=_data(plan, device))


def _data(plan: MachinePlan, device: Device) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "problem": plan.problem,
        "num_machines": plan.num_machines,
        "actors": [{"name": kind.name, "count": count, "host_bytes": kind.host_bytes} for kind, count in plan.placed],
        "num_bytes": plan.num_bytes,
        "host_memory_bytes": device.host_memory_bytes,
        "changes": list(plan.changes),
    }


def _rows(plan: MachinePlan, device: Device) -> Iterator[tuple[str, str]]:
    yield "fits", "yes" if plan.problem is None else f"NO: {plan.problem}"
    where = f" on the fullest of {plan.num_machines} machines" if plan.num_machines > 1 else ""
    yield "host memory", f"{gib(plan.num_bytes)} of {gib(device.host_memory_bytes)}{where}"
    for kind, count in plan.placed:
        each = f", {gib(kind.host_bytes)} each" if count > 1 else ""
        yield "", f"{gib(count * kind.host_bytes)}: {kind.describe(count)}{each}"
    label = "fits with"
    if not plan.fits and not plan.changes:
        yield label, "no change that a plan knows; take a smaller model, or less actors"
    for change in plan.changes:
        yield label, change
        label = ""

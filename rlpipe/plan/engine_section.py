"""The report's section on rollout engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

from rlpipe.common.formatting import gib
from rlpipe.hardware.device import Device
from rlpipe.plan.engine_plan import EnginePlan
from rlpipe.plan.engine_speed import EngineSpeed
from rlpipe.plan.section import Section
from rlpipe.plan.sharing import Sharing


def engine_section(plan: EnginePlan, device: Device) -> Section:
    """Return the section; ``data`` has the plan's fields and the values derived from them."""
    data = {"fits": plan.fits, **asdict(plan)}
    if plan.speed is not None:
        data["speed"] |= {"seconds": plan.speed.seconds, "bottleneck": plan.speed.decode.bottleneck}
        data["speed"]["decode"]["seconds"] = plan.speed.decode.seconds
    rows = [*_rows(plan, device)]
    return Section(name="engine", title="rollout engine", rows=rows, data=data)


def _rows(plan: EnginePlan, device: Device) -> Iterator[tuple[str, str]]:
    yield "fits", "yes" if plan.problem is None else f"NO: {plan.problem}"
    yield from _memory_rows(plan, device)
    if plan.sharing is not None:
        yield "shares its GPU", _describe_sharing(plan.sharing)
    if plan.speed is not None:
        yield from _speed_rows(plan, plan.speed)
    yield from _change_rows(plan)


def _memory_rows(plan: EnginePlan, device: Device) -> Iterator[tuple[str, str]]:
    setup, memory = plan.setup, plan.memory
    where = f"each of {setup.num_devices} devices" if setup.num_devices > 1 else "its device"
    yield "memory", f"{gib(memory.budget_bytes)} of the {gib(device.memory_bytes)} of {where}"
    yield "  weights", f"{gib(memory.weights_bytes)} in {setup.quantization or setup.dtype}"
    if setup.num_slots:
        slots = f"{setup.num_slots} slot{'s' if setup.num_slots > 1 else ''} of rank {setup.slot_rank}"
        yield "  adapters", f"{gib(memory.adapter_bytes)}: {slots}"
    yield "  reserve", f"{gib(memory.reserve_bytes)}: activations, logits, CUDA"
    yield "  keys, values", f"{gib(max(0, memory.kv_bytes))}, {gib(plan.kv_token_bytes)} a token"
    yield "host memory", f"{gib(memory.host_bytes)} a process"
    full, mean = f"{memory.sequences_full:,}", f"{memory.sequences_mean:,}"
    yield "room for", f"{full} sequences of {setup.num_tokens:,} tokens, or {mean} of {setup.mean_tokens:,.0f}"


def _describe_sharing(sharing: Sharing) -> str:
    engines = f"{sharing.engines} engines" if sharing.engines > 1 else "1 engine"
    others = f"; beside one there is a place for {' and '.join(sharing.others)}" if sharing.others else ""
    return f"{engines} on a GPU, each asking for {sharing.num_gpus:g} of it{others}; {gib(sharing.left_bytes)} are left"


def _speed_rows(plan: EnginePlan, speed: EngineSpeed) -> Iterator[tuple[str, str]]:
    setup, decode = plan.setup, speed.decode
    work = setup.groups_per_engine * setup.group_size
    yield "a step's work", f"{work:,} sequences an engine, {speed.running:,} at one time (bound: {speed.limit})"
    total = speed.decode_tokens_per_s * setup.num_engines
    in_all = f", {total:,.0f} on all {setup.num_engines}" if setup.num_engines > 1 else ""
    yield "decode", f"{speed.decode_tokens_per_s:,.0f} tokens/s{in_all}; bottleneck: {decode.bottleneck}"
    parts = {
        "weights": decode.weights_s,
        "keys, values": decode.kv_s,
        "arithmetic": decode.compute_s,
        "exchange": decode.exchange_s,
        "overhead": decode.overhead_s,
    }
    shown = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in parts.items() if seconds)
    yield "  a pass", f"{1e3 * decode.seconds:.2f} ms: {shown}"
    yield "prefill", f"{speed.prefill_tokens_per_s:,.0f} tokens/s"
    yield "time", f"{speed.seconds:.1f} s a step: prefill {speed.prefill_s:.1f}, decode {speed.decode_s:.1f}"


def _change_rows(plan: EnginePlan) -> Iterator[tuple[str, str]]:
    label = "faster with" if plan.fits else "fits with"
    if not plan.fits and not plan.changes:
        yield label, "no change, nor two of them, that a plan knows; take a smaller model, or shorter prompts"
    for entry in plan.changes:
        yield label, f"{entry.change} ({entry.seconds:.1f} s a step)"
        label = ""

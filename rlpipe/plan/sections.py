"""The sections of a plan's report, each as rows for people and as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from rlpipe.common.formatting import count, gib, giga
from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device import STATE_DTYPES, Device, adding
from rlpipe.plan.engine_plan import EnginePlan, EngineSpeed, Sharing
from rlpipe.plan.learner_memory import DeviceBytes, HostBytes
from rlpipe.plan.learner_plan import LearnerPlan
from rlpipe.plan.learner_time import StepTime
from rlpipe.plan.machine_plan import MachinePlan
from rlpipe.plan.scorer_plan import ScorerPlan, UnplannedScorer, describe_neighbours


@dataclass(kw_only=True, slots=True, frozen=True)
class Section:
    """A section of a report; ``rows`` are labels and texts, and an empty label continues the row above."""

    name: str
    """Key in the JSON report."""
    title: str
    rows: Sequence[tuple[str, str]]
    data: Mapping[str, Any]
    """Values in bytes, seconds and tokens."""


def to_text(sections: Sequence[Section]) -> str:
    """Return the sections as text, with label columns of one width."""
    width = max(len(label) for section in sections for label, _ in section.rows)
    return "\n\n".join(
        "\n".join([section.title, *(f"  {label:<{width}}  {text}" for label, text in section.rows)])
        for section in sections
    )


def device_section(device: Device, dtypes: Sequence[str]) -> Section:
    """Return the section, with the FLOP/s in ``dtypes``; raise ``ConfigError`` if the device has no rate for one."""
    data = {**asdict(device), "source": device.source}
    return Section(name="device", title=f"device {device.name}", rows=[*_device_rows(device, dtypes)], data=data)


def _device_rows(device: Device, dtypes: Sequence[str]) -> Iterator[tuple[str, str]]:
    yield "rates", device.source
    if device.hardware is not None:
        yield "hardware", device.hardware
    yield "memory", f"{gib(device.memory_bytes)}, {giga(device.memory_bandwidth)} GB/s"
    label = "arithmetic"
    for dtype in dtypes:
        rate = device.flops(dtype)
        yield label, f"{rate / 1e12:,.1f} TFLOP/s in {dtype}" if rate >= 1e12 else f"{giga(rate)} GFLOP/s in {dtype}"
        label = ""
    to_device, to_host, both = (giga(rate) for rate in (device.host_to_device, device.device_to_host, device.both))
    if device.kind == "cuda":
        yield "PCIe", f"{to_device} GB/s to the device, {to_host} back, {both} each way at once"
    else:
        yield "copies", f"{to_device} GB/s for one copy, {both} each for two at once"
    yield from _link_rows(device)
    yield from _state_rows(device)
    yield "host memory", f"{gib(device.host_memory_bytes)}, {giga(device.host_bandwidth)} GB/s"


def _state_rows(device: Device) -> Iterator[tuple[str, str]]:
    """Yield the rates of Adam and of gradient accumulation, by dtype."""
    label = "Adam"
    for dtype in STATE_DTYPES:
        on_device, on_host = giga(device.device_adam[dtype]), giga(device.host_adam[dtype])
        yield label, f"{on_device} billion elements/s on the device, {on_host} on the host in {dtype}"
        label = ""
    label = "gradient sums"
    for total in STATE_DTYPES:
        rates = ", ".join(f"{giga(device.host_adding[adding(source, total)])} of {source}" for source in STATE_DTYPES)
        yield label, f"billion elements/s on the host: {rates}, into {total}"
        label = ""


def _link_rows(device: Device) -> Iterator[tuple[str, str]]:
    """Yield one rate at a gigabyte if all collectives are alike; otherwise the rates of each by the bytes received."""
    label = "between ranks"
    if device.link is None:
        yield label, f"{giga(device.both)} GB/s (link not known: the rate of both directions at once)"
        return
    curves = {entry.name.replace("_", "-"): getattr(device.link, entry.name) for entry in fields(device.link)}
    if len(set(curves.values())) == 1:
        yield label, f"{giga(device.link.all_gather.rate(1e9))} GB/s"
        return
    for name, curve in curves.items():
        rates = ", ".join(f"{gib(size)} at {curve.rate(size) / 1e9:,.3g}" for size in curve.num_bytes)
        yield label, f"{name} of {rates} GB/s"
        label = ""


def engine_section(plan: EnginePlan, device: Device) -> Section:
    """Return the section; ``data`` has the plan's fields and the values derived from them."""
    data = {"fits": plan.fits, **asdict(plan), "changes": [remedy.as_json() for remedy in plan.changes]}
    if plan.speed is not None:
        data["speed"] |= {"seconds": plan.speed.seconds, "bottleneck": plan.speed.decode.bottleneck}
        data["speed"]["decode"]["seconds"] = plan.speed.decode.seconds
    rows = [*_engine_rows(plan, device)]
    return Section(name="engine", title="rollout engine", rows=rows, data=data)


def _engine_rows(plan: EnginePlan, device: Device) -> Iterator[tuple[str, str]]:
    yield "fits", "yes" if plan.problem is None else f"NO: {plan.problem}"
    yield "policy", str(plan.setup.serving)
    yield from _engine_memory_rows(plan, device)
    if plan.sharing is not None:
        yield "shares its GPU", _describe_sharing(plan.sharing)
    if plan.speed is not None:
        yield from _speed_rows(plan, plan.speed)
    changes = [remedy.describe() for remedy in plan.changes]
    nothing = "no known change, or pair of changes, is enough; use a smaller model, or shorter prompts"
    yield from _change_rows(plan.fits, changes, nothing, "faster with" if plan.fits else "fits with")


def _engine_memory_rows(plan: EnginePlan, device: Device) -> Iterator[tuple[str, str]]:
    setup, memory = plan.setup, plan.memory
    devices = f"each of {setup.num_devices} devices" if setup.num_devices > 1 else "its device"
    yield "memory", f"{gib(memory.budget_bytes)} of the {gib(device.memory_bytes)} of {devices}"
    yield "  weights", f"{gib(memory.weights_bytes)} in {setup.quantization or setup.dtype}"
    if setup.num_slots:
        slots = f"{setup.num_slots} slot{'s' if setup.num_slots > 1 else ''} of rank {setup.slot_rank}"
        yield "  adapters", f"{gib(memory.adapter_bytes)}: {slots}"
    yield "  reserve", f"{gib(memory.reserve_bytes)}: activations, logits, CUDA"
    yield "  KV cache", f"{gib(max(0, memory.kv_bytes))}, {gib(plan.kv_token_bytes)} per token"
    yield "host memory", f"{gib(memory.host_bytes)} per process"
    full, mean = f"{memory.sequences_full:,}", f"{memory.sequences_mean:,}"
    yield "capacity", f"{full} sequences of {setup.num_tokens:,} tokens, or {mean} of {setup.mean_tokens:,.0f}"


def _describe_sharing(sharing: Sharing) -> str:
    engines = f"{sharing.engines} engines" if sharing.engines > 1 else "1 engine"
    neighbours = f"; one engine can share it with {' and '.join(sharing.others)}" if sharing.others else ""
    return (
        f"{engines} on a GPU, each requesting {sharing.num_gpus:g} of it{neighbours}; "
        f"{gib(sharing.left_bytes)} are left"
    )


def _speed_rows(plan: EnginePlan, speed: EngineSpeed) -> Iterator[tuple[str, str]]:
    setup, decode = plan.setup, speed.decode
    work = setup.groups_per_engine * setup.group_size
    noun = f"episodes of up to {setup.num_turns} turns" if setup.num_turns > 1 else "sequences"
    yield "work per step", f"{work:,} {noun} per engine, {speed.running:,} at a time (limit: {speed.limit})"
    total = speed.decode_tokens_per_s * setup.num_engines
    in_all = f", {total:,.0f} on all {setup.num_engines}" if setup.num_engines > 1 else ""
    yield "decode", f"{speed.decode_tokens_per_s:,.0f} tokens/s{in_all}; bottleneck: {decode.bottleneck}"
    components = {
        "weights": decode.weights_s,
        "KV cache": decode.kv_s,
        "arithmetic": decode.compute_s,
        "communication": decode.exchange_s,
        "overhead": decode.overhead_s,
    }
    shown = ", ".join(f"{name} {1e3 * seconds:.2f}" for name, seconds in components.items() if seconds)
    yield "  per pass", f"{1e3 * decode.seconds:.2f} ms: {shown}"
    yield "prefill", f"{speed.prefill_tokens_per_s:,.0f} tokens/s"
    yield "time", f"{speed.seconds:.1f} s per step: prefill {speed.prefill_s:.1f}, decode {speed.decode_s:.1f}"


def _change_rows(
    fits: bool, changes: Sequence[str], nothing: str, label: str = "fits with"
) -> Iterator[tuple[str, str]]:
    """Yield the changes with which something fits, or else ``nothing``, which says that there is none."""
    if not fits and not changes:
        yield label, nothing
    for number, change in enumerate(changes):
        yield "" if number else label, change


def learner_section(plan: LearnerPlan, device: Device) -> Section:
    """Return the section; ``data`` has the plan's fields and the values derived from them."""
    return Section(name="learner", title="learner", rows=[*_learner_rows(plan, device)], data=_learner_data(plan))


def unplanned_section(reason: str) -> Section:
    """Return the section of a learner that is not planned."""
    data = {"planned": False, "reason": reason}
    return Section(name="learner", title="learner", rows=[("planned", f"no: {reason}")], data=data)


def _learner_data(plan: LearnerPlan) -> dict[str, Any]:
    work = {name: value for name, value in vars_of(plan.work).items() if name != "row"}
    data = {"fits": plan.fits, **vars_of(plan), "work": work, "tokens_per_s": plan.tokens_per_s}
    data |= {
        "room": asdict(data.pop("budget")),  # scripts read this key
        "changes": [remedy.as_json("device_bytes") for remedy in plan.changes],
    }
    if plan.memory is not None:
        data["memory"] = asdict(plan.memory)
        for name, memory in (("device", plan.memory.device), ("host", plan.memory.host)):
            data["memory"][name]["total"] = memory.total
    if plan.time is not None:
        data["time"] = {**asdict(plan.time), "seconds": plan.time.seconds, "bottleneck": plan.time.bottleneck}
    return data


def vars_of(entry: Any) -> dict[str, Any]:
    """Return the fields of a dataclass, without converting nested ones."""
    return {name: getattr(entry, name) for name in entry.__dataclass_fields__}


def _learner_rows(plan: LearnerPlan, device: Device) -> Iterator[tuple[str, str]]:
    yield "fits", "yes" if plan.problem is None else f"NO: {plan.problem}"
    ranks = f"{plan.num_ranks} ranks" if plan.num_ranks > 1 else "1 rank"
    yield "ranks", f"{ranks}, strategy {plan.strategy}, offload {plan.offload}"
    yield "parameters", f"{count(plan.num_parameters)}, {count(plan.num_trained)} trained"
    if plan.decision is not None:
        yield "decision", plan.decision
    if plan.memory is not None:
        yield from _learner_memory_rows(plan, plan.memory.device, plan.memory.host, device)
    work = plan.work
    micro = f"{work.num_updates:,} x {work.num_micro_batches:,} micro batches per rank"
    yield "work per step", f"{work.num_sequences:,} sequences of {work.sequence_tokens:,} tokens: {micro}"
    if plan.time is not None:
        yield from _time_rows(plan, plan.time)
    for note in plan.notes:
        yield "note", note
    changes = [remedy.describe() for remedy in plan.changes]
    nothing = "no known change, or pair of changes, is enough; use a smaller model, or shorter sequences"
    yield from _change_rows(plan.fits, changes, nothing)


def _learner_memory_rows(
    plan: LearnerPlan, device_bytes: DeviceBytes, host_bytes: HostBytes, device: Device
) -> Iterator[tuple[str, str]]:
    budget = plan.budget
    engines = "engine uses" if budget.engines == 1 else "engines use"
    engines_use = f"; {budget.engines} {engines} {gib(budget.engine_bytes)}" if budget.engines else ""
    yield "memory", f"{gib(device_bytes.total)} of the {gib(device.memory_bytes)} of its device{engines_use}"
    for name, size in asdict(device_bytes).items():
        if size:
            yield f"  {'chunk slots' if name == 'slots' else name}", gib(size)
    components = ", ".join(
        f"{name} {gib(size)}" for name, size in asdict(host_bytes).items() if size and name != "loading"
    )
    loading = f"; {gib(host_bytes.loading)} while loading" if host_bytes.loading else ""
    yield "host memory", f"{gib(host_bytes.total)} per rank: {components}{loading}"


def _time_rows(plan: LearnerPlan, time: StepTime) -> Iterator[tuple[str, str]]:
    phases = {"log-probs": time.logprob_s, "forward": time.forward_s, "backward": time.backward_s}
    shown = ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in phases.items() if seconds)
    yield "time", f"{time.seconds:.1f} s per step: {shown}, optimizer {_seconds(time.optimizer_s)}"
    alone: Mapping[str, float] = {
        "computing": time.compute_s,
        "transfers": time.transfer_s,
        "communication": time.exchange_s,
        "adding gradients": time.adding_s,
        "Adam on the device": time.device_adam_s,
        "on the host": time.host_adam_s,
    }
    yield "  in isolation", ", ".join(f"{name} {_seconds(seconds)}" for name, seconds in alone.items() if seconds)
    yield "speed", f"{plan.tokens_per_s:,.0f} tokens/s; bottleneck: {time.bottleneck}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f}" if seconds >= 1 else f"{seconds:.3f}"


def scorers_section(plans: Sequence[ScorerPlan | UnplannedScorer], device: Device) -> Section:
    """Return the section; ``data`` has an object for each scorer, by its name."""
    rows = [row for plan in plans for row in _scorer_rows(plan, device)]
    return Section(name="scorers", title="scorers", rows=rows, data={plan.name: _scorer_data(plan) for plan in plans})


def _scorer_data(plan: ScorerPlan | UnplannedScorer) -> dict[str, Any]:
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
        "changes": [remedy.as_json("num_bytes") for remedy in plan.changes],
    }


def _scorer_rows(plan: ScorerPlan | UnplannedScorer, device: Device) -> Iterator[tuple[str, str]]:
    if isinstance(plan, UnplannedScorer):
        yield plan.name, plan.reason
        return
    setup, memory = plan.setup, plan.memory
    copies = f"{setup.copies} processes, each" if setup.copies > 1 else "1 process,"
    location = f"on {setup.num_gpus:g} GPU" if setup.num_gpus else "on the CPU"
    yield plan.name, f"{plan.kind} {plan.model}: {copies} {location}"
    yield "  fits", "yes" if plan.problem is None else f"NO: {plan.problem}"
    cuda = f", CUDA {gib(memory.beside)}" if memory.beside else ""
    budget = f"of the {gib(device.memory_bytes)} of its device" if setup.num_gpus else "of host memory"
    components = f"weights {gib(memory.weights)} in {plan.dtype}, activations {gib(memory.activations)}{cuda}"
    yield "  memory", f"{gib(memory.total)} {budget}: {components}"
    if plan.neighbours:
        yield "  its GPU", f"{gib(plan.room_bytes)} are left{describe_neighbours(plan.neighbours)}"
    loading = f"; {gib(memory.loading)} of it while loading" if memory.loading else ""
    yield "  host memory", f"{gib(plan.actor.host_bytes)} per process{loading}"
    sequences = setup.groups_per_copy * setup.sequences_per_group
    yield (
        "  work",
        (f"{sequences:,} sequences of {setup.sequence_tokens:,} tokens per process, {setup.batch:,} per pass"),
    )
    if plan.seconds is not None:
        yield "  time", f"{plan.seconds:.1f} s per step"
    elif plan.fits:
        yield "  time", "not known: the scorer computes on the host's CPU"
    if plan.note is not None:
        yield "  note", plan.note
    changes = [remedy.describe() for remedy in plan.changes]
    nothing = "no single known change is enough; use a smaller model, or shorter sequences"
    yield from _change_rows(plan.fits, changes, nothing, "  fits with")


def machine_section(plan: MachinePlan, device: Device) -> Section:
    return Section(
        name="machine", title="machine", rows=[*_machine_rows(plan, device)], data=_machine_data(plan, device)
    )


def _machine_data(plan: MachinePlan, device: Device) -> dict[str, Any]:
    return {
        "fits": plan.fits,
        "problem": plan.problem,
        "num_machines": plan.num_machines,
        "actors": [{"name": kind.name, "count": count, "host_bytes": kind.host_bytes} for kind, count in plan.placed],
        "num_bytes": plan.num_bytes,
        "host_memory_bytes": device.host_memory_bytes,
        "changes": list(plan.changes),
    }


def _machine_rows(plan: MachinePlan, device: Device) -> Iterator[tuple[str, str]]:
    yield "fits", "yes" if plan.problem is None else f"NO: {plan.problem}"
    location = f" on the fullest of {plan.num_machines} machines" if plan.num_machines > 1 else ""
    yield "host memory", f"{gib(plan.num_bytes)} of {gib(device.host_memory_bytes)}{location}"
    for kind, num in plan.placed:
        per_actor = f", {gib(kind.host_bytes)} each" if num > 1 else ""
        yield "", f"{gib(num * kind.host_bytes)}: {kind.describe(num)}{per_actor}"
    nothing = "no known change is enough; use a smaller model, or fewer actors"
    yield from _change_rows(plan.fits, plan.changes, nothing)


@dataclass(kw_only=True, slots=True, frozen=True)
class Loop:
    """Seconds of a step's phases, and which of them overlap."""

    sampling_s: float
    scoring_s: float
    """Seconds of scoring by models whose time is known."""
    training_s: float
    tokens: int
    """Tokens of a step."""
    takes_turns: bool
    """Whether nothing is sampled during training, because the run is synchronous or both share a GPU."""
    scores_after: bool
    """Whether scoring adds to sampling: it waits for all groups of a step, or shares the engines' device."""

    @property
    def generating_s(self) -> float:
        """Seconds of sampling and scoring."""
        phases = (self.sampling_s, self.scoring_s)
        return sum(phases) if self.scores_after else max(phases)

    @property
    def seconds(self) -> float:
        """Seconds of a step in the steady state."""
        phases = (self.generating_s, self.training_s)
        return sum(phases) if self.takes_turns else max(phases)

    @property
    def bottleneck(self) -> str:
        phases = {"training": self.training_s, "scoring": self.scoring_s, "sampling": self.sampling_s}
        if not self.takes_turns and self.training_s < self.generating_s:
            del phases["training"]
        return max(phases, key=lambda name: phases[name])


def read_loop(
    config: Config, engine: EnginePlan, learner: LearnerPlan, scorers: Sequence[ScorerPlan] = ()
) -> Loop | None:
    """Return the times of a step; None if the engine, the learner or a scorer does not fit."""
    if engine.speed is None or learner.time is None or not all(scorer.fits for scorer in scorers):
        return None
    in_turns = [scorer.seconds or 0.0 for scorer in scorers if scorer.may_share]
    concurrent = [scorer.seconds or 0.0 for scorer in scorers if not scorer.may_share]
    return Loop(
        sampling_s=engine.speed.seconds,
        scoring_s=max(sum(in_turns), *concurrent, 0.0),
        training_s=learner.time.seconds,
        tokens=learner.work.step_tokens,
        takes_turns=config.replay.max_staleness == 0 or learner.budget.engines > 0,
        scores_after=not config.replay.streaming or any(_shares_gpu_with_engines(config, scorer) for scorer in scorers),
    )


def _shares_gpu_with_engines(config: Config, scorer: ScorerPlan) -> bool:
    """Return whether engine and scorer may share a GPU, or are both on the CPU."""
    gpu_shares = (config.rollout.num_gpus, scorer.setup.num_gpus)
    return gpu_shares == (0, 0) or (all(0 < share < 1 for share in gpu_shares) and sum(gpu_shares) <= 1 + 1e-9)


def loop_section(loop: Loop) -> Section:
    data = {
        **asdict(loop),
        "generating_s": loop.generating_s,
        "seconds": loop.seconds,
        "bottleneck": loop.bottleneck,
        "tokens_per_s": loop.tokens / loop.seconds,
    }
    return Section(name="step", title="step", rows=[*_loop_rows(loop)], data=data)


def _loop_rows(loop: Loop) -> Iterator[tuple[str, str]]:
    order = "one after another" if loop.takes_turns else "at the same time"
    generating = f"sampling {loop.sampling_s:.1f}"
    if loop.scoring_s:
        generating += f" {'and then' if loop.scores_after else 'alongside'} scoring {loop.scoring_s:.1f}"
    yield "time", f"{loop.seconds:.1f} s: {generating}, training {loop.training_s:.1f}, {order}"
    yield "speed", f"{loop.tokens / loop.seconds:,.0f} tokens/s; bottleneck: {loop.bottleneck}"

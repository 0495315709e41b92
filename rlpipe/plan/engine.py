"""The plan of a config's rollout engines: memory, speed, and what would have to change."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from rlpipe.configs.schema import Config
from rlpipe.plan.device import Device
from rlpipe.plan.devices import DEVICES
from rlpipe.plan.engine_memory import EngineMemory, engine_memory
from rlpipe.plan.engine_setup import EngineSetup, read_engine_setup
from rlpipe.plan.engine_speed import EngineSpeed, engine_speed
from rlpipe.plan.kv_cache import KvCache, read_kv_cache
from rlpipe.plan.shape import ModelShape, read_shape
from rlpipe.plan.sharing import Sharing, read_sharing
from rlpipe.plan.units import gib

MOST_UTILIZATION = 0.95
"""Of a GPU, for vLLM: what is taken beyond its own count must find room in the rest."""
DEVICES_AT_MOST = 8
"""GPUs that an engine is proposed to be spread over."""
FEWEST_COMPLETION_TOKENS = 16
"""No shorter completions are proposed."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Change:
    """What could be changed, and what it does."""

    change: str
    seconds: float
    """To sample a step's groups with it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EnginePlan:
    """Of one engine, all being alike."""

    setup: EngineSetup
    kv_token_bytes: int
    """On each of its devices."""
    memory: EngineMemory
    sharing: Sharing | None
    problem: str | None
    """Why it does not fit."""
    speed: EngineSpeed | None
    """None where it does not fit."""
    changes: Sequence[Change]
    """Where it does not fit, those with which it does; else those that would make it faster, the best first."""

    @property
    def fits(self) -> bool:
        return self.problem is None


@dataclass(kw_only=True, slots=True, frozen=True)
class _Case:
    """A setup on a device; changes are tried on others of them."""

    setup: EngineSetup
    shape: ModelShape
    described: PreTrainedConfig
    device: Device

    @property
    def kv_cache(self) -> KvCache:
        setup = self.setup
        return read_kv_cache(self.described, element_bytes=setup.kv_element_bytes, num_devices=setup.num_devices)

    @property
    def memory(self) -> EngineMemory:
        return engine_memory(self.setup, self.shape, self.kv_cache, self.device)

    @property
    def speed(self) -> EngineSpeed:
        memory = self.memory
        # transformers keeps a whole batch to its last token; vLLM fills the place of each sequence that ends.
        room = memory.sequences_full if self.setup.kind == "hf" else memory.sequences_mean
        return engine_speed(self.setup, self.shape, self.kv_cache, self.device, room=room)

    @property
    def problem(self) -> str | None:
        return describe_problem(self.setup, self.memory, self.device)


def plan_engine(config: Config, described: PreTrainedConfig, device: Device) -> EnginePlan:
    """Plans one rollout engine of the config; ``described`` is transformers' config of its model.

    Raises ``ConfigError`` if the config has no engines, if they do not run on such a device, or if an argument of the
    engine can't be planned with, and ``ModelError`` if the model can't be outlined.
    """
    setup = read_engine_setup(config, described, device)
    case = _Case(setup=setup, shape=read_shape(described, config.model), described=described, device=device)
    problem = case.problem
    speed = case.speed if problem is None else None
    return EnginePlan(
        setup=setup,
        kv_token_bytes=case.kv_cache.token_bytes,
        memory=case.memory,
        sharing=read_sharing(config, setup, device),
        problem=problem,
        speed=speed,
        changes=remedies(case) if speed is None else accelerations(case, speed),
    )


def describe_problem(setup: EngineSetup, memory: EngineMemory, device: Device) -> str | None:
    """Why the engine does not fit, or None."""
    needed = memory.weights_bytes + memory.adapter_bytes + memory.reserve_bytes
    if setup.kind == "vllm" and setup.engines_per_device * setup.utilization > 1:
        return f"{setup.engines_per_device} engines on a GPU, each of which takes {setup.utilization:.0%} of its memory"
    if memory.kv_bytes <= 0:
        return f"without any sequence it needs {gib(needed)}, and may take {gib(memory.budget_bytes)} of {device.name}"
    if memory.sequences_full == 0:
        return f"one sequence of {setup.num_tokens:,} tokens needs more than the {gib(memory.kv_bytes)} that are left"
    batch = min(setup.max_sequences, setup.groups_per_engine * setup.group_size)
    if setup.kind == "hf" and memory.sequences_full < batch:
        return f"a batch has {batch:,} sequences, and the memory holds {memory.sequences_full:,} at full length"
    return None


def remedies(case: _Case) -> list[Change]:
    """The changes with which the engine fits, each alone."""
    found = [(text, changed) for text, changed in _smaller(case) if changed.problem is None]
    return [Change(change=text, seconds=changed.speed.seconds) for text, changed in found]


def _smaller(case: _Case) -> Iterator[tuple[str, _Case]]:
    setup = case.setup
    if setup.kind == "vllm" and setup.cpu_kv_bytes is None:
        share = int(100 * MOST_UTILIZATION / setup.engines_per_device) / 100
        changed = replace(case, setup=replace(setup, utilization=share))
        yield f"rollout.engine_args.gpu_memory_utilization={share:g}", changed
    if setup.kind == "hf":
        room = case.memory.sequences_full // setup.group_size * setup.group_size
        if room:
            tokens = room * setup.prompt_tokens
            fewer = replace(setup, max_sequences=room, batched_tokens=min(tokens, setup.batched_tokens))
            yield f"rollout.engine_args.max_batch_size={room}", replace(case, setup=fewer)
    yield from _shorter(case)
    if setup.kind == "vllm" and setup.cpu_kv_bytes is None and setup.engines_per_device == 1:
        yield from _more_devices(case)
    larger = [device for device in DEVICES.values() if device.memory_bytes > 1.1 * case.device.memory_bytes]
    fitting = [device for device in larger if replace(case, device=device).problem is None]
    if fitting and case.device.kind == "cuda":
        yield f"--device {fitting[-1].name}", replace(case, device=fitting[-1])


def _shorter(case: _Case) -> Iterator[tuple[str, _Case]]:
    """Completions of the greatest length that fits, in steps of a sixteenth."""
    longest = case.setup.completion_tokens
    for sixteenths in range(15, 0, -1):
        tokens = longest * sixteenths // 16
        changed = replace(case, setup=replace(case.setup, completion_tokens=tokens))
        if tokens >= FEWEST_COMPLETION_TOKENS and changed.problem is None:
            yield f"rollout.sampling.max_tokens={tokens}", changed
            return


def _more_devices(case: _Case) -> Iterator[tuple[str, _Case]]:
    """The fewest GPUs that fit; they must divide the heads."""
    count = case.setup.num_devices
    while (count := 2 * count) <= DEVICES_AT_MOST:
        changed = replace(case, setup=replace(case.setup, num_devices=count))
        if case.shape.num_heads % count == 0 and changed.problem is None:
            yield f"rollout.tensor_parallel_size={count} rollout.num_gpus={count}", changed
            return


def accelerations(case: _Case, speed: EngineSpeed) -> list[Change]:
    """The changes that sample a step's groups in less time, the best first."""
    tried = [Change(change=text, seconds=changed.speed.seconds) for text, changed in _faster(case, speed)]
    return sorted((entry for entry in tried if entry.seconds < 0.99 * speed.seconds), key=lambda entry: entry.seconds)


def _faster(case: _Case, speed: EngineSpeed) -> Iterator[tuple[str, _Case]]:
    setup = case.setup
    work = setup.groups_per_engine * setup.group_size
    if speed.running == setup.max_sequences < work:
        room = case.memory.sequences_mean if setup.kind == "vllm" else case.memory.sequences_full
        name = "max_num_seqs" if setup.kind == "vllm" else "max_batch_size"
        changed = replace(case, setup=replace(setup, max_sequences=min(work, room)))
        if changed.problem is None:
            yield f"rollout.engine_args.{name}={min(work, room)}", changed
    if setup.groups_per_step > setup.num_engines and setup.engines_per_device == 1:
        more = replace(setup, num_engines=setup.num_engines + 1)
        yield f"rollout.num_engines={setup.num_engines + 1}", replace(case, setup=more)
    if setup.kind == "vllm" and setup.cpu_kv_bytes is None and setup.engines_per_device == 1:
        yield from _more_devices(case)

"""The plan of the rollout engines: whether they fit, how fast they sample, and what would help.

Source: Williams et al. 2009, "Roofline"; for decoding, Pope et al., arXiv:2211.05102.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from transformers import PreTrainedConfig

from rlpipe.common.formatting import gib
from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device import Device
from rlpipe.hardware.device_profiles import larger_devices
from rlpipe.plan.engine_memory import (
    ELEMENT_BYTES,
    EngineMemory,
    EngineSetup,
    KvCache,
    engine_memory,
    read_engine_setup,
    read_kv_cache,
    weights_bytes,
)
from rlpipe.plan.model_shape import ModelShape, read_shape
from rlpipe.plan.remedy import Remedy
from rlpipe.scoring.pools import FEATURE_PATH, resolve_pools

VLLM_PASS_S = 0.002
"""Seconds per pass for scheduling, sampling and launch with recorded graphs, beyond the GPU's work; an assumption."""
HF_LAYER_S = 0.0008
"""Seconds per layer with transformers, which launches every kernel from Python; an assumption."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Pass:
    """Seconds of one forward pass, by part."""

    weights_s: float
    """Seconds to read the weights."""
    kv_s: float
    """Seconds to read the KV cache."""
    compute_s: float
    exchange_s: float
    """Exchange between the devices that share the engine."""
    overhead_s: float

    @property
    def seconds(self) -> float:
        return max(self.weights_s + self.kv_s, self.compute_s) + self.exchange_s + self.overhead_s

    @property
    def bottleneck(self) -> str:
        seconds_by_cause = {
            "reading weights": self.weights_s,
            "reading the KV cache": self.kv_s,
            "arithmetic": self.compute_s if self.compute_s > self.weights_s + self.kv_s else 0.0,
            "exchange between GPUs": self.exchange_s,
            "overhead of each pass": self.overhead_s,
        }
        return max(seconds_by_cause, key=lambda name: seconds_by_cause[name])


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineSpeed:
    """Speed of sampling a step's groups, with all prompts and completions at full length."""

    running: int
    """Sequences that run concurrently."""
    limit: str
    """The limit on the number of running sequences."""
    decode: Pass
    prefill_s: float
    decode_s: float
    prefill_tokens_per_s: float
    """Prefill tokens per second of one engine."""
    decode_tokens_per_s: float
    """Decoded tokens per second of one engine."""

    @property
    def seconds(self) -> float:
        """Seconds until the last group of a step is sampled."""
        return self.prefill_s + self.decode_s


def engine_speed(
    setup: EngineSetup, shape: ModelShape, kv_cache: KvCache, device: Device, *, fitting: int
) -> EngineSpeed:
    """Estimate an engine's speed; ``fitting`` is the number of sequences that the memory holds, at least 1.

    The prompt of a group is prefilled once, and its keys and values are shared by the group's completions. Episodes
    take no time between their turns.
    """
    work = setup.groups_per_engine * setup.group_size
    running = min(work, fitting, setup.max_sequences)
    decode = forward_pass(
        setup, shape, kv_cache, device, num_sequences=running, num_tokens=running, context=setup.mean_tokens
    )
    decode_s = decode.seconds * setup.completion_tokens * work / running
    batch = min(setup.batched_tokens, setup.prefill_tokens)
    prefill = forward_pass(
        setup,
        shape,
        kv_cache,
        device,
        num_sequences=batch / setup.prompt_tokens,
        num_tokens=batch,
        context=setup.prompt_tokens / 2 if setup.num_turns == 1 else setup.mean_tokens,
    )
    return EngineSpeed(
        running=running,
        limit=_limit(setup, running, work, fitting),
        decode=decode,
        prefill_s=prefill.seconds * setup.prefill_tokens / batch,
        decode_s=decode_s,
        prefill_tokens_per_s=batch / prefill.seconds,
        decode_tokens_per_s=running / decode.seconds,
    )


def forward_pass(
    setup: EngineSetup,
    shape: ModelShape,
    kv_cache: KvCache,
    device: Device,
    *,
    num_sequences: float,
    num_tokens: float,
    context: float,
) -> Pass:
    """Return the time of a pass over ``num_tokens`` new tokens, each attending to ``context`` tokens on average.

    Engines that share a device run in turns.
    """
    turns = setup.engines_per_device
    used = shape.num_used(num_tokens) / shape.num_parameters
    per_token = 2 * shape.num_active / setup.num_devices + kv_cache.attention_flops(context)
    element = ELEMENT_BYTES[setup.dtype]
    hidden_bytes = num_tokens * shape.hidden_size * element if setup.num_devices > 1 else 0.0
    sum_s = device.exchange.all_reduce.time(2 * hidden_bytes * (1 - 1 / setup.num_devices))
    overhead = VLLM_PASS_S if setup.kind == "vllm" else HF_LAYER_S * shape.num_layers
    return Pass(
        weights_s=turns * used * weights_bytes(setup, shape) / device.memory_bandwidth,
        kv_s=turns * num_sequences * kv_cache.read_bytes(context) / device.memory_bandwidth,
        compute_s=turns * num_tokens * per_token / device.flops(setup.dtype),
        # After attention and MLP of each layer the parts are all-reduced around the ring, so each byte is sent twice.
        exchange_s=2 * shape.num_layers * sum_s,
        overhead_s=overhead,
    )


def _limit(setup: EngineSetup, running: int, work: int, fitting: int) -> str:
    if running == work:
        return "all sequences of a step"
    if running == setup.max_sequences:
        name = "max_num_seqs" if setup.kind == "vllm" else "max_batch_size"
        return f"rollout.engine_args.{name}"
    assert running == fitting
    return "memory for keys and values"


@dataclass(kw_only=True, slots=True, frozen=True)
class Sharing:
    """The sharing of a GPU by engines that each ask for a part of it."""

    num_gpus: float
    """Part of the GPU that an engine asks for."""
    engines: int
    """Engines on one GPU if Ray fills it up."""
    others: tuple[str, ...]
    """Other kinds of actors that fit on a GPU next to one engine."""
    left_bytes: int
    """Bytes left beside all engines of the GPU; below 0 if they want more than there is."""


def read_sharing(config: Config, setup: EngineSetup, device: Device) -> Sharing | None:
    """Return the sharing; None if engines have whole GPUs or none. Ray counts the parts of GPUs, not the memory."""
    num_gpus = config.rollout.num_gpus
    if not 0 < num_gpus < 1:
        return None
    used = setup.utilization * (setup.engines_per_device if setup.kind == "vllm" else 1)
    return Sharing(
        num_gpus=num_gpus,
        engines=setup.engines_per_device,
        others=tuple(name for name, share in _gpu_users(config) if 0 < share <= 1 - num_gpus + 1e-9),
        left_bytes=int(device.memory_bytes * (1 - used)),
    )


def _gpu_users(config: Config) -> Iterator[tuple[str, float]]:
    """Yield the actors other than engines, with the GPUs that one process of each asks for."""
    yield "the learner's ranks", config.learner.num_gpus
    for pool in resolve_pools(config).values():
        computes_features = any(reward.path == FEATURE_PATH for reward in pool.members.values())
        name = "the feature network" if computes_features else f"the reward {', '.join(pool.members)}"
        yield name, pool.num_gpus


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineEstimate:
    """A setup on a device; proposed changes are tried on modified copies."""

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
        # transformers keeps the whole batch until its last token; vLLM refills the slot of each sequence that ends.
        fitting = memory.sequences_full if self.setup.kind == "hf" else memory.sequences_mean
        return engine_speed(self.setup, self.shape, self.kv_cache, self.device, fitting=fitting)

    @property
    def problem(self) -> str | None:
        return describe_problem(self.setup, self.memory, self.device)


def describe_problem(setup: EngineSetup, memory: EngineMemory, device: Device) -> str | None:
    """Return why the engine does not fit, or None if it does."""
    needed = memory.weights_bytes + memory.adapter_bytes + memory.reserve_bytes
    if setup.kind == "vllm" and setup.engines_per_device * setup.utilization > 1:
        return f"{setup.engines_per_device} engines share a GPU, and each uses {setup.utilization:.0%} of its memory"
    if memory.kv_bytes <= 0:
        budget = gib(memory.budget_bytes)
        return f"the engine needs {gib(needed)} without any sequence, and may use {budget} of {device.name}"
    if memory.longest_bytes > memory.kv_bytes:
        return f"one sequence of {setup.max_model_len:,} tokens needs {gib(memory.longest_bytes)}, but only " + (
            f"{gib(memory.kv_bytes)} are left for keys and values"
        )
    batch = min(setup.max_sequences, setup.groups_per_engine * setup.group_size)
    if setup.kind == "hf" and memory.sequences_full < batch:
        return f"a batch has {batch:,} sequences, but only {memory.sequences_full:,} of full length fit in memory"
    return None


MAX_UTILIZATION = 0.95
"""Largest ``gpu_memory_utilization`` proposed; memory that vLLM does not count must fit in the rest."""
MAX_DEVICES = 8
"""Most GPUs per engine that are proposed."""
COMPLETION_STEP = 64
"""Tokens; proposed completion lengths are multiples of it."""


def remedies(case: EngineEstimate) -> list[Remedy]:
    """Return the single changes with which the engine fits; if there are none, the pairs of changes."""
    alone = [_describe(text, changed) for _, text, changed in _smaller(case)]
    return alone or list(_pairs(case))


def _describe(text: str, case: EngineEstimate) -> Remedy:
    return Remedy(change=text, seconds=case.speed.seconds)


def _smaller(case: EngineEstimate) -> Iterator[tuple[str, str, EngineEstimate]]:
    """Yield the smallest change of each kind with which the engine fits, with the kind's name."""
    for kind, changes in _KINDS.items():
        for text, changed in changes(case):
            if changed.problem is None:
                yield kind, text, changed
                break


def _pairs(case: EngineEstimate) -> Iterator[Remedy]:
    """Yield for each two kinds the smallest change of one that fits with the smallest of the other."""
    pairs: list[set[str]] = []
    for kind, changes in _KINDS.items():
        for first, halfway in changes(case):
            for other_kind, second, changed in _smaller(halfway):
                if other_kind != kind and {kind, other_kind} not in pairs:
                    pairs.append({kind, other_kind})
                    yield _describe(f"{first} {second}", changed)


def _higher_utilization(case: EngineEstimate) -> Iterator[tuple[str, EngineEstimate]]:
    setup = case.setup
    if setup.kind == "vllm" and setup.cpu_kv_bytes is None:
        utilization = int(100 * MAX_UTILIZATION / setup.engines_per_device) / 100
        yield (
            f"rollout.engine_args.gpu_memory_utilization={utilization:g}",
            replace(case, setup=replace(setup, utilization=utilization)),
        )


def _smaller_batch(case: EngineEstimate) -> Iterator[tuple[str, EngineEstimate]]:
    setup = case.setup
    fitting = case.memory.sequences_full // setup.group_size * setup.group_size
    if setup.kind == "hf" and fitting:
        tokens = min(fitting * setup.prompt_tokens, setup.batched_tokens)
        changed = replace(case, setup=replace(setup, max_sequences=fitting, batched_tokens=tokens))
        yield f"rollout.engine_args.max_batch_size={fitting}", changed


def _shorter(case: EngineEstimate) -> Iterator[tuple[str, EngineEstimate]]:
    """Yield the least ``max_model_len`` that is needed, if that fits, or else the longest completions that fit."""
    setup = case.setup
    tight = replace(case, setup=replace(setup, max_model_len=setup.num_tokens))
    if setup.num_tokens < setup.max_model_len and tight.problem is None:
        yield f"rollout.max_model_len={setup.num_tokens}", tight
        return

    def cut(tokens: int) -> EngineEstimate:
        sampled = min(tokens, setup.completion_tokens)
        changed = replace(setup, completion_tokens=sampled, observed_tokens=tokens - sampled)
        return replace(case, setup=replace(changed, max_model_len=setup.prompt_tokens + tokens))

    max_new_tokens = setup.num_tokens - setup.prompt_tokens
    longest = bisect_left(range(1, max_new_tokens), True, key=lambda tokens: cut(tokens).problem is not None)
    tokens = longest // COMPLETION_STEP * COMPLETION_STEP
    if tokens and setup.num_turns > 1:
        yield f"rollout.max_model_len={setup.prompt_tokens + tokens}", cut(tokens)
    elif tokens:
        yield f"rollout.sampling.max_tokens={tokens}", cut(tokens)


def _more_devices(case: EngineEstimate) -> Iterator[tuple[str, EngineEstimate]]:
    """Yield setups with doubled GPUs per engine, up to ``MAX_DEVICES``, if their number divides the heads."""
    setup = case.setup
    if setup.kind != "vllm" or setup.cpu_kv_bytes is not None or setup.engines_per_device > 1:
        return
    count = setup.num_devices
    while (count := 2 * count) <= MAX_DEVICES:
        if case.shape.num_heads % count == 0:
            changed = replace(case, setup=replace(setup, num_devices=count))
            yield f"rollout.tensor_parallel_size={count} rollout.num_gpus={count}", changed


def _larger_device(case: EngineEstimate) -> Iterator[tuple[str, EngineEstimate]]:
    """Yield the larger devices of the table, the smallest first."""
    for device in larger_devices(case.device):
        yield f"--device {device.name}", replace(case, device=device)


_KINDS: dict[str, Callable[[EngineEstimate], Iterator[tuple[str, EngineEstimate]]]] = {
    "utilization": _higher_utilization,
    "batch": _smaller_batch,
    "length": _shorter,
    "devices": _more_devices,
    "device": _larger_device,
}
"""Changes by kind, the smallest of each kind first."""


def accelerations(case: EngineEstimate, speed: EngineSpeed) -> list[Remedy]:
    """Return the changes that sample a step's groups in less time, those that take more GPUs last."""
    tried = [(text, changed.speed.seconds) for text, changed in _faster(case, speed)]
    return [Remedy(change=text, seconds=seconds) for text, seconds in tried if seconds < 0.99 * speed.seconds]


def _faster(case: EngineEstimate, speed: EngineSpeed) -> Iterator[tuple[str, EngineEstimate]]:
    setup = case.setup
    work = setup.groups_per_engine * setup.group_size
    if speed.running == setup.max_sequences < work:
        fitting = case.memory.sequences_mean if setup.kind == "vllm" else case.memory.sequences_full
        name = "max_num_seqs" if setup.kind == "vllm" else "max_batch_size"
        changed = replace(case, setup=replace(setup, max_sequences=min(work, fitting)))
        if changed.problem is None:
            yield f"rollout.engine_args.{name}={min(work, fitting)}", changed
    if setup.groups_per_step > setup.num_engines and setup.engines_per_device == 1:
        enlarged = replace(setup, num_engines=setup.num_engines + 1)
        yield f"rollout.num_engines={setup.num_engines + 1}", replace(case, setup=enlarged)
    possible = ((text, changed) for text, changed in _more_devices(case) if changed.problem is None)
    yield from islice(possible, 1)


@dataclass(kw_only=True, slots=True, frozen=True)
class EnginePlan:
    """The plan of one engine; all engines are alike."""

    setup: EngineSetup
    kv_token_bytes: int
    """Bytes of keys and values per token, on each of its devices."""
    memory: EngineMemory
    sharing: Sharing | None
    problem: str | None
    """Why the engine does not fit; None if it does."""
    speed: EngineSpeed | None
    """Speed; None if the engine does not fit."""
    changes: Sequence[Remedy]
    """Changes with which it fits if it does not; otherwise changes that make it faster."""

    @property
    def fits(self) -> bool:
        return self.problem is None


def plan_engine(config: Config, described: PreTrainedConfig, device: Device) -> EnginePlan:
    """Plan one rollout engine of the config; ``described`` is transformers' config of its model.

    Raises ``ConfigError`` if the config has no engines, if they do not run on such a device, or if an engine argument
    is not supported by the plan, and ``ModelError`` if the model can't be described.
    """
    setup = read_engine_setup(config, described, device)
    case = EngineEstimate(setup=setup, shape=read_shape(described, config.model), described=described, device=device)
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

"""What to change in an engine's config: so that it fits, or so that it is faster."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlpipe.hardware.devices import DEVICES
from rlpipe.plan.engine_case import EngineCase
from rlpipe.plan.engine_speed import EngineSpeed

MOST_UTILIZATION = 0.95
"""Of a GPU, for vLLM: what is taken beyond its own count must find room in the rest."""
DEVICES_AT_MOST = 8
"""GPUs that an engine is proposed to be spread over."""
COMPLETION_STEP = 64
"""Tokens; shorter completions are proposed in multiples of it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Change:
    """What could be changed, and what it does."""

    change: str
    seconds: float
    """To sample a step's groups with it."""


def remedies(case: EngineCase) -> list[Change]:
    """The changes with which the engine fits, each alone."""
    found = [(text, changed) for text, changed in _smaller(case) if changed.problem is None]
    return [Change(change=text, seconds=changed.speed.seconds) for text, changed in found]


def _smaller(case: EngineCase) -> Iterator[tuple[str, EngineCase]]:
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


def _shorter(case: EngineCase) -> Iterator[tuple[str, EngineCase]]:
    """A bound of the length that is no greater than needed, or completions of the greatest length that fits."""
    setup = case.setup
    tight = replace(case, setup=replace(setup, max_model_len=setup.num_tokens))
    if setup.num_tokens < setup.max_model_len and tight.problem is None:
        yield f"rollout.max_model_len={setup.num_tokens}", tight
        return

    def cut(tokens: int) -> EngineCase:
        return replace(case, setup=replace(setup, completion_tokens=tokens, max_model_len=setup.prompt_tokens + tokens))

    longest = bisect_left(range(1, setup.completion_tokens), True, key=lambda tokens: cut(tokens).problem is not None)
    tokens = longest // COMPLETION_STEP * COMPLETION_STEP
    if tokens:
        yield f"rollout.sampling.max_tokens={tokens}", cut(tokens)


def _more_devices(case: EngineCase) -> Iterator[tuple[str, EngineCase]]:
    """The fewest GPUs that fit; they must divide the heads."""
    count = case.setup.num_devices
    while (count := 2 * count) <= DEVICES_AT_MOST:
        changed = replace(case, setup=replace(case.setup, num_devices=count))
        if case.shape.num_heads % count == 0 and changed.problem is None:
            yield f"rollout.tensor_parallel_size={count} rollout.num_gpus={count}", changed
            return


def accelerations(case: EngineCase, speed: EngineSpeed) -> list[Change]:
    """The changes that sample a step's groups in less time, those that take more GPUs behind the others."""
    tried = [Change(change=text, seconds=changed.speed.seconds) for text, changed in _faster(case, speed)]
    return [entry for entry in tried if entry.seconds < 0.99 * speed.seconds]


def _faster(case: EngineCase, speed: EngineSpeed) -> Iterator[tuple[str, EngineCase]]:
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

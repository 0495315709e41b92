"""Proposed changes of an engine's config with which it fits, or is faster."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from rlpipe.hardware.devices import DEVICES
from rlpipe.plan.engine_case import EngineCase
from rlpipe.plan.engine_speed import EngineSpeed

MOST_UTILIZATION = 0.95
"""Largest ``gpu_memory_utilization`` proposed; memory that vLLM does not count must fit in the rest."""
DEVICES_AT_MOST = 8
"""Most GPUs per engine that are proposed."""
COMPLETION_STEP = 64
"""Tokens; proposed completion lengths are multiples of it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Change:
    """A config change, and its effect."""

    change: str
    seconds: float
    """Seconds to sample a step's groups with the change."""


def remedies(case: EngineCase) -> list[Change]:
    """Return the single changes with which the engine fits; if there are none, the pairs of changes."""
    alone = [_describe(text, changed) for _, text, changed in _smaller(case)]
    return alone or list(_pairs(case))


def _describe(text: str, case: EngineCase) -> Change:
    return Change(change=text, seconds=case.speed.seconds)


def _smaller(case: EngineCase) -> Iterator[tuple[str, str, EngineCase]]:
    """Yield the smallest change of each kind with which the engine fits, with the kind's name."""
    for kind, changes in _KINDS.items():
        for text, changed in changes(case):
            if changed.problem is None:
                yield kind, text, changed
                break


def _pairs(case: EngineCase) -> Iterator[Change]:
    """Yield for each two kinds the smallest change of one that fits with the smallest of the other."""
    found: list[set[str]] = []
    for kind, changes in _KINDS.items():
        for first, halfway in changes(case):
            for other, second, changed in _smaller(halfway):
                if other != kind and {kind, other} not in found:
                    found.append({kind, other})
                    yield _describe(f"{first} {second}", changed)


def _more_of_the_gpu(case: EngineCase) -> Iterator[tuple[str, EngineCase]]:
    setup = case.setup
    if setup.kind == "vllm" and setup.cpu_kv_bytes is None:
        share = int(100 * MOST_UTILIZATION / setup.engines_per_device) / 100
        yield (
            f"rollout.engine_args.gpu_memory_utilization={share:g}",
            replace(case, setup=replace(setup, utilization=share)),
        )


def _smaller_batch(case: EngineCase) -> Iterator[tuple[str, EngineCase]]:
    setup = case.setup
    room = case.memory.sequences_full // setup.group_size * setup.group_size
    if setup.kind == "hf" and room:
        tokens = min(room * setup.prompt_tokens, setup.batched_tokens)
        changed = replace(case, setup=replace(setup, max_sequences=room, batched_tokens=tokens))
        yield f"rollout.engine_args.max_batch_size={room}", changed


def _shorter(case: EngineCase) -> Iterator[tuple[str, EngineCase]]:
    """Yield the least ``max_model_len`` that is needed, if that fits, or else the longest completions that fit."""
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
    """Yield setups with doubled GPUs per engine, up to ``DEVICES_AT_MOST``, if their number divides the heads."""
    setup = case.setup
    if setup.kind != "vllm" or setup.cpu_kv_bytes is not None or setup.engines_per_device > 1:
        return
    count = setup.num_devices
    while (count := 2 * count) <= DEVICES_AT_MOST:
        if case.shape.num_heads % count == 0:
            changed = replace(case, setup=replace(setup, num_devices=count))
            yield f"rollout.tensor_parallel_size={count} rollout.num_gpus={count}", changed


def _larger_device(case: EngineCase) -> Iterator[tuple[str, EngineCase]]:
    """Yield the larger devices of the table, the smallest first."""
    if case.device.kind == "cuda":
        for device in reversed(DEVICES.values()):
            if device.memory_bytes > 1.1 * case.device.memory_bytes:
                yield f"--device {device.name}", replace(case, device=device)


_KINDS: dict[str, Callable[[EngineCase], Iterator[tuple[str, EngineCase]]]] = {
    "utilization": _more_of_the_gpu,
    "batch": _smaller_batch,
    "length": _shorter,
    "devices": _more_devices,
    "device": _larger_device,
}
"""Changes by kind, the smallest of each kind first."""


def accelerations(case: EngineCase, speed: EngineSpeed) -> list[Change]:
    """Return the changes that sample a step's groups in less time, those that take more GPUs last."""
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
    fitting = ((text, changed) for text, changed in _more_devices(case) if changed.problem is None)
    yield from islice(fitting, 1)

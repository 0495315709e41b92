"""The kinds of actors that a run starts, and which of them may share a GPU or a machine.

Ray counts the GPUs that actors ask for, not the memory that they take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device import Device
from rlpipe.plan.engine_plan import EnginePlan
from rlpipe.plan.learner_memory import CUDA_CONTEXT_BYTES, LearnerMemory, MemoryBudget


@dataclass(kw_only=True, slots=True, frozen=True)
class ActorKind:
    """Identical actors of a run."""

    name: str
    """Name of one actor."""
    count: int
    num_gpus: float
    """GPUs that one actor asks for."""
    gpu_bytes: int
    """Bytes on each of its GPUs."""
    host_bytes: int

    def describe(self, count: int) -> str:
        return f"{count} {self.name}{'s' if count > 1 else ''}"


Placed = tuple[ActorKind, int]
"""A kind of actor, and how many of them there are."""


def engine_kind(config: Config, plan: EnginePlan) -> ActorKind:
    return ActorKind(
        name="rollout engine",
        count=config.rollout.num_engines,
        num_gpus=config.rollout.num_gpus,
        gpu_bytes=plan.memory.budget_bytes,
        host_bytes=plan.memory.host_bytes * plan.setup.num_devices,  # vLLM has a process for each device
    )


def rank_kind(config: Config, memory: LearnerMemory | None, budget: MemoryBudget, device: Device) -> ActorKind:
    """Return the learner's ranks; if ``memory`` is None (nothing fits), with all the memory that they may take."""
    device_bytes = budget.device_bytes if memory is None else memory.device.total
    host_bytes = budget.host_bytes if memory is None else memory.host.total
    if device.kind == "cpu" and memory is not None:  # loaded weights stay where they are, or move into chunks
        loaded_bytes = replace(memory.host, loading=0).total + device_bytes
        host_bytes = max(loaded_bytes, memory.host.process + memory.host.loading)
    return ActorKind(
        name="learner rank",
        count=config.learner.num_ranks,
        num_gpus=config.learner.num_gpus,
        gpu_bytes=0 if device.kind == "cpu" else device_bytes + CUDA_CONTEXT_BYTES,
        host_bytes=host_bytes,
    )


def fill(kinds: Iterable[ActorKind], num_gpus: float, size: Callable[[ActorKind], int]) -> list[Placed]:
    """Return the actors that may be together on ``num_gpus``, in the order of ``kinds``.

    Those with the largest ``size`` per GPU are placed first, and all that ask for no GPU are included.
    """
    counts: dict[int, int] = {}
    ordered = [*kinds]
    for index in sorted(range(len(ordered)), key=lambda index: _priority(ordered[index], size)):
        kind = ordered[index]
        counts[index] = min(kind.count, int(num_gpus / kind.num_gpus + 1e-9)) if kind.num_gpus else kind.count
        num_gpus -= counts[index] * kind.num_gpus
    return [(kind, counts[index]) for index, kind in enumerate(ordered) if counts[index]]


def _priority(kind: ActorKind, size: Callable[[ActorKind], int]) -> float:
    return -size(kind) / kind.num_gpus if kind.num_gpus else -math.inf

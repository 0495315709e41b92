"""The kinds of actors that a run starts, and which of them may come to share a GPU or a machine.

Ray counts the GPUs that they ask for, not what they take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device import Device
from rlpipe.plan.engine_plan import EnginePlan
from rlpipe.plan.learner_memory import LearnerMemory
from rlpipe.plan.learner_room import BESIDE_TORCH_BYTES, Room


@dataclass(kw_only=True, slots=True, frozen=True)
class ActorKind:
    """Actors that are alike."""

    name: str
    """Of one."""
    count: int
    num_gpus: float
    """That one asks for."""
    gpu_bytes: int
    """On each of its GPUs."""
    host_bytes: int

    def describe(self, count: int) -> str:
        return f"{count} {self.name}{'s' if count > 1 else ''}"


Placed = tuple[ActorKind, int]
"""So many of a kind."""


def engine_kind(config: Config, plan: EnginePlan) -> ActorKind:
    return ActorKind(
        name="rollout engine",
        count=config.rollout.num_engines,
        num_gpus=config.rollout.num_gpus,
        gpu_bytes=plan.memory.budget_bytes,
        host_bytes=plan.memory.host_bytes * plan.setup.num_devices,  # vLLM has a process for each
    )


def rank_kind(config: Config, memory: LearnerMemory | None, room: Room, device: Device) -> ActorKind:
    """Ranks for which no way to offload fits, with all that they may take."""
    on_device = room.device_bytes if memory is None else memory.device.total
    on_host = room.host_bytes if memory is None else memory.host.total
    if device.kind == "cpu" and memory is not None:  # weights that are loaded stay where they are, or go to chunks
        held = replace(memory.host, loading=0).total + on_device
        on_host = max(held, memory.host.process + memory.host.loading)
    return ActorKind(
        name="learner rank",
        count=config.learner.num_ranks,
        num_gpus=config.learner.num_gpus,
        gpu_bytes=0 if device.kind == "cpu" else on_device + BESIDE_TORCH_BYTES,
        host_bytes=on_host,
    )


def fill(kinds: Iterable[ActorKind], num_gpus: float, size: Callable[[ActorKind], int]) -> list[Placed]:
    """Those that may be together on so many GPUs, where the largest for what they ask for come first; and all that ask
    for none. In the order of ``kinds``."""
    counts: dict[int, int] = {}
    ordered = [*kinds]
    for index in sorted(range(len(ordered)), key=lambda index: _rank(ordered[index], size)):
        kind = ordered[index]
        counts[index] = min(kind.count, int(num_gpus / kind.num_gpus + 1e-9)) if kind.num_gpus else kind.count
        num_gpus -= counts[index] * kind.num_gpus
    return [(kind, counts[index]) for index, kind in enumerate(ordered) if counts[index]]


def _rank(kind: ActorKind, size: Callable[[ActorKind], int]) -> float:
    return -size(kind) / kind.num_gpus if kind.num_gpus else -math.inf

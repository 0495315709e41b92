"""The kinds of actors that a run starts, and which of them may come to share a GPU or a machine.

Ray counts the GPUs that they ask for, not what they take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rlpipe.configs.schema import Config
from rlpipe.hardware.device import Device
from rlpipe.plan.engine import EnginePlan
from rlpipe.plan.learner import LearnerPlan
from rlpipe.plan.learner_room import BESIDE_TORCH_BYTES


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


def rank_kind(config: Config, plan: LearnerPlan, device: Device) -> ActorKind:
    """Of ranks for which nothing fits, with all that they may take."""
    memory, room = plan.memory, plan.room
    on_device = room.device_bytes if memory is None else memory.device.total
    on_host = room.host_bytes if memory is None else memory.host.total
    is_cpu = device.kind == "cpu"
    return ActorKind(
        name="learner rank",
        count=config.learner.num_ranks,
        num_gpus=config.learner.num_gpus,
        gpu_bytes=0 if is_cpu else on_device + BESIDE_TORCH_BYTES,
        host_bytes=on_host + on_device * is_cpu,
    )


def fill(kinds: Iterable[ActorKind], num_gpus: float, size: Callable[[ActorKind], int]) -> list[Placed]:
    """Those that may be together on so many GPUs, where the largest for what they ask for come first; and all that ask
    for none."""
    placed: list[Placed] = []
    for kind in sorted(kinds, key=lambda kind: -size(kind) / kind.num_gpus if kind.num_gpus else -math.inf):
        count = min(kind.count, int(num_gpus / kind.num_gpus + 1e-9)) if kind.num_gpus else kind.count
        num_gpus -= count * kind.num_gpus
        if count:
            placed.append((kind, count))
    return placed

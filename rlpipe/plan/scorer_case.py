"""A scorer on a device: the memory of one process, its speed, and why it may not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from rlpipe.common.formatting import gib
from rlpipe.hardware.device import Device
from rlpipe.offload.api import SHARE_USED
from rlpipe.plan.actors import ActorKind, Placed, fill
from rlpipe.plan.learner_room import BESIDE_TORCH_BYTES, CPU_HOST_BYTES, HOST_BYTES
from rlpipe.plan.scorer_model import ScorerModel
from rlpipe.plan.scorer_setup import ScorerSetup


@dataclass(kw_only=True, slots=True, frozen=True)
class ScorerMemory:
    """Bytes of one process, on the device that it computes on."""

    weights: int
    activations: int
    """Activations of a full pass, without gradients."""
    starting: int
    """Weights at the start, before the unused ones are dropped."""
    beside: int
    """CUDA's memory outside torch."""
    process: int
    """Host bytes of the process itself."""
    loading: int
    """Host bytes of the model while it is loaded, if its files have another dtype."""

    @property
    def total(self) -> int:
        return max(self.starting, self.weights + self.activations) + self.beside


@dataclass(kw_only=True, frozen=True)
class ScorerCase:
    """A setup on a device; proposed changes are tried on modified copies.

    Properties raise ``ModelError`` for models that can't be traced.
    """

    setup: ScorerSetup
    model: ScorerModel
    device: Device
    beside: Sequence[ActorKind]
    """All other actors that may ask for GPUs."""

    @property
    def is_on_gpu(self) -> bool:
        return self.setup.num_gpus > 0

    @cached_property
    def memory(self) -> ScorerMemory:
        cost = self.model.cost(self.setup.batch, self.setup.sequence_tokens, self.device)
        return ScorerMemory(
            weights=self.model.weights_bytes,
            activations=cost.peak_bytes,
            starting=self.model.starting_bytes,
            beside=BESIDE_TORCH_BYTES if self.is_on_gpu else 0,
            process=HOST_BYTES if self.is_on_gpu else CPU_HOST_BYTES,
            loading=0 if self.model.is_mapped else self.model.starting_bytes,
        )

    @property
    def host_bytes(self) -> int:
        memory = self.memory
        if self.is_on_gpu:
            return memory.process + memory.loading
        return memory.process + max(memory.loading, memory.total)

    @property
    def actor(self) -> ActorKind:
        return ActorKind(
            name=f"{self.setup.name} scorer",
            count=self.setup.copies,
            num_gpus=self.setup.num_gpus,
            gpu_bytes=self.memory.total if self.is_on_gpu else 0,
            host_bytes=self.host_bytes,
        )

    @cached_property
    def neighbours(self) -> list[Placed]:
        """Actors that may share its GPU, chosen to leave the least memory."""
        own = self.actor
        kinds = [replace(own, count=own.count - 1), *self.beside]
        return fill([kind for kind in kinds if 0 < kind.num_gpus < 1], 1 - own.num_gpus, lambda kind: kind.gpu_bytes)

    @property
    def room_bytes(self) -> int:
        if not self.is_on_gpu:
            return int(SHARE_USED * self.device.host_memory_bytes)
        taken = sum(count * kind.gpu_bytes for kind, count in self.neighbours)
        return int(SHARE_USED * max(0, self.device.memory_bytes - taken))

    @property
    def problem(self) -> str | None:
        """Why a process does not fit; None if it does."""
        needed = self.memory.total if self.is_on_gpu else self.host_bytes
        if needed <= self.room_bytes:
            return None
        if not self.is_on_gpu:
            return f"a process needs {gib(needed)}, and may take {gib(self.room_bytes)} of the host's memory"
        return f"a process needs {gib(needed)}, and may take {gib(self.room_bytes)} of its device" + (
            describe_neighbours(self.neighbours)
        )

    @property
    def seconds(self) -> float | None:
        """Seconds for a step's sequences; processes on one device run in turns. None on a host beside GPUs."""
        if not self.is_on_gpu and self.device.kind == "cuda":
            return None
        cost = self.model.cost(self.setup.batch, self.setup.sequence_tokens, self.device)
        return self.setup.num_passes * cost.seconds * self.setup.copies_per_gpu


def describe_neighbours(neighbours: Sequence[Placed]) -> str:
    shown = " and ".join(kind.describe(count) for kind, count in neighbours)
    return f" beside {shown}" if shown else ""

"""The plan of the scorers that run a model, and the changes that make them fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from transformers import PreTrainedConfig

from rlpipe.common.formatting import gib
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ModelError
from rlpipe.hardware.device import Device
from rlpipe.hardware.device_profiles import larger_devices
from rlpipe.learner.workload import reads_features, sequence_tokens
from rlpipe.offload.api import SHARE_USED
from rlpipe.plan.actors import ActorKind, Placed, fill
from rlpipe.plan.learner_memory import CPU_HOST_BYTES, CUDA_CONTEXT_BYTES, HOST_BYTES
from rlpipe.plan.remedy import Remedy
from rlpipe.plan.scorer_model import ScorerModel, ScorerSetup, has_model, meta_scorer, read_scorer_setups
from rlpipe.scoring.pools import RewardPool, resolve_pools


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
class ScorerEstimate:
    """A setup on a device; proposed changes are tried on modified copies.

    Properties raise ``ModelError`` for models that can't be traced.
    """

    setup: ScorerSetup
    model: ScorerModel
    device: Device
    others: Sequence[ActorKind]
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
            beside=CUDA_CONTEXT_BYTES if self.is_on_gpu else 0,
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
        actor = self.actor
        kinds = [replace(actor, count=actor.count - 1), *self.others]
        return fill([kind for kind in kinds if 0 < kind.num_gpus < 1], 1 - actor.num_gpus, lambda kind: kind.gpu_bytes)

    @property
    def room_bytes(self) -> int:
        if not self.is_on_gpu:
            return int(SHARE_USED * self.device.host_memory_bytes)
        used = sum(count * kind.gpu_bytes for kind, count in self.neighbours)
        return int(SHARE_USED * max(0, self.device.memory_bytes - used))

    @property
    def problem(self) -> str | None:
        """Why a process does not fit; None if it does."""
        needed = self.memory.total if self.is_on_gpu else self.host_bytes
        if needed <= self.room_bytes:
            return None
        if not self.is_on_gpu:
            return f"a process needs {gib(needed)}, and may use {gib(self.room_bytes)} of the host's memory"
        return f"a process needs {gib(needed)}, and may use {gib(self.room_bytes)} of its device" + (
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
    return f" next to {shown}" if shown else ""


def remedies(case: ScorerEstimate) -> list[Remedy]:
    """Return the single changes with which the scorer fits."""
    return [
        Remedy(change=text, seconds=changed.seconds, num_bytes=changed.memory.total)
        for text, changed in (*_smaller_batch(case), *_whole_gpu(case), *_larger_device(case))
        if changed.problem is None
    ]


def _smaller_batch(case: ScorerEstimate) -> Iterator[tuple[str, ScorerEstimate]]:
    """Yield the largest batch that fits, by halving, if a single sequence fits."""
    tokens, min_tokens = case.setup.batch_tokens, case.setup.sequence_tokens
    if replace(case, setup=replace(case.setup, batch_tokens=min_tokens)).problem is not None:
        return
    while tokens > min_tokens:
        tokens = max(min_tokens, tokens // 2)
        changed = replace(case, setup=replace(case.setup, batch_tokens=tokens))
        if changed.problem is None:
            yield f"{case.setup.batch_option}={tokens}", changed
            return


def _whole_gpu(case: ScorerEstimate) -> Iterator[tuple[str, ScorerEstimate]]:
    if 0 < case.setup.num_gpus < 1:
        yield f"{case.setup.option}.num_gpus=1", replace(case, setup=replace(case.setup, num_gpus=1))


def _larger_device(case: ScorerEstimate) -> Iterator[tuple[str, ScorerEstimate]]:
    """Yield the smallest device that is large enough; nothing with neighbours, whose memory there is not known."""
    if case.neighbours or not case.is_on_gpu:
        return
    for device in larger_devices(case.device):
        changed = replace(case, device=device)
        if changed.problem is None:
            yield f"--device {device.name}", changed
            return


@dataclass(kw_only=True, slots=True, frozen=True)
class ScorerPlan:
    """The plan of one process of a scorer; all its processes are alike."""

    setup: ScorerSetup
    model: str
    kind: str
    """Class of the reward, or the feature network."""
    dtype: str
    memory: ScorerMemory
    actor: ActorKind
    neighbours: Sequence[Placed]
    """Actors that may be on its GPU with it."""
    room_bytes: int
    """Bytes that it may take."""
    problem: str | None
    """Why it does not fit; None if it does."""
    seconds: float | None
    """Seconds for a step's sequences on all processes; None if it does not fit, or computes on a host beside GPUs."""
    note: str | None
    changes: Sequence[Remedy]
    """Changes with which it fits; empty if it fits."""

    @property
    def name(self) -> str:
        return self.setup.name

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def may_share(self) -> bool:
        """Whether other processes may take turns with it, on a part of a GPU or on the CPU."""
        return self.setup.num_gpus < 1


@dataclass(kw_only=True, slots=True, frozen=True)
class UnplannedScorer:
    """A scorer that can't be planned, with the reason."""

    name: str
    reason: str


def plan_scorers(
    config: Config, described: PreTrainedConfig, device: Device, others: Sequence[ActorKind]
) -> list[ScorerPlan | UnplannedScorer]:
    """Plan the scorers that run a model.

    ``described`` is transformers' config of the policy, ``others`` are the actors that are no scorers. Raises
    ``ConfigError`` for scorers that do not run on such a device, or that can't be made.
    """
    plans: list[ScorerPlan | UnplannedScorer] = [*_unknown(config)]
    cases: list[ScorerEstimate] = []
    actors: list[ActorKind] = []
    for setup in read_scorer_setups(config, device):
        try:
            model = meta_scorer(setup, config, described)
            case = ScorerEstimate(setup=setup, model=model, device=device, others=others)
            actors.append(case.actor)  # traces the model
        except ModelError as error:
            plans.append(UnplannedScorer(name=setup.name, reason=f"not planned: {error}"))
        else:
            cases.append(case)
    for index, case in enumerate(cases):
        other_actors = [*others, *actors[:index], *actors[index + 1 :]]
        plans.append(_plan(replace(case, others=other_actors), sequence_tokens(config)))
    return plans


def _plan(case: ScorerEstimate, full_tokens: int) -> ScorerPlan:
    setup, problem = case.setup, case.problem
    note = None
    if setup.sequence_tokens < full_tokens:
        note = f"sequences of full length have {full_tokens:,} tokens, more than max_tokens: their groups fail"
    return ScorerPlan(
        setup=setup,
        model=case.model.path,
        kind=type(setup.reward).__name__ if setup.reward is not None else "feature network",
        dtype=case.model.dtype,
        memory=case.memory,
        actor=case.actor,
        neighbours=case.neighbours,
        room_bytes=case.room_bytes,
        problem=problem,
        seconds=case.seconds if problem is None else None,
        note=note,
        changes=[] if problem is None else remedies(case),
    )


def _unknown(config: Config) -> Iterator[UnplannedScorer]:
    if config.algorithm.kind == "rl" and reads_features(config.algorithm):
        yield UnplannedScorer(name="features", reason="computed by the learner's ranks, as part of the learner's time")
    for pool in resolve_pools(config).values():
        name, reward = next(iter(pool.members.items()))
        if reward.num_gpus > 0 and not has_model(pool.members):
            yield UnplannedScorer(name=name, reason=_describe_unknown(pool, reward))


def _describe_unknown(pool: RewardPool, reward: RewardConfig) -> str:
    processes = f"{pool.max_size} processes, each requesting" if pool.max_size > 1 else "1 process, requesting"
    return f"{processes} {reward.num_gpus:g} of a GPU; the memory of {reward.path} is not known"

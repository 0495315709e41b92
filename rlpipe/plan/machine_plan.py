"""The host memory of a machine, and whether the actors that may be placed on it fit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rlpipe.common.formatting import GIB, gib
from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device import Device
from rlpipe.offload.planner.profiler import DEVICES_PER_MACHINE
from rlpipe.plan.actors import ActorKind, Placed, fill, rank_kind
from rlpipe.plan.engine_memory import ELEMENT_BYTES
from rlpipe.plan.learner_estimate import LearnerEstimate
from rlpipe.plan.learner_plan import MAX_DOUBLED, with_options
from rlpipe.plan.scorer_plan import ScorerPlan
from rlpipe.scoring.pools import resolve_pools

RUN_BYTES = 3 * 2**30
"""Bytes of the driver, of the actors for replay and weights, and of Ray; an assumption."""
REWARD_BYTES = 2**30
"""Bytes of a process with reward functions: Python, the tokenizer, torch; an assumption.

The functions' own memory comes on top, and is limited by ``scoring.memory_gb``.
"""


@dataclass(kw_only=True, slots=True, frozen=True)
class MachinePlan:
    """The plan of the machine with the most to hold."""

    num_machines: int
    placed: Sequence[Placed]
    num_bytes: int
    problem: str | None
    """Why the actors do not fit; None if they do."""
    changes: Sequence[str]
    """Changes with which they fit; empty if they fit."""

    @property
    def fits(self) -> bool:
        return self.problem is None


@dataclass(kw_only=True, slots=True, frozen=True)
class MachineEstimate:
    """The kinds of actors of a run, on identical machines; proposed changes are tried on modified copies."""

    kinds: Sequence[ActorKind]
    device: Device
    gpus_per_machine: float = DEVICES_PER_MACHINE

    @property
    def num_gpus(self) -> float:
        return sum(kind.count * kind.num_gpus for kind in self.kinds)

    @property
    def num_machines(self) -> int:
        return max(1, math.ceil(self.num_gpus / self.gpus_per_machine - 1e-9))

    @property
    def placed(self) -> list[Placed]:
        """Actors on the fullest machine, which has all actors that ask for no GPU."""
        return fill(self.kinds, self.gpus_per_machine, lambda kind: kind.host_bytes)

    @property
    def num_bytes(self) -> int:
        return sum(count * kind.host_bytes for kind, count in self.placed)

    @property
    def fits(self) -> bool:
        return self.num_bytes <= self.device.host_memory_bytes

    def changed(self, kind: ActorKind, other: ActorKind) -> MachineEstimate:
        """Return a copy with ``other`` in place of ``kind``."""
        return replace(self, kinds=[other if entry is kind else entry for entry in self.kinds])


def plan_machine(
    learner: LearnerEstimate, engine: ActorKind | None, scorers: Sequence[ScorerPlan], device: Device
) -> MachinePlan:
    """Plan the host memory of the actors of ``learner``'s config, including that of Ray and the driver."""
    ranks = rank_kind(learner.config, learner.memory, learner.budget, device)
    engines = [] if engine is None else [engine]
    scorer_actors = [scorer.actor for scorer in scorers]
    rewards = _reward_kinds(learner.config, scorers)
    kinds = [*engines, ranks, *scorer_actors, *rewards, *_version_kinds(learner), _run_kind()]
    case = MachineEstimate(kinds=kinds, device=device)
    return MachinePlan(
        num_machines=case.num_machines,
        placed=case.placed,
        num_bytes=case.num_bytes,
        problem=None if case.fits else _describe(case),
        changes=[] if case.fits else [*_remedies(case, learner, ranks, engine)],
    )


def _describe(case: MachineEstimate) -> str:
    assumed = " (an assumption; set --host-memory-gib)" if case.device.measured_at is None else ""
    return f"the actors need {gib(case.num_bytes)}, and the machine has {gib(case.device.host_memory_bytes)}{assumed}"


def _run_kind() -> ActorKind:
    return ActorKind(name="driver with Ray", count=1, num_gpus=0, gpu_bytes=0, host_bytes=RUN_BYTES)


def _version_kinds(learner: LearnerEstimate) -> Iterator[ActorKind]:
    """Yield the whole models in Ray's object store, on rank 0's machine: the last one, and the next as it is added."""
    engines = learner.engines
    if engines is not None and engines.serving.kind == "full" and learner.config.weights.transport == "object_store":
        num_bytes = learner.policy.num_parameters * ELEMENT_BYTES[engines.dtype]
        yield ActorKind(name="published version", count=2, num_gpus=0, gpu_bytes=0, host_bytes=num_bytes)


def _reward_kinds(config: Config, planned: Sequence[ScorerPlan]) -> Iterator[ActorKind]:
    """Yield processes of reward functions, and of rewards that are not planned separately."""
    planned_names = {scorer.name for scorer in planned}
    for pool in resolve_pools(config).values():
        if pool.name not in planned_names and not planned_names & {*pool.members}:
            yield ActorKind(
                name="reward worker", count=pool.max_size, num_gpus=pool.num_gpus, gpu_bytes=0, host_bytes=REWARD_BYTES
            )


def _remedies(
    case: MachineEstimate, learner: LearnerEstimate, ranks: ActorKind, engine: ActorKind | None
) -> Iterator[str]:
    """Yield the changes with which the actors fit, each alone."""
    if engine is not None:
        yield from _fewer_engines(case, engine)
    if learner.config.learner.offload == "chunked":
        yield from _less_for_chunks(case, learner, ranks)
    else:
        yield from _more_memory(case)
    yield from _more_machines(case)


def _fewer_engines(case: MachineEstimate, engine: ActorKind) -> Iterator[str]:
    for count in range(engine.count - 1, 0, -1):
        if case.changed(engine, replace(engine, count=count)).fits:
            yield f"rollout.num_engines={count}"
            return


def _less_for_chunks(case: MachineEstimate, learner: LearnerEstimate, ranks: ActorKind) -> Iterator[str]:
    """Yield the limit that the other actors leave; ranks choose chunks as if the whole machine was theirs."""
    num_ranks = sum(count for kind, count in case.placed if kind is ranks)
    memory = learner.memory
    if memory is None or not num_ranks:
        return
    remaining = case.device.host_memory_bytes - case.num_bytes + num_ranks * ranks.host_bytes
    gibs = (remaining // num_ranks - memory.host.process) // GIB
    if gibs <= 0:
        return
    limited = with_options(learner.config, {"learner.chunked.host_memory_gib": float(gibs)})
    changed = replace(learner, config=limited)
    if changed.problem is None:
        fewer = rank_kind(limited, changed.memory, changed.budget, case.device)
        if case.changed(ranks, fewer).fits:
            yield f"learner.chunked.host_memory_gib={gibs}"


def _more_memory(case: MachineEstimate) -> Iterator[str]:
    """Yield the least host memory that is enough, in doublings; not for chunks, which would use more of it."""
    for doubled in range(1, MAX_DOUBLED + 1):
        larger = replace(case.device, host_memory_bytes=case.device.host_memory_bytes * 2**doubled)
        if replace(case, device=larger).fits:
            yield f"--host-memory-gib {larger.host_memory_bytes / GIB:g}"
            return


def _more_machines(case: MachineEstimate) -> Iterator[str]:
    """Yield the largest number of GPUs per machine that fits, below the present one."""
    max_gpus = min(DEVICES_PER_MACHINE, math.ceil(case.num_gpus)) - 1
    for count in range(max_gpus, 0, -1):
        changed = replace(case, gpus_per_machine=count)
        if changed.fits:
            yield f"machines with {count} of these GPUs each"
            return

"""The plan of a config's scorers: memory of a process, time of a step, and proposed changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from transformers import PreTrainedConfig

from rlpipe.configs.schema.root_config import Config
from rlpipe.configs.schema.scoring_config import RewardConfig
from rlpipe.errors import ModelError
from rlpipe.hardware.device import Device
from rlpipe.learner.workload import reads_features, sequence_tokens
from rlpipe.plan.actors import ActorKind, Placed
from rlpipe.plan.scorer_case import ScorerCase, ScorerMemory
from rlpipe.plan.scorer_changes import ScorerChange, remedies
from rlpipe.plan.scorer_model import outline_scorer
from rlpipe.plan.scorer_setup import ScorerSetup, has_model, read_scorer_setups
from rlpipe.scoring.pools import RewardPool, resolve_pools


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
    changes: Sequence[ScorerChange]
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
    config: Config, described: PreTrainedConfig, device: Device, beside: Sequence[ActorKind]
) -> list[ScorerPlan | UnplannedScorer]:
    """Plan the scorers that run a model.

    ``described`` is transformers' config of the policy, ``beside`` are the actors that are no scorers. Raises
    ``ConfigError`` for scorers that do not run on such a device, or that can't be made.
    """
    found: list[ScorerPlan | UnplannedScorer] = [*_unknown(config)]
    cases: list[ScorerCase] = []
    actors: list[ActorKind] = []
    for setup in read_scorer_setups(config, device):
        try:
            model = outline_scorer(setup, config, described)
            case = ScorerCase(setup=setup, model=model, device=device, beside=beside)
            actors.append(case.actor)  # traces the model
        except ModelError as error:
            found.append(UnplannedScorer(name=setup.name, reason=f"not planned: {error}"))
        else:
            cases.append(case)
    for index, case in enumerate(cases):
        others = [*beside, *actors[:index], *actors[index + 1 :]]
        found.append(_plan(replace(case, beside=others), sequence_tokens(config)))
    return found


def _plan(case: ScorerCase, full_tokens: int) -> ScorerPlan:
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
        yield UnplannedScorer(name="features", reason="the learner's ranks read them, in the learner's time")
    for pool in resolve_pools(config).values():
        name, reward = next(iter(pool.members.items()))
        if reward.num_gpus > 0 and not has_model(pool.members):
            yield UnplannedScorer(name=name, reason=_describe_unknown(pool, reward))


def _describe_unknown(pool: RewardPool, reward: RewardConfig) -> str:
    asks = f"{pool.max_size} processes, each asking for" if pool.max_size > 1 else "1 process, asking for"
    return f"{asks} {reward.num_gpus:g} of a GPU; what {reward.path} loads is not known"

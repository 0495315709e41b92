"""The plan of a config's learner: memory of a rank, time of a step, and proposed changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device import Device
from rlpipe.offload.planner.planner import AMORTISING_SEQUENCES
from rlpipe.plan.engine_setup import EngineSetup
from rlpipe.plan.learner_case import Drafts, LearnerCase
from rlpipe.plan.learner_changes import LearnerChange, remedies
from rlpipe.plan.learner_memory import LearnerMemory
from rlpipe.plan.learner_room import Room
from rlpipe.plan.learner_time import StepTime
from rlpipe.plan.learner_work import Work


@dataclass(kw_only=True, slots=True, frozen=True)
class LearnerPlan:
    """The plan of one rank; all ranks are alike."""

    strategy: str
    offload: str
    num_ranks: int
    num_parameters: int
    """Number of parameters, including the adapter."""
    num_trained: int
    room: Room
    memory: LearnerMemory | None
    """Memory of a rank; None if no offload schedule fits."""
    decision: str | None
    """Decision of chunked offload, as the learner will log it."""
    problem: str | None
    """Why a rank does not fit; None if it does."""
    work: Work
    time: StepTime | None
    """Time of a step; None if a rank does not fit."""
    changes: Sequence[LearnerChange]
    """Changes with which it fits; empty if it fits."""

    @property
    def fits(self) -> bool:
        return self.problem is None

    @property
    def tokens_per_s(self) -> float:
        """Trained tokens per second of all ranks."""
        return self.work.step_tokens / self.time.seconds if self.time is not None else 0.0

    @property
    def notes(self) -> list[str]:
        if self.work.update_sequences >= AMORTISING_SEQUENCES:
            return []
        return [
            f"an update has {self.work.update_sequences:g} sequences: what it costs whatever is trained, such as the "
            f"optimizer, is spread over few; {AMORTISING_SEQUENCES} or more are better"
        ]


def plan_learner(
    config: Config, described: PreTrainedConfig, device: Device, engines: EngineSetup | None = None
) -> LearnerPlan:
    """Plan one rank of the config's learner.

    ``described`` is transformers' config of its model, ``engines`` the setup of engines that may be on the same GPUs.
    Raises ``ConfigError`` if the learner does not run on such a device or if its options are impossible, and
    ``ModelError`` if the model can't be outlined or traced.
    """
    return plan_case(LearnerCase(config=config, drafts=Drafts(described, device), engines=engines))


def plan_case(case: LearnerCase) -> LearnerPlan:
    """Plan the learner of a case; raises as ``plan_learner`` does."""
    problem, learner = case.problem, case.config.learner
    return LearnerPlan(
        strategy=learner.strategy,
        offload=learner.offload,
        num_ranks=learner.num_ranks,
        num_parameters=case.outline.num_parameters,
        num_trained=case.outline.num_trained,
        room=case.room,
        memory=case.memory,
        decision=case.description,
        problem=problem,
        work=case.work,
        time=case.time if problem is None else None,
        changes=[] if problem is None else remedies(case),
    )

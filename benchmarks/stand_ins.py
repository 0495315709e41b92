"""The whole orchestration, with stand-ins for engines, rewards, prompts and the learner.

Everything between them is real: admission, routing, the object store, scoring pools, the replay actor with its ledger
and packing, versions through the weights actor, and the controller.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.actor import ActorHandle

from rlpipe.actors.replay import ReplayActor, ReplaySetup
from rlpipe.actors.reward import ScoringActor
from rlpipe.actors.rollout import RolloutActor
from rlpipe.actors.weights import WeightsActor
from rlpipe.common import run_files
from rlpipe.configs.options import to_tree
from rlpipe.configs.schema.data_config import HeldOutConfig
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.sources.row_source import Cursor, SkipRecord
from rlpipe.replay.ledger.restore import RunStart
from rlpipe.replay.step_queue import StepReport
from rlpipe.rollout.engine import Engine
from rlpipe.rollout.engine_thread import EngineThread
from rlpipe.run.cluster import ASYNC_CALLS, ENGINE_CALLS, ResourceRequest, start_actor
from rlpipe.run.controller import Controller
from rlpipe.run.evaluation import Evaluator
from rlpipe.run.scoring_pools import ScorerPool
from rlpipe.run.workers import Workers
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import (
    NO_VERSION,
    Buckets,
    EngineHealth,
    GroupRequest,
    Prompt,
    Rollout,
    RolloutGroup,
    WeightsKind,
    WeightsManifest,
)

PROMPT_TOKENS, COMPLETION_TOKENS = 20, 80
DIGEST = "same"
REWARDS = {"instant": RewardConfig(path="instant")}
TIMEOUT_S = 60.0


class StandInEngine(ABC):
    """An engine that answers with 100-token rollouts of its current version; subclasses decide when."""

    def __init__(self, name: str) -> None:
        self._name, self._version = name, 0
        self._requests: list[GroupRequest] = []

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self._requests.extend(requests)

    def cancel(self, group_ids: Collection[int]) -> None:
        self._requests = [request for request in self._requests if request.group_id not in group_ids]

    @abstractmethod
    def step(self) -> list[RolloutGroup]: ...

    def prepare_load(self, manifest: WeightsManifest) -> bool:
        return True

    def load(self, manifest: WeightsManifest, buckets: Buckets) -> str:
        self._version = manifest.version
        return DIGEST

    def health(self) -> EngineHealth:
        return EngineHealth(
            name=self._name,
            version=self._version,
            digest=DIGEST,
            outstanding_groups=len(self._requests),
            num_tokens=0,
            busy_s=0.0,
        )

    def stop(self) -> None:
        self._requests = []

    def _answer(self, request: GroupRequest) -> RolloutGroup:
        length = PROMPT_TOKENS + COMPLETION_TOKENS
        mask = np.arange(length) >= PROMPT_TOKENS
        rollouts = [
            Rollout(
                group_id=request.group_id,
                sample_index=index,
                prompt_id=request.prompt.prompt_id,
                task=request.prompt.task,
                token_ids=np.full(length, index, np.int32),
                loss_mask=mask,
                logprobs=np.zeros(length, np.float32),
                policy_versions=np.where(mask, self._version, NO_VERSION).astype(np.int32),
            )
            for index in range(request.group_size)
        ]
        return RolloutGroup(group_id=request.group_id, prompt=request.prompt, rollouts=rollouts)


class StandInRolloutActor(RolloutActor):
    """The rollout actor with an engine that the benchmark provides."""

    def open(self, make_engine: Callable[[str], Engine]) -> None:
        """Start an engine and leave that of an earlier run idle, because a call of that run may still wait."""
        self._thread = EngineThread(self._name, lambda: make_engine(self._name))


class InstantScoringActor(ScoringActor):
    """The scoring actor with a reward that takes no time."""

    def open(self) -> None:
        """Do nothing, so that the call returns once the process runs."""

    def score(self, groups: Sequence[RolloutGroup], indices: Sequence[int]) -> list[GroupScores]:
        chosen = [groups[index] for index in indices]
        return [GroupScores(group_id=g.group_id, scores={"instant": [float(i) for i in range(len(g))]}) for g in chosen]


class EndlessPrompts:
    """The part of ``PromptSource`` that the controller uses, with a single prompt."""

    def __init__(self) -> None:
        self._position = 0

    @property
    def cursor(self) -> Cursor:
        return Cursor(epoch=0, position=self._position)

    @property
    def skip_counts(self) -> dict[str, int]:
        return {}

    @property
    def metrics(self) -> dict[str, float]:
        return {}

    @property
    def skip_records(self) -> list[SkipRecord]:
        return []

    @property
    def last(self) -> Cursor:
        return Cursor(epoch=0, position=self._position - 1)

    def seek(self, cursor: Cursor) -> None:
        self._position = cursor.position

    def next(self) -> Prompt:
        self._position += 1
        return Prompt(
            prompt_id=self._position, epoch=0, token_ids=np.zeros(PROMPT_TOKENS, np.int32), prompt="p", task={"a": "1"}
        )


class StandInReporter:
    """A reporter that records when each step was reported; a lost group ends the benchmark."""

    def __init__(self) -> None:
        self.ended: list[float] = []
        """``time.perf_counter()`` at the end of every trained step."""
        self.waited: list[float] = []
        """Seconds that the learner waited for the batch of every step."""
        self.synced: list[float] = []
        """Seconds from the publication of every version until the last engine served it."""

    def admitting(self) -> None:
        pass

    def served(self, sync_s: float) -> None:
        self.synced.append(sync_s)

    def trained(self, report: StepReport) -> None:
        self.ended.append(time.perf_counter())
        self.waited.append(report.metrics["time/wait"])

    def compared(self, report: StepReport) -> None:
        pass

    def message(self, text: str) -> None:
        print(text, flush=True)

    def discarded(self, group_id: int, reason: str) -> None:
        raise AssertionError(f"group {group_id} was lost: {reason}")


@ray.remote(num_cpus=0)
def learn(replay: ActorHandle, weights: ActorHandle, num_steps: int, train_s: float) -> None:
    """Run the loop of a learner rank, with its calls in the same order, but sleep instead of training."""
    bucket = ray.put(np.zeros(1024, np.uint8))
    unanswered: dict[str, ray.ObjectRef] = {}

    def in_order(kind: str, method: Any, *arguments: Any) -> None:
        if kind in unanswered:
            ray.get(unanswered.pop(kind))
        unanswered[kind] = method.remote(*arguments)

    def publish(version: int) -> None:
        manifest = WeightsManifest(version=version, kind=WeightsKind.LORA, digest=DIGEST, num_buckets=1, num_bytes=1024)
        in_order("publish", weights.publish, manifest, [bucket], 1)

    publish(0)
    for step in range(num_steps + 1):
        started = time.perf_counter()
        batch = ray.get(replay.next_batch.remote(step, 0))
        metrics = {**batch.metrics, "time/wait": time.perf_counter() - started}
        if step < num_steps:
            time.sleep(train_s)
            publish(step + 1)
        in_order("report", replay.complete_step, StepReport(step=step, metrics=metrics, last=step == num_steps))
    ray.get(list(unanswered.values()))


@dataclass(kw_only=True, frozen=True)
class StandInWorkers:
    """Processes that serve several runs, one after the other."""

    engines: Mapping[str, ActorHandle]
    pool: ScorerPool


def start_workers(num_engines: int, num_scorers: int) -> StandInWorkers:
    """Start the processes of engines and scorers; ``run_pipeline`` opens the engines."""
    needs = [ResourceRequest(name=f"rollout-{index}") for index in range(num_engines)]

    def spawn(name: str, bundle: str) -> tuple[ActorHandle, ray.ObjectRef]:
        actor = start_actor(InstantScoringActor, ResourceRequest(name=name), name)
        return actor, actor.open.remote()

    return StandInWorkers(
        engines={n.name: start_actor(StandInRolloutActor, n, n.name, max_concurrency=ENGINE_CALLS) for n in needs},
        pool=ScorerPool("scorer", REWARDS, size=num_scorers, spawn=spawn, start_timeout_s=TIMEOUT_S),
    )


async def run_pipeline(
    workers: StandInWorkers,
    config: Config,
    folder: Path,
    reporter: StandInReporter,
    make_engine: Callable[[str], Engine],
    *,
    train_s: float = 0.0,
) -> None:
    """Run ``config.algorithm.num_steps`` steps, with the ledger in ``folder``."""
    engines = workers.engines
    setup = ReplaySetup.of(config, folder / run_files.LEDGER, REWARDS)
    replay = start_actor(ReplayActor, ResourceRequest(name="replay"), setup, max_concurrency=ASYNC_CALLS)
    weights = start_actor(
        WeightsActor,
        ResourceRequest(name="weights"),
        engines=list(engines),
        timeout_s=TIMEOUT_S,
        max_concurrency=ASYNC_CALLS,
    )
    controller = Controller(
        Workers(
            engines=engines, start_engine=lambda name: engines[name].open.remote(make_engine), pools=[workers.pool]
        ),
        config,
        replay=replay,
        weights=weights,
        prompts=EndlessPrompts(),
        evaluator=Evaluator([], rewards=REWARDS, held_out=HeldOutConfig(), max_tokens=1),
        reporter=reporter,
        resume_state=await replay.start.remote(RunStart(config=to_tree(config))),
        first_step=0,
    )
    await controller.run(lambda: learn.remote(replay, weights, config.algorithm.num_steps, train_s))
    for actor in (replay, weights):
        ray.kill(actor)

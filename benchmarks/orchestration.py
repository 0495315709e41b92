"""Groups per second through the whole orchestration, with engines and scorers that answer at once.

Everything between them is the real thing: admission, routing, the object store, scoring pools, the replay actor with
its packing, versions through the weights actor, and reports. Run: ``python -m benchmarks.orchestration --engines 16``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import psutil
import ray
from ray.actor import ActorHandle

from rlpipe.actors.replay import ReplayActor, ReplaySetup
from rlpipe.actors.reward import ScoringActor
from rlpipe.actors.rollout import RolloutActor
from rlpipe.actors.weights import WeightsActor
from rlpipe.configs.schema import AlgorithmConfig, Config, LearnerConfig, ReplayConfig, RewardConfig
from rlpipe.configs.tree import to_tree
from rlpipe.controller import Controller, Parts
from rlpipe.data.prompts import Cursor, Passed
from rlpipe.evaluation import Evaluator
from rlpipe.launch import ASYNC_CALLS, ENGINE_CALLS
from rlpipe.placement import Need, start_actor
from rlpipe.replay.ledger import NAME as LEDGER
from rlpipe.replay.restore import RunStart
from rlpipe.replay.steps import StepReport
from rlpipe.rollout.engine_thread import EngineThread
from rlpipe.scorer_pool import ScorerPool
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


class InstantEngine:
    """Answers every request in the next step, with 100-token rollouts."""

    def __init__(self, name: str) -> None:
        self._name, self._version = name, 0
        self._requests: list[GroupRequest] = []
        self._num_tokens = 0

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self._requests.extend(requests)

    def step(self) -> list[RolloutGroup]:
        groups = [self._answer(request) for request in self._requests]
        self._requests = []
        return groups

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
            num_tokens=self._num_tokens,
            busy_s=0.0,
        )

    def stop(self) -> None:
        pass

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


class InstantRolloutActor(RolloutActor):
    """The rollout actor with an instant engine."""

    def open(self) -> None:
        self._thread = EngineThread(self._name, lambda: InstantEngine(self._name))


class InstantScoringActor(ScoringActor):
    """The scoring actor with a reward that costs nothing."""

    def open(self) -> None:
        """Answers as soon as the process runs."""

    def score(self, groups: Sequence[RolloutGroup], indices: Sequence[int]) -> list[GroupScores]:
        chosen = [groups[index] for index in indices]
        return [GroupScores(group_id=g.group_id, scores={"instant": [float(i) for i in range(len(g))]}) for g in chosen]


class EndlessPrompts:
    """The part of ``PromptSource`` that the controller uses, on one prompt."""

    def __init__(self) -> None:
        self._position = 0

    @property
    def cursor(self) -> Cursor:
        return Cursor(epoch=0, position=self._position)

    @property
    def skip_counts(self) -> dict[str, int]:
        return {}

    @property
    def passed_over(self) -> list[Passed]:
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


class MemoryReporter:
    """Prints the rate now and then, and watches the memory of all processes, once these are warm."""

    def __init__(self, num_steps: int, groups_per_step: int, warmup_steps: int) -> None:
        self._num_steps, self._groups_per_step, self._warmup_steps = num_steps, groups_per_step, warmup_steps
        self.started = self.ended = 0.0
        self.rss_mb: list[float] = []
        """At the end of every tenth of the run."""

    @property
    def num_groups(self) -> int:
        """Those that are counted."""
        return self._num_steps * self._groups_per_step

    def served(self, sync_s: float) -> None:
        pass

    def trained(self, report: StepReport) -> None:
        self.ended = time.perf_counter()
        done = report.step + 1 - self._warmup_steps
        if done == 0:
            self.started = self.ended
        if done * 10 // self._num_steps > len(self.rss_mb):
            self.rss_mb.append(resident_mb())
            rate = done * self._groups_per_step / (self.ended - self.started)
            print(
                f"{done * self._groups_per_step:6d} groups, {rate:6.0f} groups/s, {self.rss_mb[-1]:7.0f} MB", flush=True
            )

    def compared(self, report: StepReport) -> None:
        pass

    def message(self, text: str) -> None:
        print(text, flush=True)

    def discarded(self, group_id: int, reason: str) -> None:
        raise AssertionError(f"group {group_id} was lost: {reason}")


def resident_mb() -> float:
    """Unshared memory of this process and all that it started, in MB."""
    me = psutil.Process(os.getpid())
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            memory = process.memory_info()
            total += memory.rss - memory.shared
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


@ray.remote(num_cpus=0)
def train_at_once(replay: ActorHandle, weights: ActorHandle, num_steps: int) -> None:
    """A learner that takes each batch, publishes, and reports, but computes nothing."""
    bucket = ray.put(np.zeros(1024, np.uint8))
    for step in range(num_steps + 1):
        manifest = WeightsManifest(version=step, kind=WeightsKind.LORA, digest=DIGEST, num_buckets=1, num_bytes=1024)
        weights.publish.remote(manifest, [bucket], 1)
        batch = ray.get(replay.next_batch.remote(step, 0))
        replay.complete_step.remote(StepReport(step=step, metrics=batch.metrics, last=step == num_steps))


async def run(arguments: argparse.Namespace, folder: Path) -> MemoryReporter:
    num_steps, warmup_steps = (
        groups // arguments.groups_per_step for groups in (arguments.groups, arguments.warmup_groups)
    )
    config = Config()
    config.algorithm = algorithm = AlgorithmConfig(
        num_steps=warmup_steps + num_steps,
        groups_per_step=arguments.groups_per_step,
        group_size=arguments.group_size,
    )
    tokens = 2 * arguments.group_size * (PROMPT_TOKENS + COMPLETION_TOKENS)
    config.learner = LearnerConfig(max_tokens_per_microbatch=8 * tokens)
    config.replay = ReplayConfig(max_staleness=arguments.max_staleness)
    config.rollout.sampling.max_tokens = COMPLETION_TOKENS
    rewards = {"instant": RewardConfig(path="instant")}
    engines = {}
    for index in range(arguments.engines):
        need = Need(name=f"rollout-{index}")
        engines[need.name] = start_actor(InstantRolloutActor, need, need.name, max_concurrency=ENGINE_CALLS)
    await asyncio.gather(*(engine.open.remote() for engine in engines.values()))

    def spawn(name: str, place: str) -> tuple[ActorHandle, ray.ObjectRef]:
        actor = start_actor(InstantScoringActor, Need(name=name), name)
        return actor, actor.open.remote()

    setup = ReplaySetup(
        path=folder / LEDGER,
        algorithm=algorithm,
        learner=config.learner,
        replay=config.replay,
        ledger=config.ledger,
        rewards=rewards,
        seed=0,
        num_samples=0,
    )
    replay = start_actor(ReplayActor, Need(name="replay"), setup, max_concurrency=ASYNC_CALLS)
    weights = start_actor(
        WeightsActor, Need(name="weights"), engines=list(engines), timeout_s=60.0, max_concurrency=ASYNC_CALLS
    )
    pool = ScorerPool("scorer", rewards, size=arguments.scorers, spawn=spawn, start_timeout_s=60.0)
    reporter = MemoryReporter(num_steps, algorithm.groups_per_step, warmup_steps)
    parts = Parts(
        engines=engines,
        start_engine=lambda name: engines[name].open.remote(),
        pools=[pool],
        replay=replay,
        weights=weights,
    )
    controller = Controller(
        parts,
        config,
        prompts=EndlessPrompts(),
        evaluator=Evaluator([], rewards=rewards, correct_at=1.0, max_tokens=1),
        reporter=reporter,
        accounts=await replay.start.remote(RunStart(config=to_tree(config))),
        first_step=0,
    )
    learner = asyncio.ensure_future(_value(train_at_once.remote(replay, weights, algorithm.num_steps)))
    await controller.run(learner)
    return reporter


async def _value(call: ray.ObjectRef) -> None:
    await call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=20_000)
    parser.add_argument("--warmup-groups", type=int, default=4000, help="before those that are counted")
    parser.add_argument("--groups-per-step", type=int, default=128)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--scorers", type=int, default=2)
    arguments = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        reporter = asyncio.run(run(arguments, Path(folder)))
        ray.shutdown()
    seconds = reporter.ended - reporter.started
    result = {
        "engines": arguments.engines,
        "group_size": arguments.group_size,
        "groups": arguments.groups,
        "groups_per_second": round(reporter.num_groups / seconds, 1),
        "rss_growth_mb": round(reporter.rss_mb[-1] - reporter.rss_mb[0], 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

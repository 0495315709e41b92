"""Tests that weights lost or changed on their way to a vLLM engine stop the run with an error that names the engine."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from engine_cases import Published, adapted, corrupted, publish_adapter, without
from ray.actor import ActorHandle
from run_cases import REWARDS_FILE, make_config

from rlpipe.actors.replay import ReplayActor, ReplaySetup
from rlpipe.actors.reward import ScoringActor
from rlpipe.actors.rollout import RolloutActor
from rlpipe.actors.weights import WeightsActor
from rlpipe.configs.options import to_tree
from rlpipe.configs.schema.data_config import HeldOutConfig
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.data.prompts import open_prompts
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.errors import WeightsMismatch
from rlpipe.replay.ledger.restore import RunStart
from rlpipe.replay.step_queue import StepReport
from rlpipe.run.cluster import ResourceRequest, start_actor
from rlpipe.run.controller import Controller
from rlpipe.run.evaluation import Evaluator
from rlpipe.run.scoring_pools import ScorerPool
from rlpipe.run.workers import Workers

pytestmark = [pytest.mark.ray, pytest.mark.vllm]
ENGINE = "canary-engine"
POLL_S = 0.5
SHORT_POLLS = f"cluster.suspect_after_s={3 * POLL_S}"
"""An override with which engines are polled three times before they are suspect."""
REWARDS = {"digits": RewardConfig(path=f"{REWARDS_FILE}:digits")}


@pytest.fixture(scope="module")
def config(local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    pytest.importorskip("vllm")
    return make_config(tiny_policy, prompts_file, tmp_path_factory.mktemp("canary"), "rollout.engine=vllm", SHORT_POLLS)


@pytest.fixture(scope="module")
def engine(config: Config) -> Iterator[ActorHandle]:
    """Yield one vLLM engine for all cases, each of which ends with no request waiting in it."""
    actor = start_actor(RolloutActor, ResourceRequest(name=ENGINE), ENGINE, max_concurrency=16)
    ray.get(actor.start.remote(config.model, config.rollout, config.weights, config.data.max_prompt_tokens))
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def scorer(config: Config) -> Iterator[ActorHandle]:
    actor = start_actor(ScoringActor, ResourceRequest(name="canary-scorer"), "canary-scorer")
    ray.get(actor.start.remote(REWARDS, {}, config.model, config.algorithm.num_steps, os.getcwd()))
    yield actor
    ray.kill(actor)


@pytest.fixture(scope="module")
def versions(tiny_policy: Path) -> list[Published]:
    """Return two different versions."""
    return [publish_adapter(adapted(tiny_policy, seed=version), version) for version in (0, 1)]


def with_other_adapter(versions: list[Published]) -> Published:
    """Return version 1's manifest with version 0's tensors, so that the engine keeps serving the old adapter."""
    return versions[1][0], versions[0][1]


CASES = {
    "dropped adapter": (with_other_adapter, f"engine {ENGINE} does not serve weights version 1"),
    "flipped bit": (
        lambda versions: corrupted(versions[1], "layers.1.mlp.down_proj.lora_A"),
        f"engine {ENGINE} does not serve weights version 1",
    ),
    "missing tensors": (
        lambda versions: without(versions[1], "layers.1.self_attn.v_proj"),
        f"engine {ENGINE} could not load weights version 1: .*layers.1.self_attn.v_proj",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_wrong_weights_stop_the_run(
    config: Config, engine: ActorHandle, scorer: ActorHandle, versions: list[Published], case: str, tmp_path: Path
) -> None:
    damage, message = CASES[case]
    reporter = StepCounter()
    with pytest.RaisesGroup(WeightsMismatch, flatten_subgroups=True) as caught:
        asyncio.run(run(config, engine, scorer, [versions[0], damage(versions)], reporter, tmp_path))
    assert re.search(message, str(caught.value.exceptions[0]))
    assert reporter.num_trained == 1  # only the step before the wrong version is trained


@pytest.mark.slow
def test_right_weights_do_not_stop_the_run(
    config: Config, engine: ActorHandle, scorer: ActorHandle, versions: list[Published], tmp_path: Path
) -> None:
    reporter = StepCounter()
    manifest = replace(versions[0][0], version=2)
    short = replace(config, algorithm=replace(config.algorithm, num_steps=2))
    asyncio.run(run(short, engine, scorer, [*versions, (manifest, versions[0][1])], reporter, tmp_path))
    assert reporter.num_trained == 2


class StepCounter:
    """The part of ``Reporter`` that the controller uses."""

    def __init__(self) -> None:
        self.num_trained = 0

    def admitting(self) -> None:
        pass

    def served(self, sync_s: float) -> None:
        assert sync_s > 0

    def trained(self, report: StepReport) -> None:
        self.num_trained += 1

    def compared(self, report: StepReport) -> None:
        pass

    def message(self, text: str) -> None:
        pass

    def discarded(self, group_id: int, reason: str) -> None:
        raise AssertionError(f"group {group_id} was lost: {reason}")


@ray.remote(num_cpus=0)
def publish_only(replay: ActorHandle, weights: ActorHandle, versions: list[Published]) -> None:
    """Publish the given versions in place of a learner, one after each batch."""
    for step, (manifest, buckets) in enumerate(versions):
        ray.get(weights.publish.remote(manifest, [ray.put(bucket) for bucket in buckets], 1))
        batch = ray.get(replay.next_batch.remote(step, 0))
        last = step == len(versions) - 1
        ray.get(replay.complete_step.remote(StepReport(step=step, metrics=batch.metrics, last=last)))


async def run(
    config: Config,
    engine: ActorHandle,
    scorer: ActorHandle,
    versions: list[Published],
    reporter: StepCounter,
    folder: Path,
) -> None:
    """Run the controller with its real parts, except for the learner."""
    engines = {ENGINE: engine}
    setup = ReplaySetup.of(config, folder / "ledger.sqlite", REWARDS)
    replay = start_actor(ReplayActor, ResourceRequest(name="canary-replay"), setup, max_concurrency=100)
    weights = start_actor(
        WeightsActor, ResourceRequest(name="canary-weights"), engines=list(engines), timeout_s=60.0, max_concurrency=100
    )
    pool = ScorerPool(
        "canary-scorer", REWARDS, size=1, spawn=lambda name, place: (scorer, ray.put(None)), start_timeout_s=60.0
    )
    prompts, _ = open_prompts(config.data, load_tokenizer(config.model), seed=0)
    controller = Controller(
        Workers(engines=engines, start_engine=lambda name: ray.put(None), pools=[pool]),
        config,
        replay=replay,
        weights=weights,
        prompts=prompts,
        evaluator=Evaluator([], rewards=REWARDS, held_out=HeldOutConfig(), max_tokens=1),
        reporter=reporter,  # type: ignore[arg-type]
        resume_state=await replay.start.remote(RunStart(config=to_tree(config))),
        first_step=0,
    )
    learners: list[ray.ObjectRef] = []

    def start_learner() -> ray.ObjectRef:
        learners.append(publish_only.remote(replay, weights, versions))
        return learners[0]

    try:
        await controller.run(start_learner)
    finally:
        for learner in learners:
            ray.cancel(learner, force=True)
        ray.kill(replay)
        ray.kill(weights)
        # The engine outlives the run: a collect call still waiting in it would take the next run's groups.
        time.sleep(2 * POLL_S)

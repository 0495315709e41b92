"""Groups per second through scoring: functions in processes, replicas of Ray Serve, the feature network.

Processes and replicas run a reward that sleeps, so that their number decides, not that of the machine's cores; the
overhead is that of a reward that does nothing. Run: ``python -m benchmarks.scoring``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from ray import ObjectRef

from rlpipe.actors.reward import ScoringActor
from rlpipe.actors.served import Lease, ServedSetup, deploy, make_scorer, start_serve
from rlpipe.configs.schema.algorithm_config import FeatureConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.configs.schema.rollout_config import RewardConfig, ServeConfig
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.run.cluster import ResourceRequest, start_actor
from rlpipe.run.scoring_pools import ScorerPool, ScoringPool
from rlpipe.run.served_pool import ServedPool
from rlpipe.scoring.feature_scorer import FeatureSequence, open_feature_network
from rlpipe.scoring.rewards import RewardActor
from rlpipe.types import Prompt, Rollout, RolloutGroup

PROMPT_TOKENS, COMPLETION_TOKENS = 32, 128
NAP_S = 0.05
START_TIMEOUT_S = 300.0


def nap(completions: Sequence[str], **columns: Any) -> list[float]:
    """Return zeros after a pause, as if waiting for a model on another machine."""
    time.sleep(NAP_S)
    return [0.0] * len(completions)


def nothing(completions: Sequence[str], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


class Nap(RewardActor):
    def score(self, group: RolloutGroup) -> list[float | None]:
        time.sleep(NAP_S)
        return [0.0] * len(group)


def make_groups(count: int, group_size: int) -> list[RolloutGroup]:
    rng = np.random.default_rng(0)
    length = PROMPT_TOKENS + COMPLETION_TOKENS
    mask = np.arange(length) >= PROMPT_TOKENS
    groups = []
    for group_id in range(count):
        prompt_ids = rng.integers(7, 100, PROMPT_TOKENS).astype(np.int32)
        prompt = Prompt(prompt_id=group_id, epoch=0, token_ids=prompt_ids, prompt="", task={})
        rollouts = [
            Rollout(
                group_id=group_id,
                sample_index=index,
                prompt_id=group_id,
                task={},
                token_ids=np.concatenate([prompt_ids, rng.integers(7, 100, COMPLETION_TOKENS)]).astype(np.int32),
                loss_mask=mask,
                logprobs=np.zeros(length, np.float32),
                policy_versions=np.where(mask, 0, -1).astype(np.int32),
            )
            for index in range(group_size)
        ]
        groups.append(RolloutGroup(group_id=group_id, prompt=prompt, rollouts=rollouts))
    return groups


def process_pool(model: ModelConfig, reward: Callable[..., Any], size: int) -> ScoringPool:
    rewards = {"reward": RewardConfig(num_processes=size)}

    def spawn(name: str, bundle: str) -> tuple[Any, ObjectRef]:
        actor = start_actor(ScoringActor, ResourceRequest(name=name), name)
        start: ObjectRef = actor.start.remote(rewards, {"reward": reward}, model, 0, os.getcwd())
        return actor, start

    name = f"{reward.__name__}-{size}"
    return ScorerPool(name, rewards, size=size, spawn=spawn, start_timeout_s=START_TIMEOUT_S)


def served_pool(model: ModelConfig, replicas: int) -> ScoringPool:
    config = ServeConfig(replicas=replicas, batch_groups=1)
    rewards = {"reward": RewardConfig(serve=config, timeout_s=START_TIMEOUT_S)}
    setup = ServedSetup(
        app=f"replicas-{replicas}",
        make=_Maker(rewards, model),
        folder=os.getcwd(),
        serve=config,
        timeout_s=START_TIMEOUT_S,
        lease=start_actor(Lease, ResourceRequest(name=f"lease-{replicas}")),
    )
    return ServedPool(
        "reward", rewards, deploy=lambda: deploy(setup, num_cpus=0.1, num_gpus=0.0), start_timeout_s=START_TIMEOUT_S
    )


class _Maker:
    def __init__(self, rewards: Mapping[str, RewardConfig], model: ModelConfig) -> None:
        self._rewards, self._model = rewards, model

    def __call__(self) -> Any:
        return make_scorer(self._rewards, {"reward": Nap}, self._model, 0)


async def measure(pool: ScoringPool, groups: Sequence[RolloutGroup], repeats: int) -> float:
    """Return the median groups per second of several runs; each submits all groups one by one, as engines do."""
    await pool.start()
    refs = [ray.put([group]) for group in groups]
    rates = []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        scores = await asyncio.gather(
            *(pool.score(ref, {0: group.group_id}) for ref, group in zip(refs, groups, strict=True))
        )
        assert all(not entry.failures for part in scores for entry in part)
        if repeat:  # the first one warms up
            rates.append(len(groups) / (time.perf_counter() - started))
    return statistics.median(rates)


async def overhead_ms(pool: ScoringPool, groups: Sequence[RolloutGroup], repeats: int) -> float:
    """Return the milliseconds per rollout of a reward that does nothing, for groups that finish together."""
    await pool.start()
    ref, ids = ray.put(list(groups)), {index: group.group_id for index, group in enumerate(groups)}
    times = []
    for repeat in range(repeats + 1):
        started = time.perf_counter()
        await pool.score(ref, ids)
        if repeat:
            times.append(time.perf_counter() - started)
    return 1000 * statistics.median(times) / sum(map(len, groups))


def feature_rates(
    model: ModelConfig, groups: Sequence[RolloutGroup], sizes: Sequence[int], repeats: int
) -> dict[str, float]:
    """Return the median groups per second of several runs, by the tokens of a micro batch."""
    sequences = [FeatureSequence.of(rollout) for group in groups for rollout in group]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rates = {}
    for size in sizes:
        reader = open_feature_network(model, FeatureConfig(), device, max_tokens=size)
        times = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            reader.read(sequences)
            times.append(time.perf_counter() - started)
        rates[str(size)] = round(len(groups) / statistics.median(times[1:]), 1)  # the first one warms up
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", type=int, default=100)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--micro-batch-tokens", type=int, nargs="+", default=[256, 1024, 4096, 16384])
    arguments = parser.parse_args()
    groups = make_groups(arguments.groups, arguments.group_size)
    with tempfile.TemporaryDirectory() as folder:
        policy = make_tiny_policy(Path(folder) / "policy")
        model = ModelConfig(path=str(policy), dtype="float32", adapter=AdapterConfig(kind="none"))
        few = groups[: max(8, arguments.groups // 5)]
        features = feature_rates(model, few, arguments.micro_batch_tokens, arguments.repeats)
        ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
        functions = {
            str(size): round(asyncio.run(measure(process_pool(model, nap, size), groups, arguments.repeats)), 1)
            for size in arguments.processes
        }
        empty = asyncio.run(overhead_ms(process_pool(model, nothing, 1), groups, arguments.repeats))
        start_serve()
        replicas = {
            str(size): round(asyncio.run(measure(served_pool(model, size), groups, arguments.repeats)), 1)
            for size in (1, 2)
        }
        ray.shutdown()
    result = {
        "group_size": arguments.group_size,
        "sleep_ms": 1000 * NAP_S,
        "groups_per_second": functions,
        "overhead_ms_per_rollout": round(empty, 4),
        "served_groups_per_second": replicas,
        "served_ratio": round(replicas["2"] / replicas["1"], 2),
        "feature_groups_per_second": features,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

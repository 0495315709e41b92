"""Small rollouts, batches and learners, for the tests of the learner in all folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.data.packing import pack_step
from rlpipe.learner.objectives import LearnerInputs, PolicyGradient
from rlpipe.learner.policy import Policy, load_policy
from rlpipe.learner.step import Learner
from rlpipe.learner.step_advantages import StepAdvantages
from rlpipe.learner.workload import Workload, head_of, needs_copy
from rlpipe.replay.assemble import number_tokens
from rlpipe.types import NO_VERSION, MicroBatch, Rollout, StepRewards, TrainBatch

TEMPERATURE = 0.9


def make_rollouts(*, num_groups: int = 4, group_size: int = 3, seed: int = 0) -> list[Rollout]:
    """Return groups with a shared prompt; every third rollout has an untrained gap, as tool results leave."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for group_id in range(num_groups):
        prompt = rng.integers(7, 100, rng.integers(2, 9))
        for sample_index in range(group_size):
            completion = rng.integers(7, 100, rng.integers(3, 14))
            mask = np.r_[np.zeros(len(prompt), bool), np.ones(len(completion), bool)]
            if (group_id + sample_index) % 3 == 0:
                mask[-2] = False
            rollouts.append(
                Rollout(
                    group_id=group_id,
                    sample_index=sample_index,
                    prompt_id=group_id,
                    task={},
                    token_ids=np.r_[prompt, completion].astype(np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, rng.normal(-4.6, 0.1, len(mask)), 0).astype(np.float32),
                    policy_versions=np.where(mask, 0, -1).astype(np.int32),
                    advantages=np.full(len(mask), rng.normal(), np.float32),
                )
            )
    return rollouts


def make_document(group_id: int, token_ids: np.ndarray, *, prompt: int = 1) -> Rollout:
    """Return a row that no policy sampled, in which all tokens after the first ``prompt`` are trained."""
    mask = np.arange(len(token_ids)) >= prompt
    return Rollout(
        group_id=group_id,
        sample_index=0,
        prompt_id=group_id,
        task={},
        token_ids=token_ids.astype(np.int32),
        loss_mask=mask,
        logprobs=np.zeros(len(token_ids), np.float32),
        policy_versions=np.full(len(token_ids), NO_VERSION, np.int32),
        advantages=mask.astype(np.float32),
    )


def make_batches(
    *,
    step: int = 0,
    num_ranks: int = 1,
    max_tokens: int = 4096,
    algorithm: AlgorithmConfig | None = None,
    seed: int = 0,
) -> list[TrainBatch]:
    """Return one batch per rank; every step has different rollouts."""
    algorithm, rollouts = algorithm or AlgorithmConfig(), make_rollouts(seed=1000 * seed + step)
    places = number_tokens(rollouts)
    batches = pack_step(
        rollouts,
        step=step,
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        num_minibatches=algorithm.num_minibatches,
        num_epochs=algorithm.num_epochs_per_step,
        seed=seed,
    )
    return [replace(batch, group_ranges=places) for batch in batches]


def make_rewarded(
    algorithm: AlgorithmConfig, *, step: int = 0, num_ranks: int = 1, max_tokens: int = 4096
) -> tuple[list[TrainBatch], list[Rollout]]:
    """Return one batch per rank, with rewards from which the learner computes advantages, and all rollouts.

    One sampling log-prob is unknown.
    """
    rollouts = make_rollouts(seed=step)
    rollouts[1].logprobs[-1] = np.nan
    number_tokens(rollouts)
    batches = pack_step(
        rollouts,
        step=step,
        num_ranks=num_ranks,
        max_tokens=max_tokens,
        num_minibatches=algorithm.num_minibatches,
        num_epochs=algorithm.num_epochs_per_step,
    )
    counts = np.array([rollout.num_loss_tokens for rollout in rollouts], np.int32).reshape(4, 3)
    rewards = np.random.default_rng(step).normal(size=counts.shape).astype(np.float32)
    for batch in batches:
        batch.rewards = StepRewards(rewards=list(rewards), num_tokens=list(counts))
    return batches, rollouts


def make_adapter_config(kind: str = "lora", **options: Any) -> AdapterConfig:
    return AdapterConfig(kind=kind, r=4, alpha=8.0, **options)


def make_model_config(path: Path, *, adapter: str | AdapterConfig = "lora", **options: Any) -> ModelConfig:
    config = make_adapter_config(adapter) if isinstance(adapter, str) else adapter
    return ModelConfig(path=str(path), adapter=config, **{"dtype": "float32"} | options)


def load_tiny(path: Path, **options: Any) -> Policy:
    return load_policy(make_model_config(path, **options), LearnerConfig(), torch.device("cpu"))


def micro_batch_of(rollouts: list[Rollout]) -> MicroBatch:
    """Return one micro batch of all rollouts, in their order."""
    return pack_step(rollouts, step=0, num_ranks=1, max_tokens=10_000)[0].mini_batches[0].micro_batches[0]


def make_learner(
    path: Path,
    *,
    adapter: str = "lora",
    learner: LearnerConfig | None = None,
    algorithm: AlgorithmConfig | None = None,
    model: ModelConfig | None = None,
    device: str = "cpu",
) -> Learner:
    learner = learner or LearnerConfig(optimizer=OptimizerConfig(lr=1e-2 if adapter == "lora" else 1e-3))
    model, algorithm = model or make_model_config(path, adapter=adapter), algorithm or AlgorithmConfig(num_steps=10)
    workload = Workload(copied_for=algorithm if needs_copy(model, algorithm) else None, head=head_of(algorithm))
    policy = load_policy(model, learner, torch.device(device), workload=workload)
    return Learner(policy, learner, algorithm, temperature=TEMPERATURE, max_completion_tokens=16)


def assign_credit(
    learner: Learner, algorithm: AlgorithmConfig, batch: TrainBatch
) -> tuple[list[list[LearnerInputs]], dict[str, float]]:
    """Return the inputs of the batch's updates with the advantages that the learner computes, and its metrics."""
    policy, config = learner.policy, LearnerConfig()
    objective = PolicyGradient(
        policy,
        config,
        algorithm,
        learner.reference,
        bonus=learner.entropy_bonus,
        temperature=TEMPERATURE,
        max_completion_tokens=16,
    )
    updates = [objective.prepare(mini_batch) for mini_batch in batch.mini_batches]
    credit = StepAdvantages(
        policy,
        config,
        algorithm,
        learner.reference,
        coefficient=learner.kl_coefficient,
        critic=learner.critic,
        temperature=TEMPERATURE,
    )
    assert batch.rewards is not None
    return updates, credit.assign(batch.rewards, updates)


def train_steps(learner: Learner, first: int, last: int, *, max_tokens: int = 4096) -> list[dict[str, float]]:
    """Run this rank's part of the steps from ``first`` up to, but not including, ``last``."""
    sharding = learner.policy.sharding
    batches = [
        make_batches(step=step, num_ranks=sharding.num_ranks, max_tokens=max_tokens)[sharding.rank]
        for step in range(first, last)
    ]
    return [learner.train_step(batch) for batch in batches]


def parameters_of(learner: Learner) -> dict[str, torch.Tensor]:
    """Return copies of the full trained parameters, which are equal on every rank."""
    full = learner.policy.sharding.full
    return {name: full(tensor).detach().clone() for name, tensor in learner.policy.trainable_parameters().items()}


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], atol=tolerance, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )

"""Advantages that the learner computes: the KL in the reward and the optimal token baseline, against plain passes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from learner_cases import TEMPERATURE, assert_close, assign_credit, make_learner, make_rewarded, parameters_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlpipe.algorithms.losses import KlCoefficient
from rlpipe.configs.schema.algorithm_config import (
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    LossConfig,
    RewardKlConfig,
)
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.errors import RunError
from rlpipe.learner.checkpoints import CheckpointStore
from rlpipe.learner.objectives import LearnerInputs
from rlpipe.learner.step import Learner
from rlpipe.types import Rollout, TrainBatch

COEF = 0.3
REJECTION_CAP = 1.08
GROUP_SIZE = 3


def make_batch(
    algorithm: AlgorithmConfig, *, step: int = 0, max_tokens: int = 4096
) -> tuple[TrainBatch, list[Rollout]]:
    """Return a batch with rewards, and its rollouts."""
    (batch,), rollouts = make_rewarded(algorithm, step=step, max_tokens=max_tokens)
    return batch, rollouts


def make_perturbed(tiny: Path, algorithm: AlgorithmConfig) -> Learner:
    """Return a learner whose policy has moved away from its reference."""
    learner = make_learner(tiny, adapter="none", algorithm=algorithm, learner=LearnerConfig(max_grad_norm=None))
    generator = torch.Generator().manual_seed(3)
    for parameter in learner.policy.trainable_parameters().values():
        parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)
    return learner


@torch.no_grad()
def distributions(model: torch.nn.Module, rollout: Rollout) -> Tensor:
    """Return the log-probs of all tokens ``[K, V]`` at each loss token."""
    tokens = torch.from_numpy(rollout.token_ids).long()
    logits = model(input_ids=tokens[None]).logits[0].double() / TEMPERATURE
    return logits.log_softmax(1)[torch.from_numpy(np.flatnonzero(rollout.loss_mask) - 1)]


def pick(values: Tensor, rollout: Rollout) -> np.ndarray:
    targets = torch.from_numpy(rollout.token_ids[rollout.loss_mask]).long()
    return values.gather(1, targets[:, None])[:, 0].numpy()


def plain_models(learner: Learner, tiny: Path) -> tuple[torch.nn.Module, torch.nn.Module]:
    policy, reference = (AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval() for _ in range(2))
    policy.load_state_dict(learner.policy.model.state_dict())
    return policy, reference


def kl_reference(log_ratio: np.ndarray, name: str) -> np.ndarray:
    """Return the estimate, with log-ratio of policy to reference."""
    return {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": np.exp(-log_ratio) - 1 + log_ratio, "abs": abs(log_ratio)}[
        name
    ]


def advantages_of(updates: Sequence[Sequence[LearnerInputs]]) -> dict[int, float]:
    """Return the advantages by place, which must be the same in all updates that contain it."""
    found: dict[int, float] = {}
    for inputs in (inputs for update in updates for inputs in update):
        for place, value in zip(inputs.indices.tolist(), inputs.advantages.tolist(), strict=True):
            assert found.setdefault(place, value) == value
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("kl", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize(("max_tokens", "num_minibatches"), [(4096, 1), (60, 2)])
def test_the_kl_of_a_rollout_is_subtracted_before_the_groups_mean(
    tiny: Path, kl: str, max_tokens: int, num_minibatches: int
) -> None:
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(scale="none"),
        reward_kl=RewardKlConfig(coef=COEF, kl=kl),
        num_minibatches=num_minibatches,
        num_epochs_per_step=num_minibatches,
    )
    learner = make_perturbed(tiny, algorithm)
    batch, rollouts = make_batch(algorithm, max_tokens=max_tokens)
    updates, metrics = assign_credit(learner, algorithm, batch)
    policy, reference = plain_models(learner, tiny)
    divergences = [
        kl_reference(pick(distributions(policy, one), one) - pick(distributions(reference, one), one), kl)
        for one in rollouts
    ]
    assert batch.rewards is not None
    rewards = np.array(batch.rewards.rewards) - COEF * np.array([own.sum() for own in divergences]).reshape(-1, 3)
    expected = np.repeat((rewards - rewards.mean(1, keepdims=True)).ravel(), [len(own) for own in divergences])
    assert np.abs(rewards - batch.rewards.rewards).max() > 0.01
    found = advantages_of(updates)
    np.testing.assert_allclose([found[place] for place in range(len(expected))], expected, atol=2e-5)
    assert metrics["kl/in_reward"] == pytest.approx(np.mean([own.mean() for own in divergences]), abs=1e-6)
    assert metrics["kl/coefficient"] == COEF


OWN = """
import numpy as np

def energies(rewards, inputs):
    assert inputs.estimates is None and len(inputs.energies) == len(rewards)
    return [[values.astype(np.float32) for values in group] for group in inputs.energies]

def estimates(rewards, inputs, *, factor):
    assert inputs.energies is None
    return [[factor * values for values in group] for group in inputs.estimates]

def reduced(rewards, inputs):
    for group, penalties in zip(rewards, inputs.penalties):
        assert len(group) == len(penalties)
    return rewards

def raising(rewards, inputs):
    return inputs.estimates[0]
"""


def own_credit(tiny: Path, folder: Path, advantage: AdvantageConfig, **options: Any) -> dict[int, float]:
    (folder / "own.py").write_text(OWN)
    algorithm = AlgorithmConfig(advantage=advantage, **options)
    learner = make_perturbed(tiny, algorithm)
    return advantages_of(assign_credit(learner, algorithm, make_batch(algorithm)[0])[0])


def test_own_advantages_get_what_the_named_one_gets(tiny: Path, tmp_path: Path) -> None:
    own = AdvantageConfig(name="optimal_token_baseline", path=f"{tmp_path}/own.py:energies")
    energies = own_credit(tiny, tmp_path, own)
    assert min(energies.values()) >= 0
    assert len({*energies.values()}) > GROUP_SIZE, "one for each token"
    rewards = make_batch(AlgorithmConfig(advantage=own))[0].rewards
    assert rewards is not None
    gae = AdvantageConfig(name="gae", path=f"{tmp_path}/own.py:estimates", kwargs={"factor": 2.0})
    returns = np.repeat(np.concatenate(rewards.rewards), np.concatenate(rewards.num_tokens))
    found = own_credit(tiny, tmp_path, gae)  # a new critic's values are 0, so the estimates are the rewards
    np.testing.assert_allclose([found[place] for place in range(len(returns))], 2 * returns, atol=1e-5)


def test_own_advantages_are_not_asked_in_a_step_whose_log_probs_are_not_finite(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    own = AdvantageConfig(name="optimal_token_baseline", path=f"{tmp_path}/own.py:energies")
    algorithm = AlgorithmConfig(advantage=own)
    learner = make_perturbed(tiny, algorithm)
    next(iter(learner.policy.trainable_parameters().values())).data.fill_(math.nan)
    updates, _ = assign_credit(learner, algorithm, make_batch(algorithm)[0])
    assert all(inputs.advantages.isnan().all() for update in updates for inputs in update)


def test_own_advantages_get_rewards_minus_the_kl(tiny: Path, tmp_path: Path) -> None:
    kl = {"reward_kl": RewardKlConfig(coef=COEF)}
    own = own_credit(tiny, tmp_path, AdvantageConfig(path=f"{tmp_path}/own.py:reduced"), **kl)
    built_in = own_credit(tiny, tmp_path, AdvantageConfig(name="reinforce"), **kl)
    assert own == pytest.approx(built_in, abs=1e-6)
    with pytest.raises(RunError, match=r"algorithm.advantage.path: .*raised TypeError.*own.py, line 18"):
        own_credit(tiny, tmp_path, AdvantageConfig(path=f"{tmp_path}/own.py:raising"), **kl)


@pytest.mark.parametrize("rejection", ["none", "geometric"])
def test_the_optimal_token_baseline_is_that_of_plain_passes(tiny: Path, rejection: str) -> None:
    """Compare with the squared lengths of softmax gradients, formed from all logits, and verl's correction by ρ²."""
    algorithm = AlgorithmConfig(
        advantage=AdvantageConfig(name="optimal_token_baseline"),
        reward_kl=RewardKlConfig(coef=COEF),
        correction=CorrectionConfig(cap=1.05, rejection=rejection, rejection_cap=REJECTION_CAP),
        num_minibatches=2,
        num_epochs_per_step=2,
    )
    learner = make_perturbed(tiny, algorithm)
    batch, rollouts = make_batch(algorithm, max_tokens=60)
    updates, _ = assign_credit(learner, algorithm, batch)
    policy, reference = plain_models(learner, tiny)
    returns, weights, kept = [], [], []
    assert batch.rewards is not None
    for rollout, reward in zip(rollouts, np.concatenate(batch.rewards.rewards), strict=True):
        logprobs = distributions(policy, rollout)
        own, sampled = pick(logprobs, rollout), rollout.logprobs[rollout.loss_mask].astype(np.float64)
        kl = own - pick(distributions(reference, rollout), rollout)
        returns.append([reward - COEF * kl[place:].sum() for place in range(len(kl))])
        log_ratio = np.where(np.isnan(sampled), 0, own - sampled)
        kept.append(rejection == "none" or abs(log_ratio.mean()) <= np.log(REJECTION_CAP))
        ratio = kept[-1] * np.exp(log_ratio).clip(1 / 1.05, 1.05)
        one_hot = torch.zeros_like(logprobs)
        one_hot[range(len(own)), rollout.token_ids[rollout.loss_mask]] = 1
        weights.append(np.cumsum((one_hot - logprobs.exp()).square().sum(1).numpy() * ratio**2))
    assert {*kept} == ({True} if rejection == "none" else {True, False})
    found, expected = advantages_of(updates), []
    for start in range(0, len(rollouts), GROUP_SIZE):
        members = range(start, start + GROUP_SIZE)
        for index in members:
            for place, value in enumerate(returns[index]):
                beside = [other for other in members if len(returns[other]) > place]
                total = sum(weights[other][place] for other in beside) or 1.0
                baseline = sum(weights[other][place] * returns[other][place] for other in beside) / total
                expected.append(value - (baseline if len(beside) > 1 else 0))
    np.testing.assert_allclose([found[place] for place in range(len(expected))], expected, atol=2e-5)


def test_log_probs_of_the_first_pass_are_those_of_the_steps_start(tiny: Path) -> None:
    algorithm = AlgorithmConfig(reward_kl=RewardKlConfig(coef=COEF), num_minibatches=2, loss=LossConfig(beta=0.1))
    learner = make_perturbed(tiny, algorithm)
    batch, _ = make_batch(algorithm)
    (first, second), _ = assign_credit(learner, algorithm, batch)
    assert all(inputs.old_logprobs is None for inputs in first)
    for inputs in (*first, *second):
        assert inputs.ref_logprobs is not None
    (inputs,) = second
    logprobs, _ = learner.policy.module.logprobs(inputs.row, TEMPERATURE, 1024)
    torch.testing.assert_close(inputs.old_logprobs, logprobs.detach(), atol=1e-6, rtol=0)


def test_without_a_kl_the_learner_trains_as_with_advantages_that_were_given(tiny: Path) -> None:
    """Train with a coefficient so small that only the way of the advantages differs."""
    results = []
    for in_learner in (True, False):
        algorithm = AlgorithmConfig(
            advantage=AdvantageConfig(scale="none"), reward_kl=RewardKlConfig(coef=1e-12 if in_learner else 0.0)
        )
        learner = make_learner(tiny, adapter="none", algorithm=algorithm)
        batch, _ = make_batch(algorithm)
        if not in_learner:
            assert batch.rewards is not None
            flat = np.concatenate(
                [
                    np.repeat(group - group.mean(), counts)
                    for group, counts in zip(batch.rewards.rewards, batch.rewards.num_tokens, strict=True)
                ]
            )
            (micro,) = batch.mini_batches[0].micro_batches
            micro.advantages[micro.loss_mask] = flat
        learner.train_step(batch)
        results.append(parameters_of(learner))
    assert_close(*results, 1e-6)


def test_a_reference_that_is_not_finite_makes_a_bad_step(tiny: Path) -> None:
    algorithm = AlgorithmConfig(reward_kl=RewardKlConfig(coef=COEF, target=0.1))
    learner = make_perturbed(tiny, algorithm)
    assert learner.reference is not None
    learner.reference.module.model.get_output_embeddings().weight.data[:] = math.nan  # type: ignore[attr-defined]
    before = parameters_of(learner)
    metrics = learner.train_step(make_batch(algorithm)[0])
    assert metrics["bad_steps"] == 1
    assert learner.kl_coefficient.value == COEF
    assert_close(before, parameters_of(learner), 0)


class AdaptiveReference:
    """The adaptive controller of Ziegler et al. 2019, section 2.2, as verl and OpenAI's code have it."""

    def __init__(self, value: float, target: float, horizon: int) -> None:
        self.value, self.target, self.horizon = value, target, horizon

    def update(self, current: float, n_steps: int) -> None:
        proportional_error = np.clip(current / self.target - 1, -0.2, 0.2)
        self.value *= 1 + proportional_error * n_steps / self.horizon


def test_the_adaptive_coefficient_equals_the_reference() -> None:
    rng = np.random.default_rng(0)
    ours = KlCoefficient(RewardKlConfig(coef=0.05, target=0.1, horizon=500))
    theirs, fixed = AdaptiveReference(0.05, 0.1, 500), KlCoefficient(RewardKlConfig(coef=0.05))
    for kl, count in zip(rng.exponential(0.1, 200), rng.integers(1, 200, 200), strict=True):
        for coefficient in (ours, fixed):
            coefficient.follow(float(kl), int(count))
        theirs.update(kl, count)
        assert ours.value == pytest.approx(theirs.value, rel=1e-12)
    assert fixed.value == 0.05
    assert abs(ours.value - 0.05) > 0.01
    ours.follow(math.nan, 8)
    assert ours.value == pytest.approx(theirs.value)


def test_a_resumed_run_continues_with_the_same_coefficient(tiny: Path, tmp_path: Path) -> None:
    kl = RewardKlConfig(coef=COEF, kl="k3", target=0.001, horizon=50)
    algorithm = AlgorithmConfig(reward_kl=kl, num_steps=6)

    def make(algorithm: AlgorithmConfig) -> Learner:
        optimizer = OptimizerConfig(lr=1e-3)
        return make_learner(tiny, adapter="none", algorithm=algorithm, learner=LearnerConfig(optimizer=optimizer))

    def train(learner: Learner, first: int, last: int) -> list[float]:
        return [
            learner.train_step(make_batch(algorithm, step=step)[0])["kl/coefficient"] for step in range(first, last)
        ]

    stopped = make(algorithm)
    before = train(stopped, 0, 3)
    assert len({*before}) == 3
    path = CheckpointStore(tmp_path, keep=2).save(stopped, step=3, extra={})
    unbroken = train(stopped, 3, 6)
    resumed = make(algorithm)
    CheckpointStore(tmp_path, keep=2).load(path, resumed)
    assert train(resumed, 3, 6) == unbroken
    assert resumed.kl_coefficient.value == stopped.kl_coefficient.value
    assert_close(parameters_of(stopped), parameters_of(resumed), 0)
    constant = make(AlgorithmConfig(reward_kl=RewardKlConfig(coef=0.7), num_steps=6))
    CheckpointStore(tmp_path, keep=2).load(path, constant)
    assert constant.kl_coefficient.value == 0.7, "a coefficient without a target is the config's"

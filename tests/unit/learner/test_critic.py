"""The critic of generalized advantage estimates: its values, its training, and its checkpoints, against plain torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from learner_cases import assert_close, assign_credit, make_learner, make_rewarded, parameters_of
from torch import Tensor
from transformers import AutoModelForCausalLM

from rlpipe.configs.schema.algorithm_config import AdvantageConfig, AlgorithmConfig, CriticConfig, RewardKlConfig
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.learner.checkpoints import CheckpointStore
from rlpipe.learner.objectives import LearnerInputs, prepare
from rlpipe.learner.step import Learner
from rlpipe.types import Rollout

ALGORITHM = AlgorithmConfig(
    advantage=AdvantageConfig(name="gae", gamma=0.99, lam=0.95),
    critic=CriticConfig(lr=0.01, value_clip=0.05),
    reward_kl=RewardKlConfig(coef=0.1),
    num_minibatches=2,
    num_epochs_per_step=2,
    num_steps=6,
)


def make(tiny: Path, algorithm: AlgorithmConfig = ALGORITHM, *, seed: int | None = None) -> Learner:
    """Return a learner; with a seed, its critic is drawn, and not zero."""
    learner = make_learner(
        tiny, adapter="none", algorithm=algorithm, learner=LearnerConfig(optimizer=OptimizerConfig(lr=1e-3))
    )
    if seed is not None:
        assert learner.critic is not None
        learner.critic.weight.copy_(0.05 * torch.randn(65, generator=torch.Generator().manual_seed(seed)))
    return learner


@torch.no_grad()
def states_of(model: torch.nn.Module, rollout: Rollout) -> Tensor:
    """Return the last hidden states before the loss tokens, with a 1 for the bias ``[K, H + 1]``."""
    tokens = torch.from_numpy(rollout.token_ids).long()
    states = model(input_ids=tokens[None], output_hidden_states=True).hidden_states[-1][0]
    states = states[torch.from_numpy(np.flatnonzero(rollout.loss_mask) - 1)]
    return torch.cat([states, torch.ones(len(states), 1)], dim=1)


def by_place(updates: list[list[LearnerInputs]]) -> list[list[int]]:
    return [[place for part in update for place in part.indices.tolist()] for update in updates]


def test_training_equals_autograd_on_the_clipped_loss_with_adam(tiny: Path) -> None:
    learner = make(tiny, seed=1)
    assert learner.critic is not None
    (batch,), rollouts = make_rewarded(ALGORITHM, max_tokens=60)
    updates = [
        [prepare(learner.policy, micro) for micro in mini_batch.micro_batches] for mini_batch in batch.mini_batches
    ]
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    states = torch.cat([states_of(plain, rollout) for rollout in rollouts])
    rng = np.random.default_rng(0)
    values = states @ learner.critic.weight
    returns = values.double() + torch.from_numpy(rng.normal(0, 0.1, len(values)))
    returns[3] = torch.nan
    weight = torch.nn.Parameter(learner.critic.weight.clone())
    optimizer, losses = torch.optim.Adam([weight], lr=0.01, betas=(0.9, 0.999), eps=1e-8), []
    for places in by_place(updates):
        counted = [place for place in places if place != 3]
        now, before, target = states[counted] @ weight, values[counted], returns[counted].float()
        bounded = torch.clamp(now, before - 0.05, before + 0.05)
        loss = torch.maximum((now - target) ** 2, (bounded - target) ** 2).mean() / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    metrics = learner.critic.fit(updates, values.double(), returns)
    torch.testing.assert_close(learner.critic.weight, weight.detach(), atol=1e-5, rtol=0)
    assert metrics["critic/loss"] == pytest.approx(np.mean(losses), abs=1e-6)
    assert metrics["critic/clip_ratio"] > 0
    assert (weight.detach() - make(tiny, seed=1).critic.weight).abs().max() > 0.01  # type: ignore[union-attr]


def test_advantages_are_those_of_the_critic_before_the_step(tiny: Path) -> None:
    """Compare with values of a plain pass and the recursion, over the tokens of all rollouts; there is no KL."""
    algorithm = AlgorithmConfig(advantage=ALGORITHM.advantage, critic=ALGORITHM.critic)
    learner = make(tiny, algorithm, seed=2)
    assert learner.critic is not None
    weight = learner.critic.weight.clone()
    (batch,), rollouts = make_rewarded(algorithm)
    assert batch.rewards is not None
    plain = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32).eval()
    expected, targets = [], []
    for rollout, reward in zip(rollouts, np.concatenate(batch.rewards.rewards).tolist(), strict=True):
        values = (states_of(plain, rollout) @ weight).tolist()
        last, own = 0.0, []
        for place in reversed(range(len(values))):
            following = values[place + 1] if place + 1 < len(values) else 0.0
            error = (reward if place + 1 == len(values) else 0.0) + 0.99 * following - values[place]
            last = error + 0.99 * 0.95 * last
            own.append(last)
        expected += own[::-1]
        targets += [advantage + value for advantage, value in zip(own[::-1], values, strict=True)]
    (parts,), metrics = assign_credit(learner, algorithm, batch)
    found = {
        place: value
        for part in parts
        for place, value in zip(part.indices.tolist(), part.advantages.tolist(), strict=True)
    }
    want = (np.array(expected) - np.mean(expected)) / np.sqrt(np.var(expected, ddof=1) + 1e-8)
    np.testing.assert_allclose([found[place] for place in range(len(want))], want, atol=2e-5)
    explained = 1 - np.var(expected) / np.var(targets)
    assert metrics["critic/explained_variance"] == pytest.approx(explained, abs=1e-5)
    assert not torch.equal(weight, learner.critic.weight)


def test_a_critic_learns_what_rewards_depend_on(tiny: Path) -> None:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="gae"), critic=CriticConfig(lr=0.01, value_clip=None))
    learner = make_learner(
        tiny, adapter="none", algorithm=algorithm, learner=LearnerConfig(optimizer=OptimizerConfig(lr=0.0))
    )
    (batch,), _ = make_rewarded(algorithm)
    assert batch.rewards is not None
    for group, reward in zip(batch.rewards.rewards, (1.0, 0.0, 2.0, -1.0), strict=True):
        group[:] = reward  # of the prompt alone
    metrics = [learner.train_step(batch) for _ in range(60)]
    assert metrics[0]["critic/explained_variance"] == pytest.approx(0)
    assert metrics[-1]["critic/explained_variance"] > 0.8
    assert metrics[-1]["critic/loss"] < 0.2 * metrics[0]["critic/loss"]


def test_a_resumed_run_continues_with_the_same_critic(tiny: Path, tmp_path: Path) -> None:
    def train(learner: Learner, first: int, last: int) -> None:
        for step in range(first, last):
            learner.train_step(make_rewarded(ALGORITHM, step=step)[0][0])

    stopped, store = make(tiny), CheckpointStore(tmp_path, keep=3)
    without = store.save(make(tiny, AlgorithmConfig(num_steps=6)), step=1, extra={})
    train(stopped, 0, 2)
    path = store.save(stopped, step=2, extra={})
    train(stopped, 2, 4)
    resumed = make(tiny)
    store.load(path, resumed)
    train(resumed, 2, 4)
    assert stopped.critic is not None
    assert resumed.critic is not None
    for name, tensor in stopped.critic.state().items():
        assert torch.equal(tensor, resumed.critic.state()[name]), name
    assert int(resumed.critic.num_updates) == 16
    assert_close(parameters_of(stopped), parameters_of(resumed), 0)
    fresh = make(tiny)
    store.load(without, fresh)
    assert fresh.critic is not None
    assert not fresh.critic.weight.any(), "a checkpoint without critic leaves it as it begins"
    assert "critic" not in " ".join(stopped.policy.trainable_parameters())

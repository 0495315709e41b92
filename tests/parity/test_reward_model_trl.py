"""Tests that the loss of a reward model and its gradient equal those that TRL's own code computes.

TRL's loss runs on a stand-in for its trainer and model, which hands it the rewards as a leaf tensor.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from trl.trainer.reward_trainer import RewardTrainer

from rlpipe.algorithms.preferences import RewardPairInputs, bradley_terry_loss
from rlpipe.configs.schema.preference_config import RewardModelConfig

PAIRS, CASES = 50, 4


class Stand:
    """Stand-in for a trainer, with the attributes that TRL's loss reads."""

    def __init__(self, center_coef: float | None) -> None:
        self.model = SimpleNamespace(training=True)
        self.args = SimpleNamespace(center_rewards_coefficient=center_coef)
        same = lambda value: value  # noqa: E731
        self.accelerator = SimpleNamespace(gather=same, gather_for_metrics=same)
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}
        self._total_train_tokens, self._tp_size = 0, 1

    def metric(self, name: str) -> float:
        (value,) = self._metrics["train"][name]
        return float(value)


def gradient(loss: Tensor, rewards: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(loss, rewards, retain_graph=True)
    return found


@pytest.mark.parametrize("center_coef", [None, 0.01, 0.7])
@pytest.mark.parametrize("has_margins", [False, True])
def test_the_loss_equals_that_of_the_reward_trainer(has_margins: bool, center_coef: float | None) -> None:
    for seed in range(CASES):
        generator = torch.Generator().manual_seed(seed)
        rewards = (torch.randn(2 * PAIRS, 1, generator=generator, dtype=torch.float64) * 3).requires_grad_()
        margins = torch.randn(PAIRS, generator=generator, dtype=torch.float64)
        batch = {"input_ids": torch.zeros(2 * PAIRS, 3), "attention_mask": torch.ones(2 * PAIRS, 3)}
        stand = Stand(center_coef)
        theirs = RewardTrainer.compute_loss(
            stand,
            lambda **_: SimpleNamespace(logits=rewards),  # noqa: B023
            batch | ({"margin": margins} if has_margins else {}),
        )
        inputs = RewardPairInputs(
            rewards=torch.stack(rewards[:, 0].chunk(2), dim=1),
            margins=margins if has_margins else torch.zeros(PAIRS),
            num_pairs=PAIRS,
        )
        own = bradley_terry_loss(inputs, RewardModelConfig(center_coef=center_coef or 0.0))
        torch.testing.assert_close(own.loss, theirs, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient(own.loss, rewards), gradient(theirs, rewards), rtol=1e-6, atol=1e-6)
        values = own.metrics.values()
        assert values["rewards/accuracies"] == pytest.approx(stand.metric("accuracy"))
        assert values["rewards/margins"] == pytest.approx(stand.metric("margin"))

"""Losses of reward models.

Shapes: P pairs and K steps of a micro batch. The loss of pairs is that of TRL's ``RewardTrainer``. Every loss is a sum
over the micro batch divided by counts of the whole update, as in ``rlpipe.algorithms.losses``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from rlpipe.algorithms.losses import LossOutput
from rlpipe.algorithms.metrics import MetricSums
from rlpipe.algorithms.preferences import add_pair_rewards
from rlpipe.configs.schema.algorithm_config import RewardModelConfig


@dataclass(kw_only=True, slots=True)
class RewardPairInputs:
    """Rewards of one micro batch of pairs, the chosen completion in column 0, and the number of pairs of its update."""

    rewards: Tensor  # [P, 2], with gradient
    margins: Tensor  # [P]
    num_pairs: int
    """Pairs of the update, on all ranks."""


def bradley_terry_loss(inputs: RewardPairInputs, config: RewardModelConfig) -> LossOutput:
    """Return the share of a micro batch's pairs in the loss, the mean over pairs (arXiv:2203.02155, equation 1).

    With rewards c and r of the chosen and the rejected completion, a pair adds -log σ(c - r - margin), plus
    center_coef · (c + r)² (arXiv:2312.09244).
    """
    chosen, rejected = inputs.rewards.unbind(1)
    losses = -logsigmoid(chosen - rejected - inputs.margins) + config.center_coef * (chosen + rejected) ** 2
    loss = losses.sum() / max(inputs.num_pairs, 1)
    metrics = MetricSums(num_tokens=torch.tensor(len(chosen), device=chosen.device))
    metrics.add_total("loss", loss)
    add_pair_rewards(metrics, inputs.rewards)
    return LossOutput(loss=loss, metrics=metrics)


@dataclass(kw_only=True, slots=True)
class StepInputs:
    """Logits of the labels false and true at the ends of one micro batch's steps, and the number of steps."""

    logits: Tensor  # [K, 2], with gradient
    labels: Tensor  # [K] int64, 0 or 1
    num_steps: int
    """Steps of the update, on all ranks."""


def step_loss(inputs: StepInputs) -> LossOutput:
    """Return the share of a micro batch in the cross-entropy of the labels, the mean over steps (arXiv:2305.20050)."""
    losses = cross_entropy(inputs.logits, inputs.labels, reduction="none")
    loss = losses.sum() / max(inputs.num_steps, 1)
    good = inputs.logits.softmax(1)[:, 1]
    metrics = MetricSums(num_tokens=torch.tensor(len(losses), device=losses.device))
    metrics.add_total("loss", loss)
    metrics.add_mean("rewards/mean", good)
    metrics.add_mean("rewards/accuracies", (inputs.logits.argmax(1) == inputs.labels).float())
    return LossOutput(loss=loss, metrics=metrics)

"""Losses of preferences, over pairs or over completions that are good or bad, and of reward models.

Shapes: P pairs of a micro batch, S sequences and K steps of it. A completion's log-prob is the sum over its loss
tokens. Every loss is a sum over the micro batch divided by counts of the whole update, as in
``rlpipe.algorithms.losses``.

Definitions and signs are TRL's (``DPOTrainer``, ``KTOTrainer``, the experimental ``ORPOTrainer``, ``CPOTrainer``, and
``RewardTrainer`` for pairs of a reward model), except that ORPO's cross-entropy covers the completion alone, as in its
paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, logsigmoid

from rlpipe.algorithms.losses import LossOutput
from rlpipe.algorithms.metrics import MetricSums
from rlpipe.algorithms.plugins import PREFERENCE, call_function, own_error, registrar
from rlpipe.algorithms.user_tensors import check_finite, check_gradient, check_shapes
from rlpipe.configs.schema.preference_config import PreferenceConfig, RewardModelConfig


@dataclass(kw_only=True, slots=True)
class PairInputs:
    """Pairs of one micro batch, the chosen completion in column 0, and the counts of its update."""

    logprobs: Tensor  # [P, 2], with gradient
    ref_logprobs: Tensor | None  # [P, 2]; None for a loss without a reference
    lengths: Tensor  # [P, 2], loss tokens
    num_pairs: int
    """Pairs of the update, on all ranks."""
    num_chosen_tokens: int
    """Loss tokens of the update's chosen completions, on all ranks."""


@dataclass(kw_only=True, slots=True)
class LabelledInputs:
    """Completions of one micro batch that are good or bad, and the counts of its update."""

    logprobs: Tensor  # [S], with gradient
    ref_logprobs: Tensor  # [S]
    is_good: Tensor  # [S] bool
    kl: Tensor
    """Estimate of the KL to the reference (scalar, at least 0), from the update's mismatched completions."""
    num_sequences: int
    """Completions of the update, on all ranks."""


@dataclass(kw_only=True, slots=True, frozen=True)
class PairScores:
    """Log-ratios of completions to the reference, or their log-probs without one; the chosen ones are in column 0."""

    sums: Tensor  # [P, 2], with gradient
    lengths: Tensor  # [P, 2], loss tokens
    config: PreferenceConfig

    @property
    def means(self) -> Tensor:
        """Means over the completions' tokens ``[P, 2]``."""
        return self.sums / self.lengths.clamp(min=1)

    @property
    def difference(self) -> Tensor:
        return self.sums[:, 0] - self.sums[:, 1]  # [P]

    @property
    def mean_difference(self) -> Tensor:
        return self.means[:, 0] - self.means[:, 1]  # [P]


PairLoss = Callable[[PairScores], Tensor]
"""A loss of each pair ``[P]``."""
PAIR_LOSSES: dict[str, PairLoss] = {}
"""The built-in losses of pairs by ``algorithm.preference.loss``."""
register_pair_loss = registrar(PAIR_LOSSES)


@register_pair_loss("dpo")
def dpo(scores: PairScores) -> Tensor:
    """Return DPO's loss (arXiv:2305.18290), with label smoothing that of cDPO."""
    return _smoothed(scores.config.beta * scores.difference, scores.config.label_smoothing)


@register_pair_loss("hinge")
def hinge(scores: PairScores) -> Tensor:
    """Return SLiC's hinge loss (arXiv:2309.06657)."""
    return (1 - scores.config.beta * scores.difference).relu()


@register_pair_loss("ipo")
def ipo(scores: PairScores) -> Tensor:
    """Return IPO's squared loss (arXiv:2310.12036), of means over tokens."""
    return (scores.mean_difference - 1 / (2 * scores.config.beta)) ** 2


@register_pair_loss("robust")
def robust(scores: PairScores) -> Tensor:
    """Return the loss that is unbiased if a share of the labels is flipped (arXiv:2403.00409)."""
    logits, flipped = scores.config.beta * scores.difference, scores.config.label_smoothing
    return (flipped * logsigmoid(-logits) - (1 - flipped) * logsigmoid(logits)) / (1 - 2 * flipped)


@register_pair_loss("exo")
def exo(scores: PairScores) -> Tensor:
    """Return EXO's reverse KL for pairs (arXiv:2402.00856, equation 16)."""
    logits, flipped = scores.config.beta * scores.difference, scores.config.label_smoothing
    positive_term = logits.sigmoid() * (logsigmoid(logits) - math.log1p(-flipped))
    return positive_term + (-logits).sigmoid() * (logsigmoid(-logits) - math.log(flipped))


@register_pair_loss("nca_pair")
def nca_pair(scores: PairScores) -> Tensor:
    """Return NCA's loss for pairs (arXiv:2402.05369)."""
    chosen, rejected = (scores.config.beta * scores.sums).unbind(1)
    return -logsigmoid(chosen) - 0.5 * logsigmoid(-chosen) - 0.5 * logsigmoid(-rejected)


@register_pair_loss("sppo")
def sppo(scores: PairScores) -> Tensor:
    """Return SPPO's loss with hard labels (arXiv:2405.00675)."""
    chosen, rejected = scores.sums.unbind(1)
    return (chosen - 0.5 / scores.config.beta) ** 2 + (rejected + 0.5 / scores.config.beta) ** 2


@register_pair_loss("apo_zero")
def apo_zero(scores: PairScores) -> Tensor:
    """Return APO's loss for chosen completions better than the model's own (arXiv:2408.06266, equation 7)."""
    chosen, rejected = (scores.config.beta * scores.sums).sigmoid().unbind(1)
    return 1 - chosen + rejected


@register_pair_loss("apo_down")
def apo_down(scores: PairScores) -> Tensor:
    """Return APO's loss for chosen completions worse than the model's own (arXiv:2408.06266, equation 8)."""
    return (scores.config.beta * scores.sums[:, 0]).sigmoid() + 1 - (scores.config.beta * scores.difference).sigmoid()


@register_pair_loss("cpo")
def cpo(scores: PairScores) -> Tensor:
    """Return CPO's contrast (arXiv:2401.08417), which its cross-entropy is added to."""
    return dpo(scores)


@register_pair_loss("simpo")
def simpo(scores: PairScores) -> Tensor:
    """Return SimPO's loss (arXiv:2405.14734), of means over tokens with a target margin."""
    return _smoothed(scores.config.beta * scores.mean_difference - scores.config.margin, scores.config.label_smoothing)


@register_pair_loss("orpo")
def orpo(scores: PairScores) -> Tensor:
    """Return ORPO's log odds ratio (arXiv:2403.07691), which its cross-entropy is added to."""
    log_odds = scores.means - _log1mexp(scores.means)
    return -scores.config.beta * logsigmoid(log_odds[:, 0] - log_odds[:, 1])


def _smoothed(logits: Tensor, flipped: float) -> Tensor:
    return -(1 - flipped) * logsigmoid(logits) - flipped * logsigmoid(-logits)


def _log1mexp(logs: Tensor) -> Tensor:
    """Return log(1 - exp(x)) of ``logs`` below 0, exact near 0 and far from it."""
    clamped = logs.clamp(max=-torch.finfo(logs.dtype).tiny)  # a completion of probability 1 has finite odds, too
    is_near = clamped > -math.log(2)
    log_near = torch.log(-torch.expm1(torch.where(is_near, clamped, -1.0)))
    return torch.where(is_near, log_near, torch.log1p(-torch.exp(clamped)))


MEAN_LOSSES = ("ipo", "orpo", "simpo")
"""Losses that compare means over tokens; so do their implicit rewards."""


def pair_loss(inputs: PairInputs, config: PreferenceConfig) -> LossOutput:
    """Return the share of a micro batch's pairs in the loss: the mean over pairs, plus the chosen's cross-entropy."""
    sums = inputs.logprobs if inputs.ref_logprobs is None else inputs.logprobs - inputs.ref_logprobs
    scores = PairScores(sums=sums, lengths=inputs.lengths, config=config)
    losses = PAIR_LOSSES[config.loss](scores) if config.path is None else _custom_losses(scores)
    loss = losses.sum() / max(inputs.num_pairs, 1)
    metrics = MetricSums(num_tokens=inputs.lengths.new_tensor(len(inputs.lengths)))
    if config.cross_entropy_coef:
        cross_entropy = -inputs.logprobs[:, 0].sum() / max(inputs.num_chosen_tokens, 1)
        metrics.add_total("preference/cross_entropy", cross_entropy)
        loss = loss + config.cross_entropy_coef * cross_entropy
    metrics.add_total("loss", loss)
    rewards = config.beta * (scores.means if config.loss in MEAN_LOSSES else scores.sums).detach()  # [P, 2]
    add_pair_rewards(metrics, rewards)
    metrics.add_mean("logps/chosen", inputs.logprobs[:, 0])
    metrics.add_mean("logps/rejected", inputs.logprobs[:, 1])
    if inputs.ref_logprobs is not None:
        metrics.add_mean("kl", sums.mean(1))
    return LossOutput(loss=loss, metrics=metrics)


def add_pair_rewards(metrics: MetricSums, rewards: Tensor) -> None:
    """Add the means of the rewards ``[P, 2]`` of pairs, of their margins, and the share of pairs in the right order."""
    chosen, rejected = rewards.unbind(1)
    metrics.add_mean("rewards/chosen", chosen)
    metrics.add_mean("rewards/rejected", rejected)
    metrics.add_mean("rewards/margins", chosen - rejected)
    metrics.add_mean("rewards/accuracies", (chosen > rejected).float())


def _custom_losses(scores: PairScores) -> Tensor:
    """Return what the user's function returns; raise ``RunError`` if it is not one finite loss for each pair."""
    fail = partial(own_error, scores.config, PREFERENCE)
    losses: Tensor = call_function(scores.config, PREFERENCE, scores)
    check_shapes({"losses": losses}, scores.sums.shape[:1], "pair", fail)
    check_gradient(losses, scores.sums, "scores.sums", fail)
    check_finite(losses, torch.ones_like(losses, dtype=torch.bool), scores.sums, "pairs", fail)
    return losses


def kto_loss(inputs: LabelledInputs, config: PreferenceConfig) -> LossOutput:
    """Return the share of a micro batch in KTO's loss (arXiv:2402.01306), the mean over completions.

    With r = log π/π_ref of a completion, a good one adds desirable_weight · (1 - σ(β (r - kl))), a bad one
    undesirable_weight · (1 - σ(β (kl - r))).
    """
    ratios, good = inputs.logprobs - inputs.ref_logprobs, inputs.is_good
    signs = torch.where(good, 1.0, -1.0)
    weights = torch.where(good, config.desirable_weight, config.undesirable_weight)
    losses = weights * (1 - (config.beta * signs * (ratios - inputs.kl)).sigmoid())
    loss = losses.sum() / max(inputs.num_sequences, 1)
    metrics = MetricSums(num_tokens=good.new_tensor(len(good), dtype=torch.int64))
    metrics.add_total("loss", loss)
    metrics.add_mean("kl", inputs.kl.expand(len(good)))
    metrics.add_mean("rewards/accuracies", ((ratios > inputs.kl) == good).float())
    for name, mask in (("chosen", good), ("rejected", ~good)):
        metrics.add_total(f"count/{name}", mask.sum())
        metrics.add_total(f"rewards/{name}", config.beta * torch.where(mask, ratios, 0).sum())
        metrics.add_total(f"logps/{name}", torch.where(mask, inputs.logprobs, 0).sum())
    return LossOutput(loss=loss, metrics=metrics)


def labelled_means(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a step of KTO with means over its good and its bad completions in place of their sums."""
    metrics = dict(values)
    for name in ("chosen", "rejected"):
        count = metrics.pop(f"count/{name}")
        for key in (f"rewards/{name}", f"logps/{name}"):
            total = metrics.pop(key)
            if count:
                metrics[key] = total / count
    if {"rewards/chosen", "rewards/rejected"} <= metrics.keys():
        metrics["rewards/margins"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
    return metrics


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
    solution_ids: Tensor  # [K] int64, in [0, S), of the solution that a step belongs to; steps are in order
    num_steps: int
    """Steps of the update, on all ranks."""


NUM_SOLUTIONS = "count/solutions"


def step_loss(inputs: StepInputs) -> LossOutput:
    """Return the share of a micro batch in the cross-entropy of the labels, the mean over steps (arXiv:2305.20050)."""
    losses = cross_entropy(inputs.logits, inputs.labels, reduction="none")
    loss = losses.sum() / max(inputs.num_steps, 1)
    good = inputs.logits.softmax(1)[:, 1]
    metrics = MetricSums(num_tokens=torch.tensor(len(losses), device=losses.device))
    metrics.add_total("loss", loss)
    metrics.add_mean("rewards/mean", good)
    predicted = inputs.logits.argmax(1)
    metrics.add_mean("rewards/accuracies", (predicted == inputs.labels).float())
    judged = _first_errors(predicted, inputs.solution_ids) == _first_errors(inputs.labels, inputs.solution_ids)
    metrics.add_total("rewards/first_errors", judged.sum())
    metrics.add_total(NUM_SOLUTIONS, judged.new_tensor(len(judged), dtype=torch.int64))
    return LossOutput(loss=loss, metrics=metrics)


def solution_means(values: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of a process reward model with a share of its solutions in place of their number."""
    metrics = dict(values)
    metrics["rewards/first_errors"] /= max(metrics.pop(NUM_SOLUTIONS), 1)
    return metrics


def _first_errors(labels: Tensor, solution_ids: Tensor) -> Tensor:
    """Return the index ``[S]`` of each solution's first step labelled 0, or K if it has none, of K steps in order."""
    num_steps = len(labels)
    steps = torch.arange(num_steps, device=labels.device).masked_fill(labels == 1, num_steps)
    num_solutions = int(solution_ids[-1]) + 1 if num_steps else 0
    return steps.new_full((num_solutions,), num_steps).scatter_reduce(0, solution_ids, steps, "amin")

"""The policy-gradient and supervised losses of one micro batch; any split of a step adds up to the same loss.

Shapes: N packed tokens of the micro batch, which contains only whole sequences. Every loss is a sum over the
micro batch divided by counts of the whole update, so that the losses and gradients of all micro batches on all ranks
add up to those of the update: sum them over micro batches, and sum (do not average) them over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlpipe.algorithms.corrections import MAX_LOG_RATIO, correct, sequence_means, sequence_sums
from rlpipe.algorithms.metrics import MetricSums
from rlpipe.configs.schema.algorithm_config import CorrectionConfig, LossConfig


@dataclass(kw_only=True, slots=True)
class LossInputs:
    """One micro batch, and the counts of its update; values where unmasked are not read."""

    logprobs: Tensor  # [N], with gradient
    loss_mask: Tensor  # [N] bool
    sequence_ids: Tensor  # [N] int64: which sequence of the micro batch a token belongs to, from 0
    num_loss_tokens: int
    """Loss tokens of the update, on all ranks."""
    num_sequences: int
    """Rollouts of the update, on all ranks."""
    max_completion_tokens: int
    """Longest completion that the run allows (aggregate: constant)."""
    advantages: Tensor | None = None  # [N]
    sampling_logprobs: Tensor | None = None  # [N], of the policy that drew the tokens
    old_logprobs: Tensor | None = None  # [N], of the policy before the update; None: it is the present one
    ref_logprobs: Tensor | None = None  # [N]
    entropy: Tensor | None = None  # [N], with gradient if entropy_coef is above 0
    shares: Tensor | None = None  # [N], of a token's sequence in its episode's loss tokens; None: all of them


@dataclass(kw_only=True, slots=True)
class LossOutput:
    """The share of one micro batch in the update's loss (scalar, with gradient) and in its metrics."""

    loss: Tensor
    metrics: MetricSums


def policy_loss(inputs: LossInputs, config: LossConfig, correction: CorrectionConfig | None = None) -> LossOutput:
    """Return the surrogate, minus the entropy bonus, plus the KL to the reference; needs ``advantages``.

    With ratio ρ = exp(logprobs - old_logprobs), at the level that the config names, and advantage a, each loss token
    adds, weighted as ``aggregate`` says,

    - ``clip``: -min(ρ a, clip(ρ, 1 - clip_low, 1 + clip_high) a), ρ bounded by clip_delta first (PPO, arXiv:1707.06347;
      GSPO, arXiv:2507.18071; two-sided, arXiv:2505.07291, with clip_delta at least 1 + clip_high)
    - ``cispo``: -stopgrad(min(ρ, 1 + clip_high)) a logprob (arXiv:2506.13585)
    - ``reinforce``: -a logprob

    If ``sampling_logprobs`` are given, ``correction`` weights each of these (see ``rlpipe.algorithms.corrections``).
    """
    assert inputs.advantages is not None, "policy_loss needs advantages"
    mask = inputs.loss_mask
    advantages = torch.where(mask, inputs.advantages, 0)
    logprobs = torch.where(mask, inputs.logprobs, 0)
    old_logprobs = logprobs.detach() if inputs.old_logprobs is None else torch.where(mask, inputs.old_logprobs, 0)
    metrics = MetricSums(num_tokens=mask.sum())
    if config.name == "reinforce":
        per_token = -advantages * logprobs
    else:
        ratio = _ratio(logprobs - old_logprobs, inputs, config.level)
        per_token = _surrogate(ratio, advantages, logprobs, config)
        _add_clip_metrics(metrics, ratio.detach(), advantages, mask, config)
    kl_weights: Tensor | float = 1.0
    if inputs.sampling_logprobs is not None:
        log_weights = old_logprobs - torch.where(mask, inputs.sampling_logprobs, 0)
        settings = correction or CorrectionConfig()
        weights = correct(log_weights, advantages, mask, inputs.sequence_ids, settings, metrics)
        per_token, kl_weights = per_token * weights.surrogate, weights.kl
    per_token = per_token + _regularization(logprobs, inputs, config, metrics, kl_weights)
    return _output(per_token, _token_weights(inputs, config.aggregate), metrics)


def sft_loss(inputs: LossInputs) -> LossOutput:
    """Return the negative log-likelihood, averaged over the loss tokens of the update."""
    mask = inputs.loss_mask
    metrics = MetricSums(num_tokens=mask.sum())
    if inputs.entropy is not None:
        metrics.add_mean("entropy", torch.where(mask, inputs.entropy, 0))
    return _output(-torch.where(mask, inputs.logprobs, 0), _token_weights(inputs, "token"), metrics)


def _output(per_token: Tensor, weights: Tensor, metrics: MetricSums) -> LossOutput:
    loss = (per_token * weights).sum()
    metrics.add_total("loss", loss)
    return LossOutput(loss=loss, metrics=metrics)


def _token_weights(inputs: LossInputs, aggregate: str) -> Tensor:
    """Return the weight of each token in the update's loss ``[N]``; 0 where unmasked."""
    weights = inputs.loss_mask.to(inputs.logprobs.dtype)
    if aggregate == "token":
        return weights / max(inputs.num_loss_tokens, 1)
    if aggregate == "constant":
        return weights / max(inputs.num_sequences * inputs.max_completion_tokens, 1)
    lengths = sequence_sums(weights, inputs.sequence_ids).clamp(min=1)
    weights = weights if inputs.shares is None else weights * inputs.shares
    return weights / (lengths * max(inputs.num_sequences, 1))


def _ratio(log_ratio: Tensor, inputs: LossInputs, level: str) -> Tensor:
    """Return the importance ratio of each token ``[N]``; at sequence level, that of its sequence."""
    if level == "sequence":
        log_ratio = sequence_means(log_ratio, inputs.loss_mask, inputs.sequence_ids)
    elif level == "sequence_product":
        log_ratio = sequence_sums(log_ratio, inputs.sequence_ids)
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _surrogate(ratio: Tensor, advantages: Tensor, logprobs: Tensor, config: LossConfig) -> Tensor:
    if config.name == "cispo":
        return -ratio.clamp(max=1 + config.clip_high).detach() * advantages * logprobs
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    bounded = ratio if config.clip_delta is None else ratio.clamp(max=config.clip_delta)
    return -torch.minimum(bounded * advantages, clipped * advantages)


def _regularization(
    logprobs: Tensor, inputs: LossInputs, config: LossConfig, metrics: MetricSums, kl_weights: Tensor | float
) -> Tensor:
    """Return per token beta times the weighted k3 estimate of the KL minus entropy_coef times the entropy ``[N]``.

    k3 is exp(x) - x - 1 with x = ref_logprobs - logprobs (http://joschu.net/blog/kl-approx.html).
    """
    penalty = torch.zeros_like(logprobs)
    assert inputs.entropy is not None or config.entropy_coef == 0, "entropy_coef needs the entropy"
    assert inputs.ref_logprobs is not None or config.beta == 0, "beta needs ref_logprobs"
    if inputs.entropy is not None:
        entropy = torch.where(inputs.loss_mask, inputs.entropy, 0)
        metrics.add_mean("entropy", entropy)
        penalty = penalty - config.entropy_coef * entropy if config.entropy_coef else penalty
    if inputs.ref_logprobs is not None:
        log_ratio = torch.where(inputs.loss_mask, inputs.ref_logprobs, 0) - logprobs
        kl = log_ratio.exp() - log_ratio - 1
        metrics.add_mean("kl", kl)
        penalty = penalty + config.beta * kl_weights * kl if config.beta else penalty
    return penalty


def _add_clip_metrics(metrics: MetricSums, ratio: Tensor, advantages: Tensor, mask: Tensor, config: LossConfig) -> None:
    """Add the share of loss tokens whose ratio the surrogate clips, below and above."""
    high = mask & (ratio > 1 + config.clip_high)
    if config.name == "cispo":
        low = torch.zeros_like(mask)
    else:
        low = mask & (ratio < 1 - config.clip_low) & (advantages < 0)
        high = high & (advantages > 0)
    metrics.add_mean("clip_ratio/low_mean", low)
    metrics.add_mean("clip_ratio/high_mean", high)
    metrics.add_mean("clip_ratio/region_mean", low | high)

"""The policy-gradient and supervised losses of one micro batch; any split of a step adds up to the same loss.

Shapes: N packed tokens of the micro batch, which contains only whole sequences. Every loss is a sum over the
micro batch divided by counts of the whole update, so that the losses and gradients of all micro batches on all ranks
add up to those of the update: sum them over micro batches, and sum (do not average) them over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from rlpipe.algorithms.corrections import Correction, correct, keep_top_entropy, sequence_sums
from rlpipe.algorithms.metrics import MetricSums
from rlpipe.algorithms.surrogates import SurrogateInputs, SurrogateOutput, find_surrogate
from rlpipe.configs.schema.algorithm_config import CorrectionConfig, LossConfig, RewardKlConfig

MAX_KL_ERROR = 0.2
"""Largest relative error of the KL that the adaptive coefficient takes note of."""


MAX_K3_LOG_RATIO = 20.0


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
    sampling_logprobs: Tensor | None = None  # [N], of the policy that sampled the tokens
    old_logprobs: Tensor | None = None  # [N], of the policy before the update; None: it is the present one
    ref_logprobs: Tensor | None = None  # [N]
    entropy: Tensor | None = None  # [N], with gradient if entropy_coef is above 0
    shares: Tensor | None = None  # [N], of a token's sequence in its episode's loss tokens; None: all of them
    entropy_weight: float | None = None
    """Weight of the entropy bonus; None: ``entropy_coef``."""


@dataclass(kw_only=True, slots=True)
class LossOutput:
    """The share of one micro batch in the update's loss (scalar, with gradient) and in its metrics."""

    loss: Tensor
    metrics: MetricSums


class EntropyBonus:
    """The weight of the entropy bonus, which may follow a target as in TRL, after Skywork-OR1 (arXiv:2505.22312).

    With a target, a coefficient rises by ``entropy_step`` after each update whose entropy is not above the target, to
    ``entropy_coef_max`` at most, and falls after any other, to ``entropy_coef_min`` at least. It is the weight of the
    next update if the entropy is not above the target; else that has no bonus, and nor has the first one.
    """

    def __init__(self, config: LossConfig) -> None:
        self._config = config
        self.coef = config.entropy_coef
        self.is_on = config.entropy_target is None
        """Whether the next update has the bonus."""

    @property
    def weight(self) -> float:
        return self.coef if self.is_on else 0.0

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: nothing of a constant weight, which is the config's."""
        return {} if self._config.entropy_target is None else {"coef": self.coef, "is_on": self.is_on}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the state in a checkpoint, within the config's bounds, if the weight follows a target."""
        if state and self._config.entropy_target is not None:
            coef = min(max(state["coef"], self._config.entropy_coef_min), self._config.entropy_coef_max)
            self.coef, self.is_on = coef, state["is_on"]

    def follow(self, entropy: float) -> None:
        """Take note of the mean entropy of an update's tokens; one that is not finite changes nothing."""
        config, target = self._config, self._config.entropy_target
        if target is None or not math.isfinite(entropy):
            return
        self.is_on = entropy <= target
        if self.is_on:
            self.coef = min(self.coef + config.entropy_step, config.entropy_coef_max)
        else:
            self.coef = max(self.coef - config.entropy_step, config.entropy_coef_min)


class KlCoefficient:
    """The weight of the KL in the reward, which may follow a target (Ziegler et al. 2019, arXiv:1909.08593).

    With a target, it is multiplied after each step by 1 + e n / horizon, with n the step's rollouts and e the relative
    error of their KL, clipped to [-0.2, 0.2].
    """

    def __init__(self, config: RewardKlConfig) -> None:
        self._config = config
        self.value = config.coef

    def state(self) -> float | None:
        """Return the value that a checkpoint keeps, or None if it is constant, so that the config has it."""
        return None if self._config.target is None else self.value

    def restore(self, value: float | None) -> None:
        """Continue from the value in a checkpoint, if the coefficient follows a target."""
        if value is not None and self._config.target is not None:
            self.value = value

    def follow(self, kl: float, num_rollouts: int) -> None:
        """Take note of the mean KL of a step's rollouts; one that is not finite changes nothing."""
        target = self._config.target
        if target is not None and math.isfinite(kl):
            error = min(max(kl / target - 1, -MAX_KL_ERROR), MAX_KL_ERROR)
            self.value *= 1 + error * num_rollouts / self._config.horizon


def policy_loss(inputs: LossInputs, config: LossConfig, correction: CorrectionConfig | None = None) -> LossOutput:
    """Return the surrogate, minus the entropy bonus, plus the KL to the reference; needs ``advantages``.

    Each loss token adds what the config's surrogate gives it (see ``rlpipe.algorithms.surrogates``), weighted as
    ``aggregate`` says. If ``sampling_logprobs`` are given, ``correction`` weights each of these (see
    ``rlpipe.algorithms.corrections``).
    """
    mask = inputs.loss_mask
    metrics = MetricSums(num_tokens=mask.sum())
    surrogate_inputs = _surrogate_inputs(inputs, config)
    factors: Correction | None = None
    if inputs.sampling_logprobs is not None:
        metrics.add_mean("sampling/missing_ratio", mask & inputs.sampling_logprobs.isnan())
        log_weights = surrogate_inputs.old_logprobs - surrogate_inputs.sampling_logprobs
        settings = correction or CorrectionConfig()
        factors = correct(log_weights, surrogate_inputs.advantages, mask, inputs.sequence_ids, settings, metrics)
        surrogate_inputs = replace(surrogate_inputs, weights=factors.weights)
    output = find_surrogate(config)(surrogate_inputs)
    _add_surrogate_metrics(metrics, output, mask)
    per_token = torch.where(mask, output.per_token, 0)
    if factors is not None:
        per_token = per_token * (factors.kept if output.is_corrected else factors.surrogate)
    trained = mask
    if config.top_entropy_quantile < 1:
        assert surrogate_inputs.entropy is not None, "top_entropy_quantile needs the entropy"
        trained = keep_top_entropy(surrogate_inputs.entropy, mask, config.top_entropy_quantile)
        metrics.add_mean("entropy/trained_ratio", trained)
        metrics.add_mean("entropy/trained_mean", _mean_over(surrogate_inputs.entropy, trained, mask))
        per_token = per_token * trained
    penalty = _kl_penalty(surrogate_inputs, config, metrics, 1.0 if factors is None else factors.kl)
    if config.level == "sequence_product" and inputs.shares is not None:
        # The product has the gradient of all tokens of a branch already, however long it is.
        per_token = per_token * _token_weights(replace(inputs, shares=None), config.aggregate)
        per_token = per_token + penalty * _token_weights(inputs, config.aggregate)
    else:
        per_token = (per_token + penalty) * _token_weights(inputs, config.aggregate)
    return _output(per_token - _entropy_bonus(inputs, surrogate_inputs, config, trained, metrics), metrics)


def _surrogate_inputs(inputs: LossInputs, config: LossConfig) -> SurrogateInputs:
    """Return the inputs of a surrogate, 0 where unmasked; a sampling log-prob that is NaN counts as the old one."""
    assert inputs.advantages is not None, "policy_loss needs advantages"
    mask = inputs.loss_mask

    def masked(values: Tensor) -> Tensor:
        return torch.where(mask, values, 0)

    logprobs = masked(inputs.logprobs)
    old_logprobs = logprobs.detach() if inputs.old_logprobs is None else masked(inputs.old_logprobs)
    sampling = old_logprobs if inputs.sampling_logprobs is None else masked(inputs.sampling_logprobs)
    return SurrogateInputs(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        sampling_logprobs=torch.where(sampling.isnan(), old_logprobs, sampling),
        advantages=masked(inputs.advantages),
        mask=mask,
        sequence_ids=inputs.sequence_ids,
        weights=torch.ones_like(old_logprobs),
        entropy=None if inputs.entropy is None else masked(inputs.entropy),
        ref_logprobs=None if inputs.ref_logprobs is None else masked(inputs.ref_logprobs),
        config=config,
    )


def sft_loss(inputs: LossInputs) -> LossOutput:
    """Return the negative log-likelihood, averaged over the loss tokens of the update."""
    mask = inputs.loss_mask
    metrics = MetricSums(num_tokens=mask.sum())
    if inputs.entropy is not None:
        metrics.add_mean("entropy", torch.where(mask, inputs.entropy, 0))
    return _output(-torch.where(mask, inputs.logprobs, 0) * _token_weights(inputs, "token"), metrics)


def _output(per_token: Tensor, metrics: MetricSums) -> LossOutput:
    loss = per_token.sum()
    metrics.add_total("loss", loss)
    return LossOutput(loss=loss, metrics=metrics)


def _token_weights(inputs: LossInputs, aggregate: str) -> Tensor:
    """Return the weight of each token in the update's loss ``[N]``; 0 where unmasked."""
    weights = inputs.loss_mask.to(inputs.logprobs.dtype)
    if aggregate == "token":
        return weights / max(inputs.num_loss_tokens, 1)
    if aggregate == "constant":
        return weights / max(inputs.num_sequences * inputs.max_completion_tokens, 1)
    if aggregate == "sequence_sum":
        return weights / max(inputs.num_sequences, 1)
    lengths = sequence_sums(weights, inputs.sequence_ids).clamp(min=1)
    weights = weights if inputs.shares is None else weights * inputs.shares
    return weights / (lengths * max(inputs.num_sequences, 1))


def _entropy_bonus(
    inputs: LossInputs, surrogate_inputs: SurrogateInputs, config: LossConfig, trained: Tensor, metrics: MetricSums
) -> Tensor:
    """Return what each token's entropy takes off the update's loss ``[N]``.

    With a target, the bonus is the mean over the trained tokens, whatever the aggregate, as the target is of that mean.
    """
    weight = config.entropy_coef if inputs.entropy_weight is None else inputs.entropy_weight
    assert surrogate_inputs.entropy is not None or weight == 0, "the entropy bonus needs the entropy"
    if surrogate_inputs.entropy is None:
        return torch.zeros_like(surrogate_inputs.logprobs)
    metrics.add_mean("entropy", surrogate_inputs.entropy)
    if not weight:
        return torch.zeros_like(surrogate_inputs.entropy)
    if config.entropy_target is None:
        return weight * surrogate_inputs.entropy * _token_weights(inputs, config.aggregate)
    return weight * _mean_over(surrogate_inputs.entropy, trained, inputs.loss_mask) * _token_weights(inputs, "token")


def _mean_over(values: Tensor, chosen: Tensor, mask: Tensor) -> Tensor:
    """Return the chosen values ``[N]``, 0 elsewhere, scaled so that the mean over ``mask`` is that of the chosen."""
    return values * chosen * (mask.sum().to(values.dtype) / chosen.sum().clamp(min=1))


def _kl_penalty(
    inputs: SurrogateInputs, config: LossConfig, metrics: MetricSums, weights: Tensor | float
) -> Tensor | float:
    """Return per token beta times the weighted estimate of the KL ``[N]``."""
    assert inputs.ref_logprobs is not None or config.beta == 0, "beta needs ref_logprobs"
    if inputs.ref_logprobs is None:
        return 0.0
    kl = estimate_kl(inputs.ref_logprobs - inputs.logprobs, config.kl)
    metrics.add_mean("kl", kl)
    return config.beta * weights * kl if config.beta else 0.0


def estimate_kl(log_ratio: Tensor, estimator: str) -> Tensor:
    """Return an estimate of the KL divergence from the reference of each token, with x = ref_logprobs - logprobs.

    k1 is -x, k2 x²/2, k3 exp(x) - x - 1, abs |x| (http://joschu.net/blog/kl-approx.html). The mean of k1 and k3 is the
    divergence, but as a loss only k2 has its gradient, and that of k1 is 0 in the mean.
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "abs":
        return log_ratio.abs()
    if estimator != "k3":
        raise ValueError(f"loss.kl is {estimator!r}; use k1, k2, k3 or abs")
    log_ratio = log_ratio.clamp(max=MAX_K3_LOG_RATIO)  # as verl; the square of a larger gradient would overflow
    return log_ratio.exp() - log_ratio - 1


def _add_surrogate_metrics(metrics: MetricSums, output: SurrogateOutput, mask: Tensor) -> None:
    """Add the share of loss tokens that the surrogate clips, below and above, and the means of its own metrics."""
    low, high = output.clipped_low, output.clipped_high
    if low is not None or high is not None:
        low = torch.zeros_like(mask) if low is None else mask & low
        high = torch.zeros_like(mask) if high is None else mask & high
        metrics.add_mean("clip_ratio/low_mean", low)
        metrics.add_mean("clip_ratio/high_mean", high)
        metrics.add_mean("clip_ratio/region_mean", low | high)
    for name, values in output.metrics.items():
        metrics.add_mean(name, torch.where(mask, values, 0))

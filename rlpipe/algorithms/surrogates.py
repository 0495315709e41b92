"""Surrogates of the policy-gradient loss, by name: functions from one inputs type to one outputs type.

Shapes: N packed tokens of one micro batch, which contains only whole sequences. Those of the user's own code (see
``rlpipe.algorithms.plugins``) get the same inputs. l is the log-prob that is trained, p the learner's log-prob at the
start of the step, b the sampler's, a the advantage, and ρ = exp(l - p) the ratio, at the level that the config names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from rlpipe.algorithms.corrections import MAX_LOG_RATIO, sequence_means, sequence_sums
from rlpipe.algorithms.plugins import LOSS, call_function, own_error, registrar
from rlpipe.algorithms.user_tensors import check_finite, check_gradient, check_marks, check_shapes
from rlpipe.configs.schema.algorithm_config import LossConfig

SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT = math.log(1e-8), 20.0
"""Bounds of log-ratios in vespo."""


@dataclass(kw_only=True, slots=True, frozen=True)
class SurrogateInputs:
    """One micro batch; all values are 0 where unmasked."""

    logprobs: Tensor  # [N], with gradient
    old_logprobs: Tensor  # [N], of the policy at the start of the step
    sampling_logprobs: Tensor  # [N], of the policy that sampled the tokens; the old ones where they are not known
    advantages: Tensor  # [N]
    mask: Tensor  # [N] bool, True for loss tokens
    sequence_ids: Tensor  # [N] int64, from 0
    weights: Tensor  # [N], the correction's factors, without gradient; 1 where unmasked
    entropy: Tensor | None  # [N], in nats, with gradient if entropy_coef is above 0
    ref_logprobs: Tensor | None  # [N], of the reference; None without a KL penalty
    config: LossConfig

    @property
    def log_ratio(self) -> Tensor:
        """Differences l - p of tokens ``[N]``."""
        return self.logprobs - self.old_logprobs

    def token_mean(self, values: Tensor) -> Tensor:
        """Return the mean over the loss tokens of the micro batch (scalar)."""
        return torch.where(self.mask, values, 0).sum() / self.mask.sum().clamp(min=1)


@dataclass(kw_only=True, slots=True, frozen=True)
class SurrogateOutput:
    """Loss of each token, before it is corrected and aggregated; values where unmasked are not read."""

    per_token: Tensor  # [N], with gradient, to be minimised
    clipped_low: Tensor | None = None  # [N] bool: tokens that a lower bound holds back
    clipped_high: Tensor | None = None  # [N] bool: tokens that an upper bound holds back
    is_corrected: bool = False
    """True if ``per_token`` has the correction's factors already."""
    metrics: Mapping[str, Tensor] = field(default_factory=dict)
    """Values of tokens ``[N]``, by name, whose mean over the loss tokens is logged; the same names in every call."""


Surrogate = Callable[[SurrogateInputs], SurrogateOutput]
SURROGATES: dict[str, Surrogate] = {}
"""The built-in surrogates by ``algorithm.loss.name``."""
register_surrogate = registrar(SURROGATES)


def find_surrogate(config: LossConfig) -> Surrogate:
    """Return the surrogate of a config: the user's own if it names one."""
    if config.path is not None:
        return partial(_call_custom, config)
    if config.name not in SURROGATES:
        raise ValueError(f"loss.name is {config.name!r}; use {', '.join(SURROGATES)}")
    return SURROGATES[config.name]


def _call_custom(config: LossConfig, inputs: SurrogateInputs) -> SurrogateOutput:
    """Return the output of the user's function, which may return ``per_token`` alone; ``RunError`` if it is unfit."""
    fail = partial(own_error, config, LOSS)
    output = call_function(config, LOSS, inputs)
    output = SurrogateOutput(per_token=output) if isinstance(output, Tensor) else output
    if not isinstance(output, SurrogateOutput):
        raise fail(f"returned {type(output).__name__}, not a tensor [N] or a SurrogateOutput")
    marks = {"clipped_low": output.clipped_low, "clipped_high": output.clipped_high}
    for tensors in ({"per_token": output.per_token}, output.metrics):
        check_shapes(tensors, inputs.mask.shape, "token", fail)
    check_marks(marks, inputs.mask.shape, "token", fail)
    check_gradient(output.per_token, inputs.logprobs, "inputs.logprobs", fail)
    check_finite(output.per_token, inputs.mask, inputs.logprobs, "loss tokens", fail)
    return output


def importance_ratio(inputs: SurrogateInputs) -> Tensor:
    """Return ρ of each token ``[N]``: its own, or that of its sequence.

    If the tokens of a sequence have several advantages, the gradient of its ρ is divided among them, so that each is
    trained by its own (GSPO-token, arXiv:2507.18071). With one advantage the sum is the same, unless factors of single
    tokens follow: these then scale the whole sequence, as in TRL.
    """
    log_ratio = inputs.log_ratio
    if inputs.config.level != "token":
        own = log_ratio
        if inputs.config.level == "sequence":
            log_ratio = sequence_means(own, inputs.mask, inputs.sequence_ids)
        else:
            log_ratio = sequence_sums(own, inputs.sequence_ids)
            own = own * sequence_sums(inputs.mask.to(own.dtype), inputs.sequence_ids)
        divided = log_ratio.detach() + torch.where(own.isfinite(), own - own.detach(), 0)
        log_ratio = torch.where(_has_one_advantage(inputs), log_ratio, divided)
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _has_one_advantage(inputs: SurrogateInputs) -> Tensor:
    """Return for every token whether all loss tokens of its sequence have the same advantage ``[N]``."""
    bounds = []
    for reduce, outside in (("amin", math.inf), ("amax", -math.inf)):
        advantages = torch.where(inputs.mask, inputs.advantages, outside)
        bounds.append(torch.full_like(advantages, outside).scatter_reduce(0, inputs.sequence_ids, advantages, reduce))
    return (bounds[0] >= bounds[1])[inputs.sequence_ids]


@register_surrogate("clip")
def clip(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return -min(ρ a, clip(ρ, 1 - clip_low, 1 + clip_high) a), ρ bounded by clip_delta first.

    PPO, arXiv:1707.06347; at sequence level GSPO, arXiv:2507.18071; two-sided, arXiv:2505.07291, with clip_delta at
    least 1 + clip_high.
    """
    config, advantages = inputs.config, inputs.advantages
    ratio = importance_ratio(inputs)
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    bounded = ratio if config.clip_delta is None else ratio.clamp(max=config.clip_delta)
    return SurrogateOutput(
        per_token=-torch.minimum(bounded * advantages, clipped * advantages),
        clipped_low=(ratio < 1 - config.clip_low) & (advantages < 0),
        clipped_high=(ratio > 1 + config.clip_high) & (advantages > 0),
    )


@register_surrogate("cispo")
def cispo(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return -stopgrad(clip(ρ, cispo_floor, 1 + clip_high)) a l (CISPO, arXiv:2506.13585)."""
    ratio = importance_ratio(inputs)
    low, high = inputs.config.cispo_floor, 1 + inputs.config.clip_high
    return SurrogateOutput(
        per_token=-ratio.clamp(low, high).detach() * inputs.advantages * inputs.logprobs,
        clipped_low=ratio < low,
        clipped_high=ratio > high,
    )


@register_surrogate("reinforce")
def reinforce(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return -a l."""
    return SurrogateOutput(per_token=-inputs.advantages * inputs.logprobs)


@register_surrogate("sapo")
def sapo(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return -4/τ σ(τ (ρ - 1)) a, with one τ for a > 0 and one for the rest (SAPO, arXiv:2511.20347)."""
    config, advantages = inputs.config.sapo, inputs.advantages
    temperature = _choose(advantages > 0, config.temperature_positive, config.temperature_negative, advantages)
    gate = torch.sigmoid(temperature * (importance_ratio(inputs) - 1)) * 4 / temperature
    return SurrogateOutput(per_token=-gate * advantages)


@register_surrogate("vespo")
def vespo(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return -φ(W) a l, with φ(W) = W^k exp(λ (1 - W)) without gradient (VESPO, arXiv:2602.10693).

    W is the product over the sequence of ρ and of the correction's factors, k and λ depend on the sign of a.
    """
    config, advantages = inputs.config.vespo, inputs.advantages
    log_weight = inputs.log_ratio.detach().clamp(-LARGEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
    log_weight = log_weight + inputs.weights.log().clamp(SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
    log_weight = sequence_sums(torch.where(inputs.mask, log_weight, 0), inputs.sequence_ids)
    log_weight = log_weight.clamp(SMALLEST_LOG_WEIGHT, LARGEST_LOG_WEIGHT)
    is_positive = advantages >= 0
    power = _choose(is_positive, config.k_positive, config.k_negative, advantages)
    decay = _choose(is_positive, config.lambda_positive, config.lambda_negative, advantages)
    phi = (decay + power * log_weight - decay * log_weight.exp()).exp()
    phi = phi.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return SurrogateOutput(per_token=-phi * advantages * inputs.logprobs, is_corrected=True, metrics={"vespo/phi": phi})


def _choose(condition: Tensor, first: float, second: float, like: Tensor) -> Tensor:
    """Return one of two numbers for each token, in the type of another tensor (``torch.where`` makes float32)."""
    return torch.where(condition, like.new_tensor(first), like.new_tensor(second))


@register_surrogate("dppo_tv")
def dppo_tv(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return -stopgrad(min(ρ, dppo_cap)) a l, 0 where the token's probability moved too far (arXiv:2602.04879).

    Too far is by more than clip_high upwards for a > 0, by more than clip_low downwards for the rest: the total
    variation between the two policies, of this token against all others.
    """
    moved = (inputs.logprobs.exp() - inputs.old_logprobs.exp()).detach()
    return _truncated_gradient(inputs, moved <= inputs.config.clip_high, moved >= -inputs.config.clip_low)


@register_surrogate("dppo_kl")
def dppo_kl(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return what dppo_tv does, with the KL divergence between token and others as the distance (arXiv:2602.04879)."""
    logprobs, old_logprobs, eps = inputs.logprobs.detach(), inputs.old_logprobs, 1e-8
    new, old = logprobs.exp(), old_logprobs.exp()
    other_tokens = (1 - old) * torch.log((1 - old + eps) / (1 - new + eps))
    divergence = old * (old_logprobs - logprobs) + other_tokens
    return _truncated_gradient(
        inputs,
        (divergence <= inputs.config.clip_high) | (new <= old),
        (divergence <= inputs.config.clip_low) | (new >= old),
    )


def _truncated_gradient(inputs: SurrogateInputs, may_rise: Tensor, may_fall: Tensor) -> SurrogateOutput:
    """Return the truncated policy gradient of the tokens that may still move in the direction of their advantage."""
    rises = inputs.advantages > 0
    kept = torch.where(rises, may_rise, may_fall)
    weight = importance_ratio(inputs).clamp(max=inputs.config.dppo_cap).detach()
    return SurrogateOutput(
        per_token=-weight * inputs.advantages * inputs.logprobs * kept,
        clipped_low=~kept & ~rises,
        clipped_high=~kept & rises,
    )


@register_surrogate("geo_mean")
def geo_mean(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return -a times the geometric mean over the sequence of ρ, each clipped by itself (GMPO, arXiv:2507.20673).

    log ρ is clipped to [-clip_low, clip_high], in the direction of the advantage. A sequence's advantage is the mean of
    its tokens', its correction the geometric mean of its tokens' factors.
    """
    config, log_ratio = inputs.config, inputs.log_ratio
    sign = inputs.advantages.sign()
    bounded = log_ratio.clamp(-config.clip_low, config.clip_high)
    lower = sign * torch.minimum(sign * log_ratio, sign * bounded)
    ratio = sequence_means(lower, inputs.mask, inputs.sequence_ids).clamp(max=MAX_LOG_RATIO).exp()
    advantages = sequence_means(inputs.advantages, inputs.mask, inputs.sequence_ids)
    log_weights = torch.where(inputs.mask, inputs.weights.clamp(min=1e-10).log(), 0)
    weights = sequence_means(log_weights, inputs.mask, inputs.sequence_ids).exp()
    return SurrogateOutput(
        per_token=-advantages * ratio * weights,
        clipped_low=(log_ratio < -config.clip_low) & (sign < 0),
        clipped_high=(log_ratio > config.clip_high) & (sign > 0),
        is_corrected=True,
    )


@register_surrogate("clip_cov")
def clip_cov(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return the loss of clip, 0 for some tokens of high covariance between a and l (Clip-Cov, arXiv:2505.22617).

    Of the micro batch's tokens that clip leaves alone and whose covariance is between covariance.low and high, a share
    of covariance.share of all loss tokens is sampled, at least one; the sample is the same for the same number of them.
    """
    config, output = inputs.config.covariance, clip(inputs)
    ratio, advantages = importance_ratio(inputs), inputs.advantages
    is_clipped = (ratio.clamp(1 - inputs.config.clip_low, 1 + inputs.config.clip_high) - ratio) * advantages < 0
    covariance = _covariance(inputs)
    candidates = inputs.mask & ~is_clipped & (covariance > config.low) & (covariance < config.high)
    indices = candidates.nonzero()[:, 0]
    order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(len(indices)))
    count = max(int(config.share * int(inputs.mask.sum())), 1)
    dropped = torch.zeros_like(inputs.mask)
    dropped[indices[order[:count].to(indices.device)]] = True
    return SurrogateOutput(
        per_token=output.per_token.masked_fill(dropped, 0),
        clipped_low=output.clipped_low,
        clipped_high=output.clipped_high,
        metrics={"covariance/chosen_ratio": dropped.to(ratio.dtype)},
    )


@register_surrogate("kl_cov")
def kl_cov(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return -ρ a, plus covariance.penalty |l - p| for the tokens of highest covariance (KL-Cov, arXiv:2505.22617).

    These are a share of covariance.share of the micro batch's loss tokens, at least one.
    """
    config = inputs.config.covariance
    num_tokens = int(inputs.mask.sum())
    chosen = torch.zeros_like(inputs.mask)
    if num_tokens:
        covariance = _covariance(inputs).masked_fill(~inputs.mask, -math.inf)
        chosen[covariance.topk(max(int(num_tokens * config.share), 1)).indices] = True
    penalty = config.penalty * inputs.log_ratio.abs() * chosen
    ratio = importance_ratio(inputs)
    return SurrogateOutput(
        per_token=-ratio * inputs.advantages + penalty, metrics={"covariance/chosen_ratio": chosen.to(ratio.dtype)}
    )


def _covariance(inputs: SurrogateInputs) -> Tensor:
    """Return each token's part in the covariance of advantages and log-probs ``[N]``."""
    advantages, logprobs = inputs.advantages, inputs.logprobs.detach()
    return (advantages - inputs.token_mean(advantages)) * (logprobs - inputs.token_mean(logprobs))


@register_surrogate("dro")
def dro(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return -a l + dro_beta/2 (l - b)² (DRO, arXiv:2405.19107; as Kimi k1.5 trains, arXiv:2501.12599)."""
    distance = (inputs.logprobs - inputs.sampling_logprobs).square()
    return SurrogateOutput(per_token=-inputs.advantages * inputs.logprobs + 0.5 * inputs.config.dro_beta * distance)


@register_surrogate("m2po")
def m2po(inputs: SurrogateInputs) -> SurrogateOutput:
    """Return -ρ a without the tokens that moved furthest since they were sampled (M2PO, arXiv:2510.01161).

    Tokens of the micro batch are dropped by (l - b)², the largest first, until the mean over the others is below
    m2_threshold; one is always kept.
    """
    moved = (inputs.logprobs - inputs.sampling_logprobs).detach()
    indices = inputs.mask.nonzero()[:, 0]
    squares, order = moved[indices].square().sort(descending=True)
    counts = torch.arange(len(indices), 0, -1, device=indices.device)
    means = squares.flip(0).cumsum(0).flip(0) / counts  # of each and all smaller ones
    num_dropped = (means >= inputs.config.m2_threshold).sum().clamp(max=max(len(indices) - 1, 0))
    dropped = torch.zeros_like(inputs.mask)
    dropped[indices[order]] = torch.arange(len(indices), device=indices.device) < num_dropped
    return SurrogateOutput(
        per_token=(-importance_ratio(inputs) * inputs.advantages).masked_fill(dropped, 0),
        clipped_low=dropped & (moved < 0),
        clipped_high=dropped & (moved > 0),
    )

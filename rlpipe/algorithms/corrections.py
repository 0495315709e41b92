"""Corrections for tokens sampled from another distribution than the learner's: an older policy's, or an engine's.

Shapes: N packed tokens of a micro batch, which contains only whole sequences.

The weight is w = exp(p - b), with p the learner's log-prob at the start of the step and b the sampler's, of a token, or
of a sequence as the sum over its loss tokens (https://fengyao.notion.site/off-policy-rl); 1 where b is not known. The
off-policy mask is from DeepSeek-V3.2 (arXiv:2512.02556), and sequences are rejected as in verl. A correction changes
what tokens contribute, never the counts that a loss is divided by, so a step can still be split into micro batches in
any way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rlpipe.algorithms.metrics import MetricSums
from rlpipe.algorithms.plugins import CORRECTION, call_function, own_error, registrar
from rlpipe.algorithms.user_tensors import check_finite, check_marks, check_shapes
from rlpipe.configs.schema.algorithm_config import CorrectionConfig

LOGPROB_DIFFERENCE = "sampling/logp_difference/max"
"""Metric: the largest difference between a token's log-prob in the learner and in the engine."""
WEIGHTS_SQUARED = "sampling/importance_ratio/square"
"""Mean of the tokens' squared weights, until ``with_effective_ratio`` takes it out."""
MAX_LOG_RATIO = 60.0
"""Largest log-ratio: above it exp would be infinite, and its product with a zero, such as a clipped gradient, nan."""


@dataclass(kw_only=True, slots=True)
class Correction:
    """Factors on each token's share of the loss, without gradient."""

    weights: Tensor  # [N], those of the mode, which are 0 where it drops the token
    kept: Tensor  # [N] bool, False in sequences that the off-policy mask drops or that are rejected
    kl: Tensor  # [N]

    @property
    def surrogate(self) -> Tensor:
        """Product of both factors ``[N]``."""
        return self.weights.masked_fill(~self.kept, 0)


@dataclass(kw_only=True, slots=True)
class CorrectionInputs:
    """One micro batch, as a correction sees it; 0 where ``mask`` is False."""

    log_ratios: Tensor  # [N], p - b, without gradient; 0 where b is not known
    advantages: Tensor  # [N]
    mask: Tensor  # [N] bool, loss tokens
    sequence_ids: Tensor  # [N]
    config: CorrectionConfig


@dataclass(kw_only=True, slots=True)
class CorrectionOutput:
    """Factors on each token's share of the loss, and which tokens have any."""

    weights: Tensor  # [N]
    kept: Tensor | None = None  # [N] bool; None: all tokens
    clipped: Tensor | None = None  # [N] bool, tokens whose weight a bound changed; None: no tokens


Weighing = Callable[[CorrectionInputs], Tensor | CorrectionOutput]
"""Function that returns the weights of a micro batch, alone or with what else it does to tokens."""
CORRECTIONS: dict[str, Weighing] = {}
"""The built-in corrections by ``algorithm.correction.mode``."""
register_correction = registrar(CORRECTIONS)


@register_correction("none")
def uncorrected(inputs: CorrectionInputs) -> Tensor:
    """Return 1 for each token."""
    return torch.ones_like(inputs.log_ratios)


@register_correction("token_truncate")
def token_truncate(inputs: CorrectionInputs) -> CorrectionOutput:
    """Return w of each token, bounded (truncated importance sampling, arXiv:1802.01561)."""
    return _truncate(inputs.log_ratios, inputs)


@register_correction("token_mask")
def token_mask(inputs: CorrectionInputs) -> Tensor:
    """Return w of each token, 0 outside the bounds (IcePop, arXiv:2510.18855)."""
    return _mask(inputs.log_ratios, inputs)


@register_correction("sequence_truncate")
def sequence_truncate(inputs: CorrectionInputs) -> CorrectionOutput:
    """Return the product of w over each token's sequence, bounded."""
    return _truncate(sequence_sums(inputs.log_ratios, inputs.sequence_ids), inputs)


@register_correction("sequence_mask")
def sequence_mask(inputs: CorrectionInputs) -> Tensor:
    """Return the product of w over each token's sequence, 0 outside the bounds."""
    return _mask(sequence_sums(inputs.log_ratios, inputs.sequence_ids), inputs)


def _bounded(log_weights: Tensor, cap: float | None, floor: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return weights ``[N]`` as they are, clamped to the bounds, and which of them are outside.

    Without ``cap`` there is no upper bound; without ``floor`` the lower one is its inverse, which is 0 without both.
    """
    weights = log_weights.clamp(max=MAX_LOG_RATIO).exp()
    cap = math.inf if cap is None else cap
    floor = 1 / cap if floor is None else floor
    return weights, weights.clamp(floor, cap), (weights < floor) | (weights > cap)


def _truncate(log_weights: Tensor, inputs: CorrectionInputs) -> CorrectionOutput:
    _, clamped, outside = _bounded(log_weights, inputs.config.cap, inputs.config.floor)
    return CorrectionOutput(weights=clamped, clipped=outside)


def _mask(log_weights: Tensor, inputs: CorrectionInputs) -> Tensor:
    weights, _, outside = _bounded(log_weights, inputs.config.cap, inputs.config.floor)
    return weights.masked_fill(outside, 0)


def own_correction(inputs: CorrectionInputs) -> CorrectionOutput:
    """Return what the user's function returns; raise ``RunError`` if it is not one finite factor for each token."""
    fail = partial(own_error, inputs.config, CORRECTION)
    returned = call_function(inputs.config, CORRECTION, inputs)
    output = CorrectionOutput(weights=returned) if isinstance(returned, Tensor) else returned
    if not isinstance(output, CorrectionOutput):
        raise fail(f"returned {type(returned).__name__}, not a tensor [N] or a CorrectionOutput")
    check_shapes({"weights": output.weights}, inputs.mask.shape, "token", fail)
    check_marks({"kept": output.kept, "clipped": output.clipped}, inputs.mask.shape, "token", fail)
    check_finite(output.weights, inputs.mask, inputs.log_ratios[inputs.mask], "loss tokens", fail)
    return output


def correct(
    log_weights: Tensor,  # [N], p - b, 0 where unmasked
    advantages: Tensor,  # [N], 0 where unmasked
    loss_mask: Tensor,  # [N] bool
    sequence_ids: Tensor,  # [N]
    config: CorrectionConfig,
    metrics: MetricSums,
) -> Correction:
    """Return the weights of a micro batch; add how far p is from b, and the share of changed tokens, to ``metrics``."""
    log_weights = log_weights.detach()
    inputs = CorrectionInputs(
        log_ratios=log_weights, advantages=advantages, mask=loss_mask, sequence_ids=sequence_ids, config=config
    )
    returned = CORRECTIONS[config.mode](inputs) if config.path is None else own_correction(inputs)
    output = CorrectionOutput(weights=returned) if isinstance(returned, Tensor) else returned
    weights = torch.where(loss_mask, output.weights.detach().to(log_weights.dtype), 1)
    kept = torch.ones_like(loss_mask) if output.kept is None else output.kept | ~loss_mask
    if config.off_policy_threshold is not None:
        far = sequence_means(-log_weights, loss_mask, sequence_ids) > config.off_policy_threshold
        kept = kept & ~(loss_mask & far & (advantages < 0))
    if config.rejection != "none":
        rejected = loss_mask & _rejected(inputs)
        kept = kept & ~rejected
        metrics.add_mean("sampling/rejected_ratio", rejected)
    _add_metrics(metrics, log_weights, loss_mask)
    clipped = torch.zeros_like(loss_mask) if output.clipped is None else output.clipped & loss_mask
    metrics.add_mean("sampling/clipped_ratio", clipped)
    metrics.add_mean("sampling/dropped_ratio", loss_mask & (~kept | (weights == 0)))
    return Correction(weights=weights, kept=kept, kl=weights if config.bias_corrected_kl else torch.ones_like(weights))


def _rejected(inputs: CorrectionInputs) -> Tensor:
    """Return which tokens ``[N]`` are in sequences whose product of w, or its geometric mean, is out of bounds."""
    config = inputs.config
    log_ratios = sequence_sums(inputs.log_ratios, inputs.sequence_ids)
    if config.rejection == "geometric":
        log_ratios = sequence_means(inputs.log_ratios, inputs.mask, inputs.sequence_ids)
    return _bounded(log_ratios, config.rejection_cap, config.rejection_floor)[2]


def keep_top_entropy(entropy: Tensor, loss_mask: Tensor, share: float) -> Tensor:
    """Return the loss tokens ``[N]`` whose entropy is in the micro batch's top share (arXiv:2506.01939); at least one.

    Few tokens of a text decide how it goes on, and those are the ones of high entropy.
    """
    entropies = entropy.detach()[loss_mask].float()
    if not len(entropies):
        return loss_mask
    return loss_mask & (entropy.detach() >= entropies.quantile(1 - share))


def sequence_sums(values: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return for every token the sum over its sequence ``[N]``.

    The sums have N entries, too: no micro batch has more sequences than tokens, and so they need not be counted.
    """
    return torch.zeros_like(values).index_add(0, sequence_ids, values)[sequence_ids]


def sequence_means(values: Tensor, loss_mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return for every token the mean over its sequence's loss tokens ``[N]``; ``values`` is 0 elsewhere."""
    return sequence_sums(values, sequence_ids) / sequence_sums(loss_mask.to(values.dtype), sequence_ids).clamp(min=1)


def with_effective_ratio(values: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics with the effective sample size over the number of tokens: (Σ w)² / (N Σ w²)."""
    metrics = {name: value for name, value in values.items() if name != WEIGHTS_SQUARED}
    if not (squared := values.get(WEIGHTS_SQUARED, 0.0)):
        return metrics
    return metrics | {"sampling/effective_ratio": values["sampling/importance_ratio/mean"] ** 2 / squared}


def _add_metrics(metrics: MetricSums, log_weights: Tensor, mask: Tensor) -> None:
    """Add |p - b|, and w of each token, independent of the mode."""
    weights = torch.where(mask, log_weights.exp(), 0)
    metrics.add_mean("sampling/logp_difference/mean", log_weights.abs())
    metrics.add_max(LOGPROB_DIFFERENCE, log_weights.abs(), mask)
    metrics.add_mean("sampling/importance_ratio/mean", weights)
    metrics.add_min("sampling/importance_ratio/min", weights, mask)
    metrics.add_max("sampling/importance_ratio/max", weights, mask)
    metrics.add_mean(WEIGHTS_SQUARED, weights.square())

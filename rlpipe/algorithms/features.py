"""The rewards of energy-based fine-tuning: the match between the features of completions and of the ground truth.

Shapes: n samples of one prompt, or of one block of a document; D features; B prompts or blocks; T tokens, padded; H
hidden size. Source: Jelassi et al. 2026, "Energy-Based Fine-Tuning", arXiv:2603.12248.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rlpipe.configs.schema.algorithm_config import FeatureConfig

TOLERANCE = 1e-5
"""Singular values below this share of the largest one count as 0."""
NOISE = 1e-6
"""Noise that is added if the SVD fails, as a share of the samples' mean magnitude."""
CONCAT_AT = (0.25, 0.5, 0.75)
"""Positions at which ``concat`` reads features, as shares of the length."""


def layer_indices(fractions: Sequence[float], num_layers: int) -> list[int]:
    """Return the indices of depths, as ``fractions``, in a model's hidden states, the embedding being the first.

    Small fractions are the first layer, never the embedding, however few layers the model has.
    """
    return [max(int(fraction * num_layers), 1) for fraction in fractions]


def join_layers(hidden_states: Sequence[Tensor], *, normalize: str) -> Tensor:
    """Concatenate hidden states ``[..., H]`` of several depths.

    ``each`` scales those of a depth to length 1, ``joint`` the concatenation, ``none`` nothing.
    """
    if normalize not in ("each", "joint", "none"):
        raise ValueError(f"normalize_layers is {normalize!r}; use each, joint or none")
    layers = [functional.normalize(layer, dim=-1) if normalize == "each" else layer for layer in hidden_states]
    joined = torch.cat(layers, dim=-1)
    return functional.normalize(joined, dim=-1) if normalize == "joint" else joined


def pool(features: Tensor, mask: Tensor, completion_mask: Tensor, method: str) -> Tensor:
    """Return one vector per sequence: features ``[B, T, D]`` of the tokens in ``mask`` ``[B, T]`` give ``[B, D]``.

    Real tokens come first, padding last. ``last_token`` takes the last token, ``mean_pooling`` the mean of all,
    ``completion_mean`` that of the tokens in ``completion_mask`` (0 if there are none), and ``concat`` the tokens at a
    quarter, a half and three quarters of the length, ``[B, 3 D]``.
    """
    if method == "mean_pooling":
        return _masked_mean(features, mask)
    if method == "completion_mean":
        return _masked_mean(features, completion_mask)
    lengths = mask.sum(1)
    if method == "last_token":
        return _select_positions(features, lengths - 1)
    if method != "concat":
        raise ValueError(f"pooling is {method!r}; use last_token, mean_pooling, completion_mean or concat")
    return torch.cat([_select_positions(features, (lengths * share).long()) for share in CONCAT_AT], dim=1)


def _masked_mean(features: Tensor, mask: Tensor) -> Tensor:
    total = torch.where(mask[..., None], features, 0).sum(1)
    return total / mask.sum(1, keepdim=True).clamp(min=1)


def _select_positions(features: Tensor, positions: Tensor) -> Tensor:
    return features[torch.arange(len(features), device=features.device), positions.clamp(min=0)]


@dataclass(kw_only=True, slots=True)
class Whitened:
    """Features of samples and ground truth, made comparable with each other."""

    samples: Tensor  # [B, n, D]
    truth: Tensor  # [B, n, D], what each sample is compared with
    num_failed: int = 0
    """Prompts or blocks, or layers of these, whose SVD failed; their features are only scaled to length 1."""


def whiten(samples: Tensor, truth: Tensor, method: str) -> Whitened:
    """Decorrelate features ``[B, n, D]`` and those of the ground truth ``[B, D]`` within each prompt or block.

    With the SVD X = U S V^T of the samples,

    - ``sample``: W = (X X^T)^(-1/2) = U S^-1 U^T mixes samples: W X, and W Y for the ground truth n times as Y.
    - ``feature``: W = V S^-1 V^T mixes features: X W and y W.
    - ``none``: each vector is only scaled to length 1.

    The first two agree on the samples, U V^T, and differ on the ground truth.
    """
    if method not in ("sample", "feature", "none"):
        raise ValueError(f"whitening is {method!r}; use sample, feature or none")
    if method == "none":
        return _to_unit_length(samples, truth)
    try:
        return _whiten(samples, truth, method)
    except torch.linalg.LinAlgError:
        pass
    if len(samples) > 1:  # only some of them may be impossible to decompose
        pieces = [whiten(samples[i : i + 1], truth[i : i + 1], method) for i in range(len(samples))]
        return Whitened(
            samples=torch.cat([piece.samples for piece in pieces]),
            truth=torch.cat([piece.truth for piece in pieces]),
            num_failed=sum(piece.num_failed for piece in pieces),
        )
    try:
        return _whiten(samples + _noise_like(samples), truth, method)
    except torch.linalg.LinAlgError:
        plain = _to_unit_length(samples, truth)
        plain.num_failed = 1
        return plain


def _whiten_layers(samples: Tensor, truth: Tensor, method: str, num_layers: int, num_positions: int) -> Whitened:
    """Whiten each layer by itself, over the root of their number, so that dot products are means over the layers."""
    if num_layers == 1:
        return whiten(samples, truth, method)

    def split(features: Tensor) -> Tensor:
        layers = features.unflatten(-1, (num_positions, num_layers, -1))
        return layers.movedim(-2, 0).flatten(-2).flatten(0, 1)  # [L B, ..., D / L]

    def join(whitened: Tensor) -> Tensor:
        layers: Tensor = whitened.unflatten(0, (num_layers, len(samples))) / math.sqrt(num_layers)
        return layers.movedim(0, -2).flatten(-2)

    decorrelated = whiten(split(samples), split(truth), method)
    return Whitened(
        samples=join(decorrelated.samples), truth=join(decorrelated.truth), num_failed=decorrelated.num_failed
    )


def _to_unit_length(samples: Tensor, truth: Tensor) -> Whitened:
    repeated = functional.normalize(truth, dim=-1)[:, None].expand_as(samples)
    return Whitened(samples=functional.normalize(samples, dim=-1), truth=repeated)


def _whiten(samples: Tensor, truth: Tensor, method: str) -> Whitened:
    left, values, right = torch.linalg.svd(samples, full_matrices=False)  # [B, n, k], [B, k], [B, k, D]
    if not torch.isfinite(values).all():  # as CUDA's SVD reports a failure
        raise torch.linalg.LinAlgError("singular values are not finite")
    counted = values > TOLERANCE * values.amax(1, keepdim=True)
    inverse = torch.where(counted, 1 / torch.where(counted, values, 1), 0)
    whitened = (left * counted[:, None]) @ right
    if method == "sample":
        row_sums = (left * inverse[:, None]) @ left.sum(1)[..., None]  # of W, because all rows of Y are equal
        return Whitened(samples=whitened, truth=row_sums * truth[:, None])
    mixed = (truth[:, None] @ right.mT * inverse[:, None]) @ right  # [B, 1, D]
    return Whitened(samples=whitened, truth=mixed.expand_as(whitened))


def _noise_like(samples: Tensor) -> Tensor:
    """Return the same noise in every call."""
    noise = torch.randn(samples.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return noise.to(samples) * NOISE * samples.abs().mean()


@dataclass(kw_only=True, slots=True)
class FeatureScores:
    """Match of the samples with the ground truth; the reward is 2 c_a alignment - 2 c_d diversity."""

    alignment: Tensor  # [B, n], the cosine with the ground truth
    diversity: Tensor  # [B, n], the mean dot product with the other samples; 0 if there are none
    cfm: Tensor  # [B], the squared distance of the samples' mean from the ground truth
    num_unwhitened: int
    """Prompts or blocks, or layers of these, whose SVD failed."""


def score_features(
    samples: Tensor, truth: Tensor, whitening: str, *, num_layers: int = 1, num_positions: int = 1
) -> FeatureScores:
    """Score the features ``[B, n, D]`` of samples against those of the ground truth ``[B, D]``, in float64.

    With sample whitening each sample has a ground truth of its own, and ``cfm`` is the distance of the means. With
    ``num_layers`` above 1, the features of each layer are whitened by themselves; they are those of ``num_positions``
    positions, one after the other.
    """
    whitened = _whiten_layers(samples.double(), truth.double(), whitening, num_layers, num_positions)
    x, y = whitened.samples, whitened.truth
    products = x @ x.mT  # [B, n, n]
    off_diagonal = products.sum(2) - products.diagonal(dim1=1, dim2=2)
    return FeatureScores(
        alignment=functional.cosine_similarity(x, y, dim=2),
        diversity=off_diagonal / max(x.shape[1] - 1, 1),
        cfm=(x.mean(1) - y.mean(1)).square().sum(1),
        num_unwhitened=whitened.num_failed,
    )


def feature_rewards(scores: FeatureScores, config: FeatureConfig) -> Tensor:
    """Return the rewards ``[B, n]``."""
    return 2 * config.alignment_coef * scores.alignment - 2 * config.diversity_coef * scores.diversity

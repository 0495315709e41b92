"""Features, whitening and the rewards of EBFT against plain NumPy references in float64, written with loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from feature_cases import (
    baseline_reference,
    score_reference,
    score_whitened,
    unit,
    whiten_layers_reference,
    whiten_reference,
)
from torch import Tensor

from rlpipe.algorithms import features
from rlpipe.algorithms.advantages import compute_advantages
from rlpipe.algorithms.features import join_layers, layer_indices, pool, score_features, whiten
from rlpipe.configs.schema.algorithm_config import AdvantageConfig, FeatureConfig

Array = np.ndarray


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("method", ["sample", "feature", "none"])
@pytest.mark.parametrize(("count", "width"), [(4, 32), (2, 7), (6, 5), (1, 8)])
def test_scores_equal_the_reference(method: str, count: int, width: int) -> None:
    samples, truth = draw(3, count, width), draw(3, width, seed=1)
    scores = score_features(samples, truth, method)
    for block in range(3):
        alignment, diversity, cfm = score_reference(samples[block].numpy(), truth[block].numpy(), method)
        np.testing.assert_allclose(scores.alignment[block], alignment, atol=1e-9)
        np.testing.assert_allclose(scores.diversity[block], diversity, atol=1e-9)
        np.testing.assert_allclose(scores.cfm[block], cfm, rtol=1e-9)
    assert scores.num_unwhitened == 0


def test_whitened_samples_are_orthonormal_and_the_same_for_both_kinds() -> None:
    samples, truth = draw(2, 4, 16), draw(2, 16, seed=1)
    by_sample, by_feature = whiten(samples, truth, "sample"), whiten(samples, truth, "feature")
    torch.testing.assert_close(by_sample.samples @ by_sample.samples.mT, torch.eye(4).double().expand(2, 4, 4))
    torch.testing.assert_close(by_sample.samples, by_feature.samples)
    assert (by_sample.truth - by_feature.truth).abs().max() > 0.01


def test_equal_samples_are_whitened_by_the_pseudo_inverse() -> None:
    one = draw(1, 1, 16)
    samples = torch.cat([one, one, draw(1, 1, 16, seed=2)], dim=1)
    scores = score_features(samples, one[:, 0], "sample")
    alignment, diversity, _ = score_reference(samples[0].numpy(), one[0, 0].numpy(), "sample")
    np.testing.assert_allclose(scores.alignment[0], alignment, atol=1e-7)
    np.testing.assert_allclose(scores.diversity[0], diversity, atol=1e-7)
    assert scores.diversity[0, 0] == pytest.approx(0.25)  # halves of one direction, and a third at right angles


def test_float32_features_give_the_rewards_of_float64_ones() -> None:
    samples, truth = draw(5, 8, 96), draw(5, 96, seed=1)
    wide, narrow = score_features(samples, truth, "sample"), score_features(samples.float(), truth.float(), "sample")
    torch.testing.assert_close(narrow.alignment, wide.alignment, atol=1e-6, rtol=0)


def test_a_failing_svd_is_tried_again_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, truth = draw(2, 3, 8), draw(2, 8, seed=1)
    expected = score_features(samples, truth, "feature")
    real = torch.linalg.svd

    def fails_on_the_planted_one(matrix: Tensor, full_matrices: bool) -> object:
        if any(torch.equal(block, samples[1]) for block in matrix):
            raise torch.linalg.LinAlgError("it did not converge")
        return real(matrix, full_matrices=full_matrices)

    monkeypatch.setattr(features.torch.linalg, "svd", fails_on_the_planted_one)
    scores = score_features(samples, truth, "feature")
    assert scores.num_unwhitened == 0
    assert torch.equal(scores.alignment[0], expected.alignment[0])
    torch.testing.assert_close(scores.alignment, expected.alignment, atol=1e-4, rtol=0)
    assert not torch.equal(scores.alignment[1], expected.alignment[1])


@pytest.mark.parametrize("method", ["sample", "feature"])
def test_where_the_svd_keeps_failing_nothing_is_whitened_and_that_is_counted(method: str) -> None:
    samples, truth = draw(3, 3, 8), draw(3, 8, seed=1)
    samples[1, 0, 0] = torch.inf
    scores = score_features(samples, truth, method)
    assert scores.num_unwhitened == 1
    sound = score_features(samples[[0, 2]], truth[[0, 2]], method)
    torch.testing.assert_close(scores.alignment[[0, 2]], sound.alignment)
    plain = score_features(samples[1:2, 1:], truth[1:2], "none")
    torch.testing.assert_close(scores.alignment[1, 1:], plain.alignment[0])


@pytest.mark.parametrize("method", ["sample", "feature"])
@pytest.mark.parametrize(("layers", "pooling"), [(3, "last_token"), (2, "concat")])
def test_each_layer_is_whitened_by_itself(method: str, layers: int, pooling: str) -> None:
    config = FeatureConfig(layers=[0.5] * layers, pooling=pooling, whitening=method, whiten_layers="each")
    count, width, positions = 4, 12, 3 if pooling == "concat" else 1
    samples, truth = draw(2, count, positions * layers * width), draw(2, positions * layers * width, seed=1)
    scores = score_features(samples, truth, method, **config.parts)
    for block in range(2):
        pair = samples[block].numpy(), truth[block].numpy()
        alignment, diversity, cfm = score_whitened(*whiten_layers_reference(*pair, method, layers, positions))
        np.testing.assert_allclose(scores.alignment[block], alignment, atol=1e-9)
        np.testing.assert_allclose(scores.diversity[block], diversity, atol=1e-9)
        np.testing.assert_allclose(scores.cfm[block], cfm, rtol=1e-9)
    joint = score_features(samples, truth, method)
    assert (joint.alignment - scores.alignment).abs().max() > 0.01


def test_a_layer_whose_svd_fails_leaves_the_others_whitened() -> None:
    samples, truth = draw(2, 3, 16), draw(2, 16, seed=1)
    samples[1, 0, 0] = torch.inf
    scores = score_features(samples, truth, "sample", num_layers=2)
    assert scores.num_unwhitened == 1
    torch.testing.assert_close(
        scores.alignment[0], score_features(samples[:1], truth[:1], "sample", num_layers=2).alignment[0]
    )


def test_unknown_whitening_is_refused() -> None:
    with pytest.raises(ValueError, match="whitening is 'zca'; use sample, feature or none"):
        score_features(draw(1, 2, 4), draw(1, 4), "zca")


# Depths and pooling ---------------------------------------------------------------------------------------------------


def test_depths_are_shares_of_the_layers_where_0_is_the_embedding() -> None:
    assert layer_indices([0.0, 0.25, 0.5, 0.75, 1.0], 28) == [1, 7, 14, 21, 28]
    assert layer_indices([0.25, 0.5, 0.75], 2) == [1, 1, 1], "a small share is the first layer"


def test_layers_are_normalised_each_by_itself_or_jointly() -> None:
    layers = [draw(2, 5, 4), 100 * draw(2, 5, 4, seed=1)]
    joined = join_layers(layers, normalize="each")
    for start, layer in zip((0, 4), layers, strict=True):
        expected = [[unit(token) for token in sequence] for sequence in layer.numpy()]
        np.testing.assert_allclose(joined[..., start : start + 4], expected)
    plain = torch.cat(layers, dim=-1)
    assert torch.equal(join_layers(layers, normalize="none"), plain)
    expected = [[unit(token) for token in sequence] for sequence in plain.numpy()]
    np.testing.assert_allclose(join_layers(layers, normalize="joint"), expected)


LENGTHS = (7, 4, 1)
COMPLETIONS = ((3, 4, 6), (2, 3), ())
"""Positions of completion tokens, which need not be adjacent in a conversation."""


def masks() -> tuple[Tensor, Tensor]:
    mask = torch.arange(9)[None] < torch.tensor(LENGTHS)[:, None]
    completion = torch.zeros_like(mask)
    for row, places in enumerate(COMPLETIONS):
        completion[row, list(places)] = True
    return mask, completion


def pool_reference(tokens: Array, length: int, completion: tuple[int, ...], method: str) -> Array:
    if method == "last_token":
        return tokens[length - 1]
    if method == "concat":
        return np.concatenate([tokens[int(length * share)] for share in (0.25, 0.5, 0.75)])
    places = range(length) if method == "mean_pooling" else completion
    return sum((tokens[place] for place in places), np.zeros_like(tokens[0])) / max(len(places), 1)


@pytest.mark.parametrize("method", ["last_token", "mean_pooling", "completion_mean", "concat"])
def test_pooling_equals_the_reference_and_ignores_what_fills_up(method: str) -> None:
    tokens, (mask, completion) = draw(3, 9, 6), masks()
    tokens[~mask] = torch.nan
    got = pool(tokens, mask, completion, method)
    for row, (length, places) in enumerate(zip(LENGTHS, COMPLETIONS, strict=True)):
        np.testing.assert_allclose(got[row], pool_reference(tokens[row].numpy(), length, places, method))


def test_unknown_pooling_is_refused() -> None:
    with pytest.raises(ValueError, match="pooling is 'first'; use last_token"):
        pool(draw(3, 9, 6), *masks(), "first")


# The baseline of the diversity term -----------------------------------------------------------------------------------


def ebft_advantages(name: str, alignment: Array, diversity: Array, coefs: tuple[float, float] = (1.0, 1.0)) -> Array:
    part = -2 * coefs[1] * diversity
    rewards = 2 * coefs[0] * alignment + part
    return compute_advantages([rewards], AdvantageConfig(name=name, eps=0.0), pairwise=[part])[0]


def diversity_of(products: Array) -> Array:
    return (products.sum(1) - products.diagonal()) / max(len(products) - 1, 1)


@pytest.mark.parametrize("method", ["sample", "feature", "none"])
def test_jointly_normalised_layers_give_the_advantages_of_the_spec(method: str) -> None:
    """Check the authors' way, from hidden states of three layers of very different sizes to advantages."""
    count, width = 5, 12
    samples = [10.0**place * draw(1, count, width, seed=place) for place in range(3)]
    truth = [10.0**place * draw(1, width, seed=9 + place) for place in range(3)]
    scores = score_features(join_layers(samples, normalize="joint"), join_layers(truth, normalize="joint"), method)
    got = ebft_advantages("rloo", scores.alignment[0].numpy(), scores.diversity[0].numpy())
    rows = np.stack([unit(row) for row in np.concatenate([layer[0].numpy() for layer in samples], axis=1)])
    x, y = whiten_reference(rows, unit(np.concatenate([layer[0].numpy() for layer in truth])), method)
    alignment, *_ = score_whitened(x, y)
    np.testing.assert_allclose(got, baseline_reference(np.array(alignment), x @ x.T, 1.0, 1.0), atol=1e-6)


@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_rloo_takes_the_baseline_of_the_pairs_without_the_rollout(count: int) -> None:
    x = draw(count, 6).numpy()
    alignment, products = draw(count, seed=1).numpy(), x @ x.T
    got = ebft_advantages("rloo", alignment, diversity_of(products), (0.7, 1.3))
    np.testing.assert_allclose(got, baseline_reference(alignment, products, 0.7, 1.3), rtol=1e-5)


def test_group_norm_divides_rloo_by_the_deviation_of_the_rewards() -> None:
    x = draw(4, 6).numpy()
    alignment, diversity = draw(4, seed=1).numpy(), diversity_of(x @ x.T)
    plain, divided = (ebft_advantages(name, alignment, diversity) for name in ("rloo", "group_norm"))
    np.testing.assert_allclose(divided, plain / np.std(2 * alignment - 2 * diversity, ddof=1), rtol=1e-5)


@pytest.mark.parametrize("name", ["rloo", "group_norm"])
def test_a_sample_alone_keeps_its_reward(name: str) -> None:
    assert ebft_advantages(name, np.array([0.3]), np.array([0.0])) == pytest.approx([0.6])


def gradient_estimates(logits: Array, count: int, num_groups: int, *, pairwise: bool) -> Array:
    """Return estimates ``[num_groups, V]`` of the gradient of expected reward, for a policy that draws one of V tokens.

    Token v has the feature vector e_v scaled by v + 1, and the ground truth is the first; nothing is whitened.
    """
    generator = np.random.default_rng(0)
    probabilities = np.exp(logits) / np.exp(logits).sum()
    scale = np.arange(1, len(logits) + 1)
    estimates = []
    for drawn in generator.choice(len(logits), size=(num_groups, count), p=probabilities):
        x = np.eye(len(logits))[drawn] * scale[drawn, None]
        alignment, diversity = (drawn == 0).astype(float), diversity_of(x @ x.T)
        part = -2 * diversity
        rewards = [2 * alignment + part]
        advantages = compute_advantages(rewards, AdvantageConfig(name="rloo"), [part] if pairwise else None)[0]
        estimates.append((advantages[:, None] * (np.eye(len(logits))[drawn] - probabilities)).mean(0))
    return np.stack(estimates)


def expected_gradient(logits: Array) -> Array:
    """Return the gradient of E[2 align_j - 2 div_j] with the samples k != j held fixed, as r_j gives it."""
    probabilities = np.exp(logits) / np.exp(logits).sum()
    scale = np.arange(1, len(logits) + 1)
    rewards = 2.0 * (np.arange(len(logits)) == 0) - 2 * probabilities * scale**2
    return probabilities * (rewards - probabilities @ rewards)


@pytest.mark.slow
def test_the_baseline_leaves_the_gradient_unbiased_where_the_mean_of_the_others_does_not() -> None:
    logits = np.array([0.5, 0.0, -0.5])
    expected = expected_gradient(logits)

    def deviations(*, pairwise: bool) -> Array:
        estimates = gradient_estimates(logits, 4, 20_000, pairwise=pairwise)
        return (estimates.mean(0) - expected) / (estimates.std(0) / np.sqrt(len(estimates)))

    assert np.abs(deviations(pairwise=True)).max() < 4
    assert np.abs(deviations(pairwise=False)).max() > 10

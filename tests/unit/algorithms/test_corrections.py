"""Off-policy corrections: the weights of each mode, what they leave alone, and the bias that they remove."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rlpipe.algorithms.corrections import WEIGHTS_SQUARED, with_effective_ratio
from rlpipe.algorithms.losses import LossInputs, policy_loss
from rlpipe.configs.schema.algorithm_config import CorrectionConfig, LossConfig

RATIOS = [[1.5, 0.2], [4.0, 3.0]]
"""The importance ratios w of the tokens of two sequences, whose products are 0.3 and 12."""


def make_inputs(ratios: list[list[float]], advantages: list[float]) -> LossInputs:
    lengths = torch.tensor([len(row) for row in ratios])
    log_weights = torch.tensor([w for row in ratios for w in row], dtype=torch.float64).log()
    logprobs = torch.full_like(log_weights, -1.0)
    return LossInputs(
        logprobs=logprobs.clone().requires_grad_(),
        sampling_logprobs=logprobs - log_weights,
        advantages=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths),
        loss_mask=torch.ones(len(log_weights), dtype=torch.bool),
        sequence_ids=torch.arange(len(ratios)).repeat_interleave(lengths),
        num_loss_tokens=len(log_weights),
        num_sequences=len(ratios),
        max_completion_tokens=9,
    )


def gradient(inputs: LossInputs, correction: CorrectionConfig | None, config: LossConfig | None = None) -> list[float]:
    """Return the negative gradient times the number of loss tokens: each token's weight if advantages are 1."""
    loss = policy_loss(inputs, config or LossConfig(), correction).loss
    (grad,) = torch.autograd.grad(loss, inputs.logprobs)
    return (-grad * inputs.num_loss_tokens).tolist()


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("none", [1, 1, 1, 1]),
        ("token_truncate", [1.5, 0.5, 2, 2]),
        ("token_mask", [1.5, 0, 0, 0]),
        ("sequence_truncate", [0.5, 0.5, 2, 2]),
        ("sequence_mask", [0, 0, 0, 0]),
    ],
)
def test_weights_of_each_mode(mode: str, weights: list[float]) -> None:
    inputs = make_inputs(RATIOS, [1.0, 1.0])
    assert gradient(inputs, CorrectionConfig(mode=mode, cap=2.0)) == pytest.approx(weights)


@pytest.mark.parametrize(
    ("mode", "floor", "weights"),
    [
        ("token_truncate", 0.0, [1.5, 0.2, 2, 2]),
        ("token_truncate", 0.9, [1.5, 0.9, 2, 2]),
        ("token_mask", 0.0, [1.5, 0.2, 0, 0]),
        ("sequence_truncate", 0.0, [0.3, 0.3, 2, 2]),
        ("sequence_mask", 0.25, [0.3, 0.3, 0, 0]),
    ],
)
def test_the_lower_bound_may_be_another_than_that_of_the_cap(mode: str, floor: float, weights: list[float]) -> None:
    inputs = make_inputs(RATIOS, [1.0, 1.0])
    assert gradient(inputs, CorrectionConfig(mode=mode, cap=2.0, floor=floor)) == pytest.approx(weights)


@pytest.mark.parametrize(
    ("mode", "floor", "weights"),
    [
        ("token_truncate", 0.5, [1.5, 0.5, 4, 3]),
        ("token_mask", 0.5, [1.5, 0, 4, 3]),
        ("sequence_truncate", 0.5, [0.5, 0.5, 12, 12]),
        ("sequence_mask", 0.5, [0, 0, 12, 12]),
        ("token_truncate", None, [1.5, 0.2, 4, 3]),
        ("token_mask", 0.0, [1.5, 0.2, 4, 3]),
        ("sequence_truncate", 0.0, [0.3, 0.3, 12, 12]),
        ("sequence_mask", None, [0.3, 0.3, 12, 12]),
    ],
)
def test_without_a_cap_there_is_no_upper_bound(mode: str, floor: float | None, weights: list[float]) -> None:
    inputs = make_inputs(RATIOS, [1.0, 1.0])
    correction = CorrectionConfig(mode=mode, cap=None, floor=floor)
    assert gradient(inputs, correction) == pytest.approx(weights)
    metrics = policy_loss(inputs, LossConfig(), correction).metrics.values()
    clipped = {"token_truncate": 0.25, "sequence_truncate": 0.5}.get(mode, 0) if floor else 0
    assert metrics["sampling/clipped_ratio"] == clipped
    assert metrics["sampling/dropped_ratio"] == weights.count(0) / 4


@pytest.mark.parametrize(
    ("mode", "weights"),
    [("none", [1, 1, 1, 1]), ("token_truncate", [1.5, 1, 2, 2]), ("sequence_truncate", [1.5, 1.5, 2, 2])],
)
def test_a_sampling_log_prob_that_is_missing_counts_as_ratio_1(mode: str, weights: list[float]) -> None:
    inputs = make_inputs(RATIOS, [1.0, 1.0])
    assert inputs.sampling_logprobs is not None
    inputs.sampling_logprobs[1] = math.nan
    assert gradient(inputs, CorrectionConfig(mode=mode, cap=2.0)) == pytest.approx(weights)
    metrics = policy_loss(inputs, LossConfig(), CorrectionConfig(mode=mode)).metrics.values()
    assert metrics["sampling/missing_ratio"] == 0.25
    assert metrics["sampling/importance_ratio/mean"] == pytest.approx((1.5 + 1 + 4 + 3) / 4)


def test_only_the_tokens_of_high_entropy_train() -> None:
    inputs = make_inputs(RATIOS, [1.0, 1.0])
    inputs.entropy = torch.tensor([0.1, 3.0, 0.5, 2.0], dtype=torch.float64)
    correction = CorrectionConfig(mode="none")
    assert gradient(inputs, correction, LossConfig(top_entropy_quantile=0.5)) == pytest.approx([0, 1, 0, 1])
    inputs.loss_mask[1] = False
    assert gradient(inputs, correction, LossConfig(top_entropy_quantile=0.0)) == pytest.approx([0, 0, 0, 1])


def test_sequence_within_the_cap_keeps_the_product() -> None:
    weights = gradient(make_inputs([[4.0, 0.375], [5.0]], [1.0, 1.0]), CorrectionConfig(mode="sequence_mask", cap=2.0))
    assert weights == pytest.approx([1.5, 1.5, 0])


@pytest.mark.parametrize("name", ["clip", "cispo", "reinforce"])
def test_every_surrogate_is_weighed(name: str) -> None:
    correction = CorrectionConfig(mode="token_truncate", cap=2.0)
    weights = gradient(make_inputs(RATIOS, [1.0, 1.0]), correction, LossConfig(name=name))
    assert weights == pytest.approx([1.5, 0.5, 2, 2])


def verl_keeps(ratios: list[list[float]], level: str, floor: float | None, cap: float | None) -> list[bool]:
    """Return which sequences verl's ``compute_rollout_rejection_mask`` keeps."""
    kept, upper = [], math.inf if cap is None else cap
    for row in ratios:
        log_ratios = np.log(row)
        ratio = np.exp(np.clip(log_ratios.sum() if level == "sequence" else log_ratios.mean(), -20, 20))
        kept.append(bool((1 / upper if floor is None else floor) <= ratio <= upper))
    return kept


MODES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["sequence", "geometric"])
@pytest.mark.parametrize(("floor", "cap"), [(None, 1.5), (0.0, 1.1), (0.9, 4.0), (0.9, None)])
def test_sequences_are_rejected_as_in_verl_whatever_their_weights(
    mode: str, level: str, floor: float | None, cap: float | None
) -> None:
    generator = np.random.default_rng(3)
    ratios = [np.exp(generator.normal(0, 0.4, length)).tolist() for length in (1, 2, 3, 5, 8, 13, 21, 34)]
    inputs, plain = make_inputs(ratios, [1.0] * len(ratios)), CorrectionConfig(mode=mode, cap=2.5)
    keeps = verl_keeps(ratios, level, floor, cap)
    assert set(keeps) == {True, False}
    kept = np.repeat(keeps, [len(row) for row in ratios])
    correction = replace(plain, rejection=level, rejection_cap=cap, rejection_floor=floor)
    assert gradient(inputs, correction) == pytest.approx(np.where(kept, gradient(inputs, plain), 0))
    metrics = policy_loss(inputs, LossConfig(), correction).metrics.values()
    assert metrics["sampling/rejected_ratio"] == pytest.approx(1 - kept.mean())
    assert "sampling/rejected_ratio" not in policy_loss(inputs, LossConfig(), plain).metrics.values()


def test_a_mean_over_a_sequence_is_of_its_loss_tokens() -> None:
    inputs = make_inputs([[2.25, 1.0]], [1.0])
    correction = CorrectionConfig(mode="none", rejection="geometric")
    assert gradient(inputs, correction) == pytest.approx([1, 1])
    inputs.loss_mask[1] = False
    assert gradient(inputs, correction) == pytest.approx([0, 0])


def test_off_policy_sequences_are_dropped_only_for_negative_advantages() -> None:
    far, near = math.exp(-0.3), math.exp(-0.1)
    inputs = make_inputs([[far, far], [far, far], [near, near], [1 / far]], [-1.0, 1.0, -1.0, -1.0])
    weights = gradient(inputs, CorrectionConfig(mode="none", off_policy_threshold=0.2))
    assert weights == pytest.approx([0, 0, 1, 1, -1, -1, -1])


def test_mean_of_the_off_policy_mask_is_over_loss_tokens_only() -> None:
    inputs = make_inputs([[math.exp(-0.3), 1.0]], [-1.0])
    inputs.loss_mask[1] = False
    assert gradient(inputs, CorrectionConfig(mode="none", off_policy_threshold=0.2)) == [0, 0]


def test_kl_is_weighed_where_asked() -> None:
    inputs = make_inputs(RATIOS, [0.0, 0.0])
    inputs.ref_logprobs = inputs.logprobs.detach() - 0.5
    correction = CorrectionConfig(mode="token_truncate", cap=2.0)
    plain = policy_loss(inputs, LossConfig(beta=0.1), correction).loss.item()
    corrected = policy_loss(inputs, LossConfig(beta=0.1), replace(correction, bias_corrected_kl=True)).loss.item()
    kl = math.exp(-0.5) + 0.5 - 1
    assert plain == pytest.approx(0.1 * kl)
    assert corrected == pytest.approx(0.1 * kl * (1.5 + 0.5 + 2 + 2) / 4)


def test_off_policy_mask_leaves_the_kl_alone() -> None:
    inputs = make_inputs([[0.5, 0.5]], [-1.0])
    inputs.ref_logprobs = inputs.logprobs.detach() - 0.5
    correction = CorrectionConfig(mode="none", off_policy_threshold=0.1)
    kl = math.exp(-0.5) + 0.5 - 1
    assert policy_loss(inputs, LossConfig(beta=0.1), correction).loss.item() == pytest.approx(0.1 * kl)


def test_metrics_tell_how_far_sampler_and_learner_are_and_what_was_changed() -> None:
    inputs = make_inputs(RATIOS, [1.0, -1.0])
    values = policy_loss(inputs, LossConfig(), CorrectionConfig(mode="token_mask", cap=2.0)).metrics.values()
    assert values["sampling/importance_ratio/min"] == pytest.approx(0.2)
    assert values["sampling/importance_ratio/max"] == pytest.approx(4.0)
    assert values["sampling/importance_ratio/mean"] == pytest.approx(8.7 / 4)
    assert values["sampling/logp_difference/max"] == pytest.approx(-math.log(0.2))
    assert (values["sampling/clipped_ratio"], values["sampling/dropped_ratio"]) == (0, 0.75)
    values = policy_loss(inputs, LossConfig(), CorrectionConfig(mode="token_truncate", cap=2.0)).metrics.values()
    assert (values["sampling/clipped_ratio"], values["sampling/dropped_ratio"]) == (0.75, 0)


def test_the_effective_sample_size_is_that_of_the_weights() -> None:
    inputs = make_inputs(RATIOS, [1.0, -1.0])
    values = policy_loss(inputs, LossConfig(), CorrectionConfig()).metrics.values()
    weights = np.array([weight for row in RATIOS for weight in row])
    made = with_effective_ratio(values)
    assert made["sampling/effective_ratio"] == pytest.approx(weights.sum() ** 2 / (4 * (weights**2).sum()))
    assert made.keys() == {*values, "sampling/effective_ratio"} - {WEIGHTS_SQUARED}
    assert with_effective_ratio({"loss": 1.0}) == {"loss": 1.0}


@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_a_hopeless_ratio_makes_nothing_infinite(mode: str) -> None:
    inputs = make_inputs([[1.0, 1.0]], [1.0])
    inputs.sampling_logprobs = torch.tensor([-1000.0, -1.0], dtype=torch.float64)
    assert all(math.isfinite(weight) for weight in gradient(inputs, CorrectionConfig(mode=mode)))


VOCABULARY, LENGTH, NUM_SEQUENCES, SAMPLER_TEMPERATURE = 4, 3, 40_000, 1.6


def true_gradient(logits: Tensor, rewards: Tensor) -> Tensor:
    """Return the gradient of the expected reward over all sequences; ``logits`` ``[L, V]``, ``rewards`` ``[V] * L``."""
    logits = logits.clone().requires_grad_()
    probabilities = torch.tensor(1.0, dtype=logits.dtype)
    for position in logits.softmax(-1):
        probabilities = probabilities[..., None] * position
    (gradient,) = torch.autograd.grad((probabilities * rewards).sum(), logits)
    return gradient


def estimated_gradients(logits: Tensor, rewards: Tensor, correction: CorrectionConfig, batches: int = 10) -> Tensor:
    """Return the loss's policy gradients ``[batches, L, V]`` from sequences of a sampler with a higher temperature."""
    generator = torch.Generator().manual_seed(0)
    sampler = (logits / SAMPLER_TEMPERATURE).log_softmax(-1)
    estimates = []
    for _ in range(batches):
        sampled = torch.multinomial(sampler.exp(), NUM_SEQUENCES, replacement=True, generator=generator)  # [L, B]
        tokens = sampled.T.reshape(-1)
        places = torch.arange(LENGTH).repeat(NUM_SEQUENCES)
        policy = logits.clone().requires_grad_()
        inputs = LossInputs(
            logprobs=policy.log_softmax(-1)[places, tokens],
            sampling_logprobs=sampler[places, tokens],
            advantages=rewards[tuple(sampled)].repeat_interleave(LENGTH),
            loss_mask=torch.ones_like(tokens, dtype=torch.bool),
            sequence_ids=torch.arange(NUM_SEQUENCES).repeat_interleave(LENGTH),
            num_loss_tokens=len(tokens),
            num_sequences=NUM_SEQUENCES,
            max_completion_tokens=1,
        )
        loss = policy_loss(inputs, LossConfig(name="reinforce", aggregate="constant"), correction).loss
        estimates.append(-torch.autograd.grad(loss, policy)[0])
    return torch.stack(estimates)


def test_gradient_of_another_sampler_is_biased_and_the_corrected_one_is_not() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(LENGTH, VOCABULARY, generator=generator, dtype=torch.float64)
    rewards = torch.randn(*[VOCABULARY] * LENGTH, generator=generator, dtype=torch.float64)
    want = true_gradient(logits, rewards)

    def distance(mode: str, cap: float | None = None) -> float:
        """Return the largest distance from the true gradient, in standard errors."""
        found = estimated_gradients(logits, rewards, CorrectionConfig(mode=mode, cap=cap))
        return float(((found.mean(0) - want) / (found.std(0) / math.sqrt(len(found)))).abs().max())

    assert distance("sequence_truncate") < 5
    assert distance("none") > 20
    assert distance("token_truncate") > 20, "a token's own weight is not enough where the reward is that of the whole"
    assert distance("sequence_truncate", cap=1.1) > 10, "a bound trades bias for variance"

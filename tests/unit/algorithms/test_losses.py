"""Losses against numbers worked out by hand, and their independence of how a step is split."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from torch import Tensor
from torch.nn import functional

from rlpipe.algorithms.losses import EntropyBonus, LossInputs, LossOutput, estimate_kl, policy_loss, sft_loss
from rlpipe.algorithms.metrics import MetricSums
from rlpipe.algorithms.preferences import PairInputs, pair_loss
from rlpipe.configs.compose import config_folder
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, LossConfig
from rlpipe.configs.schema.preference_config import PreferenceConfig

ALGORITHMS = sorted((config_folder() / "algorithm").glob("*.yaml"))
NAMES = ("clip", "cispo", "reinforce")
LEVELS = ("token", "sequence", "sequence_product")
AGGREGATES = ("token", "sequence", "constant")
MAX_COMPLETION_TOKENS = 12


def make_inputs(
    ratios: Sequence[Sequence[float]], advantages: Sequence[float], *, logprob: float = -1.0, **others: Any
) -> LossInputs:
    """Return one fully trained sequence with one advantage for each row of ratios to the old policy."""
    lengths = torch.tensor([len(row) for row in ratios])
    flat = torch.tensor(list(itertools.chain(*ratios)), dtype=torch.float64)
    logprobs = torch.full_like(flat, logprob)
    return LossInputs(
        logprobs=logprobs.requires_grad_(),
        old_logprobs=logprobs.detach() - flat.log(),
        sampling_logprobs=logprobs.detach() - flat.log(),
        advantages=torch.tensor(advantages, dtype=torch.float64).repeat_interleave(lengths),
        loss_mask=torch.ones(len(flat), dtype=torch.bool),
        sequence_ids=torch.arange(len(ratios)).repeat_interleave(lengths),
        num_loss_tokens=len(flat),
        num_sequences=len(ratios),
        max_completion_tokens=MAX_COMPLETION_TOKENS,
        **others,
    )


def gradient(inputs: LossInputs, config: LossConfig) -> list[float]:
    (grad,) = torch.autograd.grad(policy_loss(inputs, config).loss, inputs.logprobs)
    return grad.tolist()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "grad"),
    [
        (1.1, 2.0, -2.2, -2.2),  # within the bounds
        (1.5, 2.0, -2.6, 0.0),  # clipped above
        (0.5, 2.0, -1.0, -1.0),  # a good token that became less likely is not clipped
        (0.5, -2.0, 1.6, 0.0),  # clipped below
        (1.5, -2.0, 3.0, 3.0),  # a bad token that became likelier is not clipped
        (4.0, -2.0, 6.0, 0.0),  # except by the outer bound
    ],
)
def test_clip_cuts_off_what_moved_too_far_in_the_wanted_direction(
    ratio: float, advantage: float, loss: float, grad: float
) -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.3, clip_delta=3.0)
    inputs = make_inputs([[ratio]], [advantage])
    assert policy_loss(inputs, config).loss.item() == pytest.approx(loss)
    assert gradient(inputs, config) == pytest.approx([grad])


def test_cispo_bounds_the_weight_and_keeps_the_gradient() -> None:
    config = LossConfig(name="cispo", clip_high=1.0)
    inputs = make_inputs([[0.5, 5.0]], [3.0], logprob=-2.0)
    assert policy_loss(inputs, config).loss.item() == pytest.approx((0.5 * 3 * 2 + 2 * 3 * 2) / 2)
    assert gradient(inputs, config) == pytest.approx([-0.75, -3.0])


def test_reinforce_ignores_the_ratio() -> None:
    inputs = make_inputs([[0.5, 5.0]], [3.0], logprob=-2.0)
    assert policy_loss(inputs, LossConfig(name="reinforce")).loss.item() == pytest.approx(6.0)
    assert gradient(inputs, LossConfig(name="reinforce")) == pytest.approx([-1.5, -1.5])


def test_sequence_level_shares_the_geometric_mean_of_the_ratios() -> None:
    config = LossConfig(level="sequence", clip_low=9.0, clip_high=9.0)
    inputs = make_inputs([[2.0, 8.0], [3.0]], [1.0, 10.0])
    assert policy_loss(inputs, config).loss.item() == pytest.approx(-(4 + 4 + 30) / 3)
    assert gradient(inputs, config) == pytest.approx([-4 / 3, -4 / 3, -30 / 3])


@pytest.mark.parametrize(("level", "scale"), [("sequence", 1 / 4), ("sequence_product", 1.0)])
def test_tokens_with_advantages_of_their_own_are_trained_by_them_at_sequence_level(level: str, scale: float) -> None:
    inputs = make_inputs([[1.0] * 4], [0.0])
    inputs = replace(inputs, advantages=torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64))
    config = LossConfig(level=level, aggregate="sequence")
    assert gradient(inputs, config) == [-scale, -scale, scale, scale]


def test_with_one_advantage_the_gradient_of_a_sequences_ratio_is_that_of_its_mean() -> None:
    ratios, config = [[1.5, 0.5, 1.1], [1.0, 1.3]], LossConfig(level="sequence", clip_low=9.0, clip_high=9.0)
    inputs = make_inputs(ratios, [1.0, -2.0])
    nearly = inputs.advantages.clone()
    nearly[0] += 1e-12
    nearly[3] -= 1e-12
    divided = gradient(replace(inputs, advantages=nearly), config)
    assert divided == pytest.approx(gradient(inputs, config))


def test_every_token_of_an_episode_counts_alike_where_the_completion_is_one_action() -> None:
    config = LossConfig(level="sequence_product", aggregate="sequence")
    inputs = make_inputs([[1.0] * 8, [1.0] * 2], [1.0, 1.0])
    shares = torch.tensor([0.8] * 8 + [0.2] * 2, dtype=torch.float64)
    assert gradient(replace(inputs, shares=shares, num_sequences=1), config) == pytest.approx([-1.0] * 10)


def test_sequence_product_level_shares_the_product_of_the_ratios() -> None:
    config = LossConfig(level="sequence_product", aggregate="sequence", clip_low=99.0, clip_high=99.0)
    inputs = make_inputs([[2.0, 8.0], [3.0]], [1.0, 10.0])
    assert policy_loss(inputs, config).loss.item() == pytest.approx(-(16 + 30) / 2)
    assert gradient(inputs, config) == pytest.approx([-8, -8, -15])


@pytest.mark.parametrize(
    ("aggregate", "weights"),
    [
        ("token", [1 / 4] * 4),
        ("sequence", [1 / 2, 1 / 6, 1 / 6, 1 / 6]),
        ("constant", [1 / (2 * MAX_COMPLETION_TOKENS)] * 4),
    ],
)
def test_aggregates_weigh_tokens_by_the_counts_of_the_step(aggregate: str, weights: list[float]) -> None:
    inputs = make_inputs([[1.0], [1.0, 1.0, 1.0]], [-1.0, -1.0])
    assert gradient(inputs, LossConfig(aggregate=aggregate)) == pytest.approx(weights)


def test_without_old_logprobs_the_present_policy_stands_in() -> None:
    inputs = make_inputs([[2.0, 0.5]], [1.0])
    inputs = replace(inputs, old_logprobs=None, sampling_logprobs=inputs.logprobs.detach())
    assert policy_loss(inputs, LossConfig()).loss.item() == pytest.approx(-1.0)
    assert gradient(inputs, LossConfig()) == pytest.approx([-0.5, -0.5])


def test_kl_is_the_k3_estimate_and_is_reported_without_beta_too() -> None:
    reference = torch.tensor([-1.5], dtype=torch.float64)
    inputs = make_inputs([[1.0]], [0.0], ref_logprobs=reference)
    k3 = math.exp(-0.5) + 0.5 - 1
    with_kl = policy_loss(inputs, LossConfig(beta=0.1))
    assert with_kl.loss.item() == pytest.approx(0.1 * k3)
    assert gradient(inputs, LossConfig(beta=0.1)) == pytest.approx([0.1 * (1 - math.exp(-0.5))])
    without = policy_loss(inputs, LossConfig())
    assert without.loss.item() == 0
    assert with_kl.metrics.values()["kl"] == without.metrics.values()["kl"] == pytest.approx(k3)


def test_entropy_bonus_lowers_the_loss_and_has_a_gradient() -> None:
    entropy = torch.tensor([2.0, 4.0], dtype=torch.float64, requires_grad=True)
    output = policy_loss(make_inputs([[1.0, 1.0]], [0.0], entropy=entropy), LossConfig(entropy_coef=0.1))
    assert output.loss.item() == pytest.approx(-0.3)
    (grad,) = torch.autograd.grad(output.loss, entropy)
    assert grad.tolist() == pytest.approx([-0.05, -0.05])
    assert output.metrics.values()["entropy"] == pytest.approx(3.0)


def test_the_entropy_bonus_follows_a_target() -> None:
    limits = {"entropy_coef_min": 0.005, "entropy_coef_max": 0.017}
    bonus = EntropyBonus(LossConfig(entropy_coef=0.01, entropy_target=2.0, entropy_step=0.004, **limits))
    assert bonus.weight == 0, "the entropy is not known yet"
    weights = []
    for entropy in (1.5, 2.0, math.nan, 2.5, 2.5, 2.5, 2.5, 1.0):
        bonus.follow(entropy)
        weights.append(bonus.weight)
    assert weights == pytest.approx([0.014, 0.017, 0.017, 0, 0, 0, 0, 0.009])
    assert EntropyBonus(LossConfig(entropy_coef=0.01)).weight == 0.01
    entropy = torch.tensor([2.0, 4.0], dtype=torch.float64)
    inputs = make_inputs([[1.0, 1.0]], [0.0], entropy=entropy, entropy_weight=0.2)
    assert policy_loss(inputs, LossConfig(entropy_coef=0.1)).loss.item() == pytest.approx(-0.6)


def test_sft_is_the_mean_negative_log_likelihood() -> None:
    inputs = replace(make_inputs([[1.0, 1.0], [1.0]], [0.0, 0.0], logprob=-0.7), num_loss_tokens=6)
    output = sft_loss(inputs)
    assert output.loss.item() == pytest.approx(0.7 * 3 / 6)
    assert torch.autograd.grad(output.loss, inputs.logprobs)[0].tolist() == pytest.approx([-1 / 6] * 3)
    assert output.metrics.values() == {"loss": pytest.approx(0.35)}


def test_the_kl_of_pairs_is_the_mean_log_ratio_of_their_completions() -> None:
    inputs = PairInputs(
        logprobs=torch.tensor([[-1.0, -4.0], [-2.0, -3.0]], requires_grad=True),
        ref_logprobs=torch.tensor([[-3.0, -3.5], [-2.5, -2.0]]),
        lengths=torch.tensor([[2, 3], [4, 1]]),
        num_pairs=2,
        num_chosen_tokens=6,
    )
    values = pair_loss(inputs, PreferenceConfig()).metrics.values()
    assert values["kl"] == pytest.approx((2.0 - 0.5 + 0.5 - 1.0) / 4)
    without = replace(inputs, ref_logprobs=None)
    assert "kl" not in pair_loss(without, PreferenceConfig(loss="simpo")).metrics.values()


def random_step(*, seed: int = 0, num_sequences: int = 9) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return a policy (one vector) and a step of feature sequences whose first tokens are not trained."""
    generator = torch.Generator().manual_seed(seed)
    policy = torch.randn(4, generator=generator)
    sequences = []
    for length in torch.randint(2, 10, (num_sequences,), generator=generator).tolist():
        features = torch.randn(length, 4, generator=generator)
        logprobs = functional.logsigmoid(features @ policy)
        noise = torch.randn(3, length, generator=generator) * 0.3
        sequences.append(
            {
                "features": features,
                "old_logprobs": logprobs + noise[0],
                "sampling_logprobs": logprobs + noise[1],
                "ref_logprobs": logprobs + noise[2],
                "advantages": torch.randn(1, generator=generator).expand(length),
                "loss_mask": torch.arange(length) > length // 3,
            }
        )
    sequences[-1]["loss_mask"] = torch.zeros_like(sequences[-1]["loss_mask"])  # a truncated rollout, masked
    return policy.requires_grad_(), sequences


def pack(policy: Tensor, sequences: list[dict[str, Tensor]], num_loss_tokens: int, num_sequences: int) -> LossInputs:
    packed = {name: torch.cat([sequence[name] for sequence in sequences]) for name in sequences[0]}
    lengths = torch.tensor([len(sequence["loss_mask"]) for sequence in sequences])
    scores = packed.pop("features") @ policy
    return LossInputs(
        logprobs=functional.logsigmoid(scores),
        entropy=functional.softplus(scores),
        sequence_ids=torch.arange(len(sequences)).repeat_interleave(lengths),
        num_loss_tokens=num_loss_tokens,
        num_sequences=num_sequences,
        max_completion_tokens=MAX_COMPLETION_TOKENS,
        **packed,
    )


def run_cut(cut: list[list[int]], config: LossConfig | None) -> tuple[Tensor, float, dict[str, float]]:
    """Return the gradient, loss and metrics of the step in the given micro batches; without a config, of SFT."""
    policy, sequences = random_step()
    num_loss_tokens = int(sum(sequence["loss_mask"].sum() for sequence in sequences))
    total: MetricSums | None = None
    loss = 0.0
    for members in cut:
        micro_batch = [sequences[index] for index in members]
        if not micro_batch:  # the placeholder of a rank that has less to do
            micro_batch = [{name: value[:2] for name, value in sequences[0].items()}]
            micro_batch[0]["loss_mask"] = torch.zeros(2, dtype=torch.bool)
        inputs = pack(policy, micro_batch, num_loss_tokens, len(sequences) - 1)
        output: LossOutput = sft_loss(inputs) if config is None else policy_loss(inputs, config)
        output.loss.backward()
        loss += output.loss.item()
        if total is None:
            total = output.metrics
        else:
            total.merge(output.metrics)
    assert total is not None
    assert policy.grad is not None
    return policy.grad, loss, total.values()


def random_cut(seed: int, num_sequences: int = 9) -> list[list[int]]:
    """Return a random number of micro batches, some of them empty, with the sequences in random order."""
    random = np.random.default_rng(seed)
    cut: list[list[int]] = [[] for _ in range(random.integers(2, 7))]
    for index in random.permutation(num_sequences).tolist():
        cut[random.integers(len(cut))].append(index)
    return cut


CONFIGS = [
    LossConfig(name=name, level=level, aggregate=aggregate, beta=0.05, entropy_coef=0.02, clip_delta=1.5)
    for name, level, aggregate in itertools.product(NAMES, LEVELS, AGGREGATES)
]


@pytest.mark.parametrize(
    "config", [*CONFIGS, None], ids=lambda c: "sft" if c is None else f"{c.name}-{c.level}-{c.aggregate}"
)
def test_every_cut_into_micro_batches_and_ranks_gives_the_same_step(config: LossConfig | None) -> None:
    """Check one list of micro batches for both, because ranks, too, sum their gradients."""
    whole_gradient, whole_loss, whole_metrics = run_cut([list(range(9))], config)
    assert whole_gradient.abs().max() > 1e-3
    for cut in [[[index] for index in range(9)], *(random_cut(seed) for seed in range(4))]:
        gradient, loss, metrics = run_cut(cut, config)
        torch.testing.assert_close(gradient, whole_gradient, rtol=1e-5, atol=1e-5 * whole_gradient.abs().max().item())
        assert loss == pytest.approx(whole_loss, rel=1e-5, abs=1e-6)
        assert metrics == pytest.approx(whole_metrics, rel=1e-5, abs=1e-6)


def test_values_where_unmasked_are_never_read() -> None:
    policy, sequences = random_step()
    config = LossConfig(level="sequence", beta=0.1, entropy_coef=0.1)
    clean = pack(policy, sequences, 50, 9)
    expected = policy_loss(clean, config)
    names = ("logprobs", "entropy", "old_logprobs", "sampling_logprobs", "ref_logprobs", "advantages")
    for poison in (math.nan, math.inf, -math.inf):
        dirty = replace(clean, **{name: torch.where(clean.loss_mask, getattr(clean, name), poison) for name in names})
        got = policy_loss(dirty, config)
        assert got.loss.item() == expected.loss.item()
        assert got.metrics.values() == expected.metrics.values()
        torch.testing.assert_close(*(torch.autograd.grad(o.loss, policy, retain_graph=True) for o in (got, expected)))


@pytest.mark.parametrize("num_tokens", [0, 2])
@pytest.mark.parametrize("config", CONFIGS[::4])
def test_an_empty_micro_batch_has_a_zero_gradient_and_no_means(num_tokens: int, config: LossConfig) -> None:
    policy, sequences = random_step()
    empty = {name: value[:num_tokens] for name, value in sequences[0].items()} | {
        "loss_mask": torch.zeros(num_tokens, dtype=torch.bool)
    }
    output = policy_loss(pack(policy, [empty], 50, 9), config)
    output.loss.backward()
    assert policy.grad is not None
    assert not policy.grad.any()
    assert output.metrics.values() == {"loss": 0.0}


@pytest.mark.parametrize("level", LEVELS)
def test_a_clipped_token_has_no_gradient_however_far_it_moved(level: str) -> None:
    inputs = make_inputs([[1.0]], [1.0])
    assert inputs.old_logprobs is not None
    inputs.old_logprobs = inputs.old_logprobs - 1e4
    assert gradient(inputs, LossConfig(level=level)) == [0.0]


def test_clip_metrics_are_shares_of_the_loss_tokens() -> None:
    inputs = make_inputs([[0.5, 1.5, 1.0, 9.0], [0.5, 0.6, 1.0, 1.5]], [1.0, -1.0])
    values = policy_loss(inputs, LossConfig()).metrics.values()
    assert values["clip_ratio/low_mean"] == 2 / 8
    assert values["clip_ratio/high_mean"] == 2 / 8
    assert values["clip_ratio/region_mean"] == 4 / 8


def test_sampling_metrics_compare_the_learner_with_the_sampler() -> None:
    inputs = make_inputs([[1.0, 1.0]], [1.0], logprob=-1.0)
    inputs.sampling_logprobs = torch.tensor([-1.0, -1.0 + math.log(2)], dtype=torch.float64)
    values = policy_loss(inputs, LossConfig()).metrics.values()
    assert values["sampling/logp_difference/mean"] == pytest.approx(math.log(2) / 2)
    assert values["sampling/logp_difference/max"] == pytest.approx(math.log(2))
    assert values["sampling/importance_ratio/min"] == pytest.approx(0.5)
    assert values["sampling/importance_ratio/mean"] == pytest.approx(0.75)
    assert values["sampling/importance_ratio/max"] == pytest.approx(1.0)


def test_flat_state_reduced_over_ranks_equals_merging() -> None:
    policy, sequences = random_step()
    ranks = [policy_loss(pack(policy, part, 50, 9), LossConfig()).metrics for part in (sequences[:4], sequences[4:])]
    states = [rank.state() for rank in ranks]
    reduced = MetricSums(
        **{name: getattr(ranks[0], name) for name in ("num_tokens", "means", "totals", "mins", "maxs")}
    )
    reduced.load(
        states[0][0] + states[1][0],
        torch.minimum(states[0][1], states[1][1]),
        torch.maximum(states[0][2], states[1][2]),
    )
    ranks[0].merge(ranks[1])
    assert reduced.values() == pytest.approx(ranks[0].values())
    assert reduced.values()["sampling/importance_ratio/max"] > reduced.values()["sampling/importance_ratio/min"]


@pytest.mark.parametrize("path", ALGORITHMS, ids=lambda path: path.stem)
def test_shipped_algorithms_set_known_options_to_what_is_not_the_default(path: Path) -> None:
    defaults = OmegaConf.structured(AlgorithmConfig)
    group = OmegaConf.load(path)
    changed = OmegaConf.merge(defaults, group)

    def leaves(node: object, prefix: str = "") -> list[str]:
        if not OmegaConf.is_dict(node):
            return [prefix]
        return [leaf for key, value in node.items() for leaf in leaves(value, f"{prefix}.{key}" if prefix else key)]

    names = leaves(group)
    assert names
    for name in names:
        assert OmegaConf.select(changed, name) != OmegaConf.select(defaults, name), f"{name} is the default"


@pytest.mark.parametrize("aggregate", AGGREGATES)
def test_the_branches_of_an_episode_weigh_as_much_as_one_sequence(aggregate: str) -> None:
    config = LossConfig(aggregate=aggregate)
    whole = make_inputs([[1.1, 0.9, 1.0, 1.05], [1.0, 0.95]], [2.0, -1.0])
    parted = make_inputs([[1.1, 0.9, 1.0], [1.05], [1.0, 0.95]], [2.0, 2.0, -1.0])
    parted = replace(parted, num_sequences=2, shares=torch.tensor([0.75] * 3 + [0.25] + [1.0] * 2, dtype=torch.float64))
    assert gradient(parted, config) == pytest.approx(gradient(whole, config))


def test_k3_of_a_token_far_below_the_reference_is_bounded_and_pushes_nowhere() -> None:
    log_ratio = torch.tensor([1.0, 200.0], requires_grad=True)
    found = estimate_kl(log_ratio, "k3")
    found.sum().backward()
    assert log_ratio.grad is not None
    assert found.isfinite().all()
    assert log_ratio.grad.tolist() == pytest.approx([math.e - 1, 0.0])

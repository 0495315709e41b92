"""Advantages, of rollouts and of turns, against numbers worked out by hand and a plain-Python reference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.algorithms.advantages import ADVANTAGES as REGISTERED
from rlpipe.algorithms.advantages import (
    AdvantageInputs,
    combine_rewards,
    compute_advantages,
    estimate_advantages,
    generalized_advantages,
    turn_advantages,
)
from rlpipe.configs.schema.algorithm_config import ADVANTAGES as CHOICES
from rlpipe.configs.schema.algorithm_config import AdvantageConfig
from rlpipe.errors import RunError
from rlpipe.types import FloatArray

NAN = math.nan
NAMES = ["grpo", "rloo", "reinforce", "reinforce_baseline"]


def array(*values: float) -> FloatArray:
    return np.array(values, np.float32)


def advantages(name: str, *groups: FloatArray, scale: str = "group", eps: float = 0.0) -> list[list[float]]:
    config = AdvantageConfig(name=name, scale=scale, eps=eps)
    return [group.tolist() for group in compute_advantages(groups, config)]


def test_grpo_divides_by_the_sample_standard_deviation_of_the_group() -> None:
    assert advantages("grpo", array(1, 2, 3), array(0, 4))[0] == pytest.approx([-1, 0, 1])
    assert advantages("grpo", array(0, 4))[0] == pytest.approx([-(2**-0.5), 2**-0.5])


def test_grpo_adds_eps_to_the_standard_deviation() -> None:
    assert advantages("grpo", array(1, 2, 3), eps=1.0)[0] == pytest.approx([-0.5, 0, 0.5])


def test_grpo_scaled_by_the_batch_uses_one_standard_deviation_of_all_rewards() -> None:
    std = statistics.stdev([1, 3, 0, 8])
    got = advantages("grpo", array(1, 3), array(0, 8), scale="batch")
    assert got == [pytest.approx([-1 / std, 1 / std]), pytest.approx([-4 / std, 4 / std])]


def test_grpo_unscaled_is_the_difference_from_the_mean() -> None:
    assert advantages("grpo", array(1, 2, 6), scale="none", eps=5.0) == [[-2, -1, 3]]


def test_rloo_subtracts_the_mean_of_the_others() -> None:
    assert advantages("rloo", array(1, 2, 6)) == [pytest.approx([-3, -1.5, 4.5])]


def test_reinforce_is_the_reward() -> None:
    assert advantages("reinforce", array(1, 2), array(-3)) == [[1, 2], [-3]]


def test_reinforce_baseline_normalises_the_differences_over_the_batch() -> None:
    std = statistics.stdev([-1, 1, -4, 4])
    got = advantages("reinforce_baseline", array(1, 3), array(0, 8))
    assert got == [pytest.approx([-1 / std, 1 / std]), pytest.approx([-4 / std, 4 / std])]


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_baseline"])
@pytest.mark.parametrize("eps", [0.0, 1e-4])
def test_equal_rewards_give_exactly_zero_alongside_a_group_with_signal(name: str, eps: float) -> None:
    got = advantages(name, array(*[0.1] * 7), array(0, 0.3, 1), eps=eps)
    assert got[0] == [0.0] * 7
    assert any(got[1])


@pytest.mark.parametrize("name", ["grpo", "rloo", "reinforce_baseline"])
def test_a_group_of_one_has_no_advantage(name: str) -> None:
    assert advantages(name, array(5)) == [[0]]
    assert advantages(name, array(5), array(0, 1))[0] == [0]


@pytest.mark.parametrize("name", NAMES)
def test_a_rollout_without_reward_has_no_advantage_and_moves_no_other(name: str) -> None:
    with_gap = advantages(name, array(1, NAN, 2, 6), array(0, 4), eps=0.1)
    without = advantages(name, array(1, 2, 6), array(0, 4), eps=0.1)
    assert with_gap[0][1] == 0
    assert [with_gap[0][index] for index in (0, 2, 3)] == without[0]
    assert with_gap[1] == without[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_group_without_any_reward_has_no_advantages(name: str) -> None:
    assert advantages(name, array(NAN, NAN)) == [[0, 0]]


def test_no_groups_give_no_advantages() -> None:
    assert compute_advantages([], AdvantageConfig()) == []


def test_results_are_float32() -> None:
    assert [group.dtype for group in compute_advantages([array(1, 2)], AdvantageConfig())] == [np.float32]
    assert combine_rewards(array(1, 2)[:, None], [1.0], "normalize_then_sum", 0.1).dtype == np.float32


def test_sum_then_normalize_is_the_weighted_sum_of_what_was_given() -> None:
    rewards = np.array([[1, 2], [NAN, 3], [4, NAN], [NAN, NAN]], np.float32)
    got = combine_rewards(rewards, [1.0, 0.5], "sum_then_normalize", 0.0)
    np.testing.assert_array_equal(got, array(2, 1.5, 4, NAN))


def test_normalize_then_sum_normalises_each_reward_within_the_group() -> None:
    rewards = np.array([[1, 0], [2, 100], [3, 200]], np.float32)
    got = combine_rewards(rewards, [1.0, 2.0], "normalize_then_sum", 0.0)
    assert got.tolist() == pytest.approx([-3, 0, 3])


def test_normalize_then_sum_leaves_missing_rewards_out() -> None:
    rewards = np.array([[1, NAN], [3, 5], [NAN, NAN]], np.float32)
    got = combine_rewards(rewards, [1.0, 1.0], "normalize_then_sum", 0.0)
    np.testing.assert_allclose(got, array(-(2**-0.5), 2**-0.5, NAN), rtol=1e-6)


def test_normalize_then_sum_of_equal_rewards_is_zero_not_missing() -> None:
    got = combine_rewards(np.full((3, 1), 0.1, np.float32), [1.0], "normalize_then_sum", 0.0)
    assert got.tolist() == [0, 0, 0]


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="2 weights"):
        combine_rewards(np.zeros((3, 1), np.float32), [1.0, 2.0], "sum_then_normalize", 0.0)


def plain_advantages(groups: list[list[float]], name: str, scale: str, eps: float) -> list[list[float]]:
    """Compute the formulas one rollout at a time, for groups of at least two."""
    everything = [reward for group in groups for reward in group]
    centered = [[reward - statistics.fmean(group) for reward in group] for group in groups]
    baseline_std = statistics.stdev([value for group in centered for value in group]) + eps
    result = []
    for group, differences in zip(groups, centered, strict=True):
        row = []
        for index, reward in enumerate(group):
            others = group[:index] + group[index + 1 :]
            divisor = {"group": statistics.stdev(group), "batch": statistics.stdev(everything), "none": 1 - eps}[scale]
            row.append(
                {
                    "grpo": differences[index] / (divisor + eps),
                    "rloo": reward - statistics.fmean(others),
                    "reinforce": reward,
                    "reinforce_baseline": differences[index] / baseline_std,
                }[name]
            )
        result.append(row)
    return result


@given(
    groups=st.lists(st.lists(st.integers(-20, 20), min_size=2, max_size=9), min_size=1, max_size=5),
    name=st.sampled_from(NAMES),
    scale=st.sampled_from(["group", "batch", "none"]),
)
def test_equals_the_plain_reference_for_groups_of_any_size(groups: list[list[int]], name: str, scale: str) -> None:
    rewards = [[value / 4 for value in group] for group in groups]
    got = advantages(name, *[array(*group) for group in rewards], scale=scale, eps=0.01)
    for got_group, want_group in zip(got, plain_advantages(rewards, name, scale, 0.01), strict=True):
        assert got_group == pytest.approx(want_group, rel=1e-5, abs=1e-6)


COUNTS = st.integers(1, 9)
GROUPS = st.lists(
    st.lists(st.tuples(st.integers(0, 8), COUNTS), min_size=2, max_size=6), min_size=1, max_size=4
)  # rewards in quarters, and loss tokens


def estimate(
    name: str, groups: list[list[tuple[int, int]]], *, scale: str = "group", eps: float = 0.0
) -> list[list[float]]:
    rewards = [array(*[reward / 4 for reward, _ in group]) for group in groups]
    counts = [np.array([count for _, count in group], np.int32) for group in groups]
    config = AdvantageConfig(name=name, scale=scale, eps=eps)
    return [group.tolist() for group in compute_advantages(rewards, config, num_tokens=counts)]


def assert_near(got: list[list[float]], want: list[list[float]]) -> None:
    for got_group, want_group in zip(got, want, strict=True):
        assert got_group == pytest.approx(want_group, rel=1e-6, abs=1e-6)


def test_every_name_of_the_schema_is_registered() -> None:
    assert tuple(REGISTERED) == CHOICES


def masked_whiten(tokens: Sequence[float]) -> list[float]:
    """Return what verl's function of this name makes of the tokens of a batch."""
    mean = sum(tokens) / len(tokens)
    variance = sum((token - mean) ** 2 for token in tokens) / len(tokens) * len(tokens) / (len(tokens) - 1)
    return [(token - mean) * (variance + 1e-8) ** -0.5 for token in tokens]


@given(groups=GROUPS, eps=st.sampled_from([AdvantageConfig().eps, 0.0, 1.0]), scale=st.sampled_from([0.25, 1e-4]))
def test_reinforce_plus_plus_whitens_over_all_tokens(
    groups: list[list[tuple[int, int]]], eps: float, scale: float
) -> None:
    rewards = [array(*[reward * scale for reward, _ in group]) for group in groups]
    counts = [np.array([count for _, count in group], np.int32) for group in groups]
    config = AdvantageConfig(name="reinforce_plus_plus", eps=eps)
    found = compute_advantages(rewards, config, num_tokens=counts)
    tokens = np.repeat(np.concatenate(rewards), np.concatenate(counts)).tolist()
    got = np.repeat(np.concatenate(found), np.concatenate(counts)).tolist()
    assert got == pytest.approx(masked_whiten(tokens), rel=1e-6, abs=1e-6)


@given(groups=GROUPS)
def test_opo_weighs_the_baseline_by_length(groups: list[list[tuple[int, int]]]) -> None:
    want = []
    for group in groups:
        baseline = sum(count * reward / 4 for reward, count in group) / sum(count for _, count in group)
        want.append([reward / 4 - baseline for reward, _ in group])
    assert_near(estimate("opo", groups), want)


@given(groups=GROUPS)
def test_gpg_scales_by_the_rollouts_that_earn_something(groups: list[list[tuple[int, int]]]) -> None:
    rewards = [[reward / 4 for reward, _ in group] for group in groups]
    everything = [reward for group in rewards for reward in group]
    alpha = len(everything) / max(sum(reward != 0 for reward in everything), 1)
    want = [[alpha * (reward - statistics.fmean(group)) for reward in group] for group in rewards]
    assert_near(estimate("gpg", groups), want)


@given(groups=GROUPS, scale=st.sampled_from(["group", "none"]))
def test_pass_at_k_rewards_the_best_for_its_margin(groups: list[list[tuple[int, int]]], scale: str) -> None:
    want = []
    for group in groups:
        rewards = [reward / 4 for reward, _ in group]
        best, second = sorted(rewards, reverse=True)[:2]
        divisor = statistics.stdev(rewards) + 1e-4 if scale == "group" else 1.0
        want.append([(best - second) / divisor if reward == best else 0.0 for reward in rewards])
    assert_near(estimate("pass_at_k", groups, scale=scale, eps=1e-4), want)


@given(groups=GROUPS)
def test_max_rl_divides_by_the_mean(groups: list[list[tuple[int, int]]]) -> None:
    rewards = [[reward / 4 for reward, _ in group] for group in groups]
    want = [
        [(reward - statistics.fmean(group)) / (statistics.fmean(group) + 1e-4) for reward in group] for group in rewards
    ]
    assert_near(estimate("max_rl", groups, eps=1e-4), want)


def test_max_rl_is_the_gradient_of_the_log_of_the_pass_rate() -> None:
    """Check a group of n with k right: (1 - k/n) / (k/n) for these, -1 for the others."""
    assert advantages("max_rl", array(1, 0, 0, 0)) == [pytest.approx([3, -1, -1, -1])]


def test_max_rl_refuses_means_that_would_turn_the_signs() -> None:
    with pytest.raises(RunError, match=r"which is -0\.5 in one; add a constant to the rewards"):
        advantages("max_rl", array(-1, 0))


@pytest.mark.parametrize("name", ["opo", "gpg", "pass_at_k", "max_rl", "reinforce_plus_plus"])
def test_missing_rewards_move_no_other_and_have_no_advantage(name: str) -> None:
    with_gap = advantages(name, array(1, NAN, 2, 6), array(0, 4), array(NAN), eps=0.1)
    without = advantages(name, array(1, 2, 6), array(0, 4), eps=0.1)
    assert with_gap[0].pop(1) == 0
    assert with_gap[2] == [0]
    assert_near(with_gap[:2], without)


@pytest.mark.parametrize("name", ["opo", "gpg", "pass_at_k", "max_rl", "reinforce_plus_plus"])
def test_no_groups_and_groups_of_one_are_no_problem(name: str) -> None:
    assert compute_advantages([], AdvantageConfig(name=name)) == []
    assert advantages(name, array(5)) == [[0]]


TOKENS = st.lists(
    st.lists(
        st.tuples(st.integers(0, 8), st.lists(st.tuples(st.integers(1, 30), st.integers(-9, 9)), max_size=7)),
        min_size=1,
        max_size=5,
    ),
    min_size=1,
    max_size=3,
)
"""Groups of rollouts: rewards in quarters, and for each loss token its energy in twentieths and penalty in tenths."""


def estimate_by_token(
    name: str, groups: list[list[tuple[int, list[tuple[int, int]]]]], baselines: Sequence[float] = ()
) -> list[list[list[float]]]:
    inputs = AdvantageInputs(
        config=AdvantageConfig(name=name),
        baselines=baselines,
        num_tokens=[np.array([len(tokens) for _, tokens in group], np.int32) for group in groups],
        energies=[[np.array([one for one, _ in tokens], np.float64) / 20 for _, tokens in group] for group in groups],
        penalties=[[np.array([one for _, one in tokens], np.float64) / 10 for _, tokens in group] for group in groups],
    )
    found = estimate_advantages([array(*[reward / 4 for reward, _ in group]) for group in groups], inputs)
    return [
        [np.broadcast_to(own, count).tolist() for own, count in zip(group, counts, strict=True)]
        for group, counts in zip(found, inputs.num_tokens, strict=True)
    ]


def returns_of(group: list[tuple[int, list[tuple[int, int]]]]) -> list[list[float]]:
    """Return for each token the reward minus the penalties from there on."""
    return [
        [reward / 4 - sum(penalty / 10 for _, penalty in tokens[place:]) for place in range(len(tokens))]
        for reward, tokens in group
    ]


@settings(deadline=None)
@given(groups=TOKENS)
def test_the_optimal_token_baseline_weighs_returns_by_the_energy_so_far(
    groups: list[list[tuple[int, list[tuple[int, int]]]]],
) -> None:
    """Compare with verl's formula, token by token; as in verl the longest rollout has no baseline where it is alone."""
    got = estimate_by_token("optimal_token_baseline", groups)
    for values, group in zip(got, groups, strict=True):
        returns = returns_of(group)
        for index, own in enumerate(returns):
            for place, value in enumerate(own):
                beside = [other for other, (_, tokens) in enumerate(group) if len(tokens) > place]
                weights = [sum(energy / 20 for energy, _ in group[other][1][: place + 1]) for other in beside]
                weighed = sum(weight * returns[other][place] for weight, other in zip(weights, beside, strict=True))
                baseline = weighed / (sum(weights) + 1e-8) if len(beside) > 1 else 0.0
                scored = sum(bool(tokens) for _, tokens in group)
                assert values[index][place] == pytest.approx(value - baseline if scored > 1 else 0.0, abs=1e-6)


def test_a_rollout_without_reward_is_in_no_token_baseline() -> None:
    tokens = [array(0.5, 1), array(1, 1), array(1, 2)]
    inputs = AdvantageInputs(
        config=AdvantageConfig(name="optimal_token_baseline"), num_tokens=[np.array([2, 2, 2])], energies=[tokens]
    )
    (found,) = estimate_advantages([array(3, NAN, 0)], inputs)
    expected = [[3 - 3 * 0.5 / 1.5, 3 - 3 * 1.5 / 4.5], [0, 0], [-3 * 0.5 / 1.5, -3 * 1.5 / 4.5]]
    np.testing.assert_allclose(np.stack(found), expected, atol=1e-6)


@settings(deadline=None)
@given(groups=TOKENS)
def test_reinforce_plus_plus_whitens_the_returns_of_tokens_with_penalties(
    groups: list[list[tuple[int, list[tuple[int, int]]]]],
) -> None:
    tokens = [value for group in groups for own in returns_of(group) for value in own]
    got = [value for group in estimate_by_token("reinforce_plus_plus", groups) for own in group for value in own]
    if len(tokens) < 2:
        assert got == [0.0] * len(tokens)
        return
    assert got == pytest.approx(masked_whiten(tokens), abs=1e-6, rel=1e-6)


@settings(deadline=None)
@given(groups=TOKENS, gamma=st.sampled_from([1.0, 0.9]), lam=st.sampled_from([1.0, 0.95, 0.0]))
def test_gae_equals_the_recursion_of_verl(
    groups: list[list[tuple[int, list[tuple[int, int]]]]], gamma: float, lam: float
) -> None:
    """Take the first number of each token as its value; rewards are the penalties, and the reward at the last token."""
    values = [[np.array([one for one, _ in tokens], np.float64) / 20 for _, tokens in group] for group in groups]
    penalties = [[np.array([one for _, one in tokens], np.float64) / 10 for _, tokens in group] for group in groups]
    rewards = [array(*[reward / 4 for reward, _ in group]) for group in groups]
    config = AdvantageConfig(name="gae", gamma=gamma, lam=lam)
    inputs = AdvantageInputs(
        config=config,
        num_tokens=[np.array([len(tokens) for _, tokens in group], np.int32) for group in groups],
        penalties=penalties,
        estimates=generalized_advantages(rewards, values, penalties, config),
    )
    found = estimate_advantages(rewards, inputs)
    got = [value for group in found for own in group for value in np.asarray(own).tolist()]
    expected: list[float] = []
    for group, own_values in zip(groups, values, strict=True):
        for (reward, tokens), own in zip(group, own_values, strict=True):
            last, following, backwards = 0.0, 0.0, []
            for place in reversed(range(len(tokens))):
                token_reward = -tokens[place][1] / 10 + (reward / 4 if place == len(tokens) - 1 else 0)
                last = token_reward + gamma * following - own[place] + gamma * lam * last
                following = own[place]
                backwards.append(last)
            expected += backwards[::-1]
    if len(expected) > 1:
        assert got == pytest.approx(masked_whiten(expected), abs=1e-6, rel=1e-6)


@settings(deadline=None)
@given(groups=TOKENS, baseline=st.integers(-8, 8))
def test_remax_subtracts_the_reward_of_the_greedy_completion(
    groups: list[list[tuple[int, list[tuple[int, int]]]]], baseline: int
) -> None:
    """Compare with verl's: the return of each token, with the KL from there on, minus the greedy reward."""
    baselines = [baseline / 4 + index for index in range(len(groups))]
    got = estimate_by_token("remax", groups, baselines)
    for values, group, own in zip(got, groups, baselines, strict=True):
        for found, returns in zip(values, returns_of(group), strict=True):
            assert found == pytest.approx([value - own for value in returns], abs=1e-6)


def test_remax_without_a_greedy_reward_gives_no_advantage() -> None:
    inputs = AdvantageInputs(
        config=AdvantageConfig(name="remax"), num_tokens=[np.array([2, 2]), np.array([1])], baselines=[0.5, NAN]
    )
    found = estimate_advantages([array(1, NAN), array(3)], inputs)
    assert [np.asarray(group).tolist() for group in found] == [[0.5, 0.0], [0.0]]


@settings(deadline=None)
@given(groups=TOKENS, name=st.sampled_from(["grpo", "rloo", "opo", "reinforce"]))
def test_the_penalties_of_a_rollout_are_subtracted_from_its_reward(
    groups: list[list[tuple[int, list[tuple[int, int]]]]], name: str
) -> None:
    rewards = [
        array(*[reward / 4 - sum(penalty for _, penalty in tokens) / 10 for reward, tokens in group])
        for group in groups
    ]
    counts = [np.array([len(tokens) for _, tokens in group], np.int32) for group in groups]
    expected = compute_advantages(rewards, AdvantageConfig(name=name), num_tokens=counts)
    for got, want, sizes in zip(estimate_by_token(name, groups), expected, counts, strict=True):
        for own, value, size in zip(got, want, sizes, strict=True):
            assert own == pytest.approx([float(value)] * size, abs=2e-3 if name == "grpo" else 1e-5)


STOP, GO = 0.3, 0.7
"""Probabilities of the first turn: an episode stops, or goes on to a second turn."""
LEFT, RIGHT = 0.6, 0.4
"""Probabilities of the second turn."""
EPISODES = {
    # probability, gradient of the log-probs by the logits of STOP and LEFT in each turn, rewards of the turns
    "stop": (STOP, [(1 - STOP, 0.0)], [0.4]),
    "left": (GO * LEFT, [(-STOP, 0.0), (0.0, 1 - LEFT)], [-0.2, 1.0]),
    "right": (GO * RIGHT, [(-STOP, 0.0), (0.0, -LEFT)], [-0.2, -0.5]),
}
Credit = Callable[[Sequence[Sequence[float]]], Sequence[Sequence[float] | np.ndarray]]


def true_gradient() -> np.ndarray:
    """Return the gradient of the expected sum of rewards."""
    return np.sum(
        [chance * np.sum(gradients, 0) * sum(rewards) for chance, gradients, rewards in EPISODES.values()], axis=0
    )


def expected_gradient(credit: Credit, num_siblings: int) -> np.ndarray:
    """Return the mean, over all groups that may be drawn, of the gradient that the advantages give."""
    total = np.zeros(2)
    for group in product(EPISODES.values(), repeat=num_siblings):
        chance = np.prod([own[0] for own in group])
        advantages = credit([own[2] for own in group])
        for (_, gradients, _), values in zip(group, advantages, strict=True):
            total += chance * np.sum([np.multiply(one, float(v)) for one, v in zip(gradients, values, strict=True)], 0)
    return total / num_siblings


def over_the_living(rewards: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return the returns minus the mean of the siblings that still play, in which the sibling itself counts."""
    returns = [np.cumsum(values[::-1])[::-1] for values in rewards]
    found = []
    for own in returns:
        baselines = [np.mean([other[turn] for other in returns if len(other) > turn]) for turn in range(len(own))]
        found.append([value - base for value, base in zip(own, baselines, strict=True)])
    return found


@pytest.mark.parametrize("num_siblings", [1, 2, 3, 4])
def test_the_expected_gradient_is_the_true_one(num_siblings: int) -> None:
    np.testing.assert_allclose(expected_gradient(turn_advantages, num_siblings), true_gradient(), atol=1e-6)


@pytest.mark.parametrize("num_siblings", [2, 3, 4])
def test_a_mean_over_the_living_siblings_turns_the_gradient(num_siblings: int) -> None:
    """Check the direction, as a factor would be no harm."""
    biased, true = expected_gradient(over_the_living, num_siblings), true_gradient()
    cosine = biased @ true / np.linalg.norm(biased) / np.linalg.norm(true)
    assert cosine < 1 - 1e-4


def test_a_turn_is_compared_with_the_same_turn_of_the_others() -> None:
    long, short, other = turn_advantages([[1.0, 2.0, 3.0], [4.0], [0.0, 1.0]])
    np.testing.assert_allclose(long, [6 - (4 + 1) / 2, 5 - (0 + 1) / 2, 3 - 0])
    np.testing.assert_allclose(short, [4 - (6 + 1) / 2])
    np.testing.assert_allclose(other, [1 - (6 + 4) / 2, 1 - (5 + 0) / 2])


def test_equal_siblings_have_no_advantage() -> None:
    assert not np.concatenate(turn_advantages([[0.5, 1.0]] * 4)).any()
    assert turn_advantages([]) == []
    np.testing.assert_allclose(turn_advantages([[0.5, 1.0]])[0], [1.5, 1.0])

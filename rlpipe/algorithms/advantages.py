"""Advantages of rollouts from the rewards of a step's groups, and of single turns from rewards of their own.

Shapes: G rollouts of one group, R reward functions, S siblings of one group, T turns of the longest, N turns of one
sibling. ``nan`` stands for a reward that was not given. A rollout that no reward function scored has the reward
``nan``: it counts in no mean and no standard deviation, and its advantage is 0. Everything is computed in float64, so
that equal rewards give advantages of exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.algorithms.plugins import ADVANTAGE, call_function, own_error, registrar
from rlpipe.common.imports import one_line
from rlpipe.configs.schema.algorithm_config import AdvantageConfig
from rlpipe.errors import RunError
from rlpipe.types import FloatArray, IntArray, RolloutGroup

Values = NDArray[np.float64]
TokenValues = Sequence[Sequence[NDArray[np.floating[Any]]]]
"""Values of the loss tokens of each rollout, by group."""
TINY = 1e-8
"""Added to a sum of weights that may be 0."""
WHITENING_EPS = 1e-8
"""Added to the variance of whitened values, as by verl's ``masked_whiten``."""


def combine_rewards(rewards: FloatArray, weights: Sequence[float] | FloatArray, combine: str, eps: float) -> FloatArray:
    """Return one reward per rollout of a group: ``[G, R]`` and ``[R]`` give ``[G]``; ``nan`` if no function scored it.

    ``sum_then_normalize`` is the weighted sum. ``normalize_then_sum`` first subtracts from each function's rewards
    their mean in the group and divides by their standard deviation plus ``eps`` (GDPO, arXiv:2601.05242).
    """
    values = np.asarray(rewards, np.float64)  # [G, R]
    if values.ndim != 2 or values.shape[1] != len(weights):
        raise ValueError(f"rewards of shape {values.shape} do not fit {len(weights)} weights; give [G, R] and [R]")
    if combine == "normalize_then_sum":
        values = np.stack([_divide(_center(column), _std(column), eps) for column in values.T], axis=1)
    elif combine != "sum_then_normalize":
        raise ValueError(f"combine is {combine!r}; use sum_then_normalize or normalize_then_sum")
    totals = np.nansum(values * np.asarray(weights, np.float64), axis=1)
    totals[np.isnan(values).all(axis=1)] = np.nan
    return totals.astype(np.float32)


@dataclass(kw_only=True, slots=True, frozen=True)
class AdvantageInputs:
    """A step's data that advantages may depend on besides its rewards; lists have one entry for each group."""

    config: AdvantageConfig
    num_tokens: Sequence[IntArray]
    """Loss tokens of each rollout ``[G]``; in an episode of all its branches."""
    pairwise: Sequence[FloatArray] | None = None
    """Part of each reward that is a mean over pairs ``[G]``, of EBFT; None without one."""
    baselines: Sequence[float] = ()
    """Reward of each group's greedy completion, NaN if it has none; empty without greedy completions."""
    groups: Sequence[RolloutGroup] = ()
    """The rollouts, with tokens, log-probs and the row's columns (``task``); empty in the learner."""
    penalties: TokenValues | None = None
    """Penalty of each loss token of every rollout, which the rewards have been reduced by; None without any."""
    energies: TokenValues | None = None
    """Squared length of the gradient of each loss token's log-prob by its logits; None if not needed."""
    estimates: Sequence[Sequence[Values]] | None = None
    """Generalized advantage estimate of each loss token; None without a critic."""


Estimator = Callable[[list[Values], AdvantageInputs], Sequence[Values | list[Values]]]
"""Function that returns the advantages of each group, ``[G]`` or one array of its loss tokens for each rollout."""
ADVANTAGES: dict[str, Estimator] = {}
"""The built-in estimators by ``algorithm.advantage.name``."""
register_advantage = registrar(ADVANTAGES)


def compute_advantages(
    rewards: Sequence[FloatArray],
    config: AdvantageConfig,
    pairwise: Sequence[FloatArray] | None = None,
    num_tokens: Sequence[IntArray] | None = None,
) -> list[FloatArray]:
    """Return the advantages ``[G]`` of every group of a step, from its rewards ``[G]``; groups may differ in size.

    ``pairwise`` is the part ``[G]`` of each reward that is a mean over the rollout's pairs with the others, such as
    EBFT's diversity. Each pair counts in the means of both of its rollouts, so the mean of the others is not a baseline
    that is independent of the rollout: ``rloo`` and ``group_norm`` then use the mean of the pairs without the rollout.
    ``num_tokens`` are the rollouts' loss tokens ``[G]``, which some estimators weigh by; None: all have as many.

    Standard deviations are those of a sample (n - 1). A group with fewer than two scored rollouts has advantages of 0,
    because there is nothing to compare with, except for ``reinforce`` and ``reinforce_plus_plus``, and for rewards with
    a pairwise part.
    """
    counts = [np.ones(len(group), np.int32) for group in rewards] if num_tokens is None else num_tokens
    advantages = estimate_advantages(rewards, AdvantageInputs(config=config, num_tokens=counts, pairwise=pairwise))
    return [_one_per_rollout(group) for group in advantages]


def _one_per_rollout(group: FloatArray | list[FloatArray]) -> FloatArray:
    assert isinstance(group, np.ndarray), "without penalties and energies, a rollout has one advantage"
    return group


def estimate_advantages(rewards: Sequence[FloatArray], inputs: AdvantageInputs) -> list[FloatArray | list[FloatArray]]:
    """Return the advantages of every group, ``[G]`` or one array of its loss tokens for each rollout.

    The penalties of the inputs are subtracted from the rewards of their rollouts first.
    """
    name = inputs.config.name
    if inputs.config.path is not None:
        reduced = rewards if inputs.penalties is None else _subtract_penalties(rewards, inputs)
        groups = [np.array(group, np.float32) for group in reduced]
        for group, baseline in zip(groups, inputs.baselines, strict=False):
            group[np.isnan(baseline)] = np.nan  # a comparison with an unscored greedy completion says nothing
        return own_advantages(groups, inputs)
    if name not in ADVANTAGES:
        raise ValueError(f"advantage.name is {name!r}; use {', '.join(ADVANTAGES)}")
    return [
        _as_float32(group) if isinstance(group, np.ndarray) else [_as_float32(values) for values in group]
        for group in ADVANTAGES[name](_subtract_penalties(rewards, inputs), inputs)
    ]


def _subtract_penalties(rewards: Sequence[FloatArray], inputs: AdvantageInputs) -> list[Values]:
    """Return the rewards minus the sum of the penalties of their rollouts."""
    groups = [np.asarray(group, np.float64) for group in rewards]
    if inputs.penalties is None:
        return groups
    sums = [np.array([penalties.sum(dtype=np.float64) for penalties in group]) for group in inputs.penalties]
    return [group - penalty for group, penalty in zip(groups, sums, strict=True)]


def _as_float32(values: Values) -> FloatArray:
    """Return advantages, 0 for rollouts without reward."""
    return np.nan_to_num(values, nan=0.0).astype(np.float32)


def own_advantages(rewards: Sequence[FloatArray], inputs: AdvantageInputs) -> list[FloatArray | list[FloatArray]]:
    """Return the advantages that the user's function gives, ``[G]`` or one array of its loss tokens for each rollout.

    Rollouts that no reward function scored get 0. Raises ``RunError`` if the function raises, or if the result has
    another shape or values that are not finite.
    """
    config = inputs.config
    returned = call_function(config, ADVANTAGE, list(rewards), inputs)
    if not isinstance(returned, list | tuple | np.ndarray) or len(returned) != len(rewards):
        content = (
            f"{len(returned)} groups" if isinstance(returned, list | tuple | np.ndarray) else type(returned).__name__
        )
        raise own_error(config, ADVANTAGE, f"returned {content} for {len(rewards)} groups of rewards")
    return [
        _checked_group(values, rewards[index], inputs.num_tokens[index], index, config)
        for index, values in enumerate(returned)
    ]


def _checked_group(
    values: Any, rewards: FloatArray, num_tokens: IntArray, index: int, config: AdvantageConfig
) -> FloatArray | list[FloatArray]:
    """Return one group's advantages as arrays; raise ``RunError`` if they don't fit its rewards ``[G]``."""
    try:
        arrays = [np.asarray(value, np.float32) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:  # of torch, a RuntimeError for tensors with gradient
        problem = (
            f"returned {type(values).__name__} for group {index}, which is not a list of numbers or arrays "
            f"({one_line(error)})"
        )
        raise own_error(config, ADVANTAGE, problem) from None
    shapes = [list(array.shape) for array in arrays]
    scalars: list[list[int]] = [[]] * len(rewards)
    by_token = [[int(count)] for count in num_tokens]
    if shapes not in (scalars, by_token):
        problem = (
            f"returned {len(shapes)} advantages of shapes {shapes!s:.100} for group {index}, not [{len(rewards)}] "
            f"numbers or one array for the loss tokens of each rollout, {by_token!s:.100}"
        )
        raise own_error(config, ADVANTAGE, problem)
    scored = ~np.isnan(np.asarray(rewards))
    if any(not np.isfinite(array).all() for array, is_scored in zip(arrays, scored, strict=True) if is_scored):
        problem = (
            f"returned NaN or infinity for group {index}, in advantages of shapes {shapes!s:.100} for rewards of shape "
            f"{list(rewards.shape)}, {rewards.tolist()!s:.100}"
        )
        raise own_error(config, ADVANTAGE, problem)
    arrays = [array if is_scored else np.zeros_like(array) for array, is_scored in zip(arrays, scored, strict=True)]
    return np.stack(arrays) if shapes == scalars else arrays


@register_advantage("grpo")
def grpo(groups: list[Values], inputs: AdvantageInputs) -> list[Values]:
    """Return (r - mean of the group) / (std + eps) (arXiv:2402.03300).

    The standard deviation is the group's or the batch's, or there is no division (arXiv:2503.20783).
    """
    centered = [_center(group) for group in groups]
    stds = _stds(groups, inputs.config.scale)
    return centered if stds is None else _divide_each(centered, stds, inputs.config.eps)


@register_advantage("rloo")
def rloo(groups: list[Values], inputs: AdvantageInputs) -> list[Values]:
    """Return r - mean of the others (arXiv:2402.14740)."""
    return _rloo(groups, inputs)


def _rloo(groups: list[Values], inputs: AdvantageInputs) -> list[Values]:
    differences = [_leave_one_out(_center(group)) for group in groups]
    if inputs.pairwise is None:
        return differences
    pairwise = [np.asarray(component, np.float64) for component in inputs.pairwise]
    return [_leave_pairs_out(*group) for group in zip(groups, differences, pairwise, strict=True)]


@register_advantage("group_norm")
def group_norm(groups: list[Values], inputs: AdvantageInputs) -> list[Values]:
    """Return the advantages of rloo, divided by the group's standard deviation plus eps."""
    return _divide_each(_rloo(groups, inputs), [_std(group) for group in groups], inputs.config.eps)


@register_advantage("reinforce")
def reinforce_return(groups: list[Values], inputs: AdvantageInputs) -> list[Values]:
    """Return r."""
    return groups


@register_advantage("reinforce_baseline")
def reinforce_baseline(groups: list[Values], inputs: AdvantageInputs) -> list[Values]:
    """Return r - mean of the group, divided by the batch's standard deviation of these differences plus eps.

    Their mean over the batch is 0 already (REINFORCE++ with baseline, arXiv:2501.03262).
    """
    centered = [_center(group) for group in groups]
    return _divide_each(centered, [_batch_std(centered)] * len(groups), inputs.config.eps)


@register_advantage("reinforce_plus_plus")
def reinforce_plus_plus(groups: list[Values], inputs: AdvantageInputs) -> Sequence[Values | list[Values]]:
    """Return (r - mean) / √(variance + 1e-8) over all loss tokens of the batch (REINFORCE++, arXiv:2501.03262).

    A rollout counts as often as it has loss tokens. With penalties, r is the return of each token: the reward minus the
    penalties from there on.
    """
    if not groups:
        return groups
    if inputs.penalties is not None:
        return _whiten_tokens(_returns(groups, inputs))
    return _whiten(groups, inputs.num_tokens)


def _whiten(arrays: Sequence[Values], weights: Sequence[IntArray]) -> list[Values]:
    """Return (value - mean) / √(variance + 1e-8) over all arrays, where each value counts as often as its weight says.

    The variance is that of a sample (n - 1), as in verl's ``masked_whiten``.
    """
    values, counts = np.concatenate(arrays), np.concatenate(weights).astype(np.float64)
    counts = np.where(np.isnan(values), 0, counts)
    total = counts.sum()
    if total < 2:
        return [np.zeros_like(array) for array in arrays]
    mean = np.nansum(values * counts) / total
    variance = np.nansum((values - mean) ** 2 * counts) / (total - 1)
    return [(array - mean) / np.sqrt(variance + WHITENING_EPS) for array in arrays]


def _whiten_tokens(groups: Sequence[Sequence[Values]]) -> list[list[Values]]:
    """Return (value - mean) / √(variance + 1e-8) over all loss tokens of all groups."""
    tokens = [values for group in groups for values in group]
    whitened = iter(_whiten(tokens, [np.ones(len(values), np.int32) for values in tokens]) if tokens else [])
    return [[next(whitened) for _ in group] for group in groups]


def _returns(groups: list[Values], inputs: AdvantageInputs) -> list[list[Values]]:
    """Return the return of each loss token: the rollout's reward, without the penalties of the tokens before."""
    returns = [
        [np.full(count, reward) for reward, count in zip(group, counts.tolist(), strict=True)]
        for group, counts in zip(groups, inputs.num_tokens, strict=True)
    ]
    for group, penalties in zip(returns, inputs.penalties or (), strict=False):
        for values, paid in zip(group, penalties, strict=True):
            values += np.cumsum(paid, dtype=np.float64) - paid
    return returns


@register_advantage("opo")
def opo(groups: list[Values], inputs: AdvantageInputs) -> list[Values]:
    """Return r - mean of the group, weighted by the number of loss tokens (OPO, arXiv:2505.23585)."""
    return [_center(group, counts) for group, counts in zip(groups, inputs.num_tokens, strict=True)]


@register_advantage("gpg")
def gpg(groups: list[Values], inputs: AdvantageInputs) -> list[Values]:
    """Return α (r - mean of the group), α the batch's rollouts over those with a reward other than 0.

    GPG, arXiv:2504.02546.
    """
    rewards = np.concatenate([*groups, np.zeros(0)])
    scored = rewards[~np.isnan(rewards)]
    alpha = len(scored) / max(int(np.count_nonzero(scored)), 1)
    return [alpha * _center(group) for group in groups]


@register_advantage("pass_at_k")
def pass_at_k(groups: list[Values], inputs: AdvantageInputs) -> list[Values]:
    """Return best - second best reward of the group for the best rollout, 0 for the others (arXiv:2503.19595).

    Divided by std + eps as in grpo.
    """
    margins = [_margin_of_best(group) for group in groups]
    stds = _stds(groups, inputs.config.scale)
    return margins if stds is None else _divide_each(margins, stds, inputs.config.eps)


@register_advantage("max_rl")
def max_rl(groups: list[Values], inputs: AdvantageInputs) -> list[Values]:
    """Return (r - mean of the group) / (mean + eps) (MaxRL, arXiv:2602.02710).

    Raises ``RunError`` if a group's mean is negative, by which the signs would turn.
    """
    means = [float(np.nanmean(group)) if not np.isnan(group).all() else 0.0 for group in groups]
    if min(means, default=0.0) < 0:
        raise RunError(
            f"algorithm.advantage.name: max_rl divides by the mean reward of a group, which is {min(means):g} in one; "
            "add a constant to the rewards, or set another advantage"
        )
    return _divide_each([_center(group) for group in groups], means, inputs.config.eps)


@register_advantage("optimal_token_baseline")
def optimal_token_baseline(groups: list[Values], inputs: AdvantageInputs) -> list[list[Values]]:
    """Return the return of each token minus the mean of the group's returns at that token (OTB, arXiv:2602.07078).

    The mean is over the rollouts that have as many tokens, each weighted by the energies of its tokens up to there. A
    token without any other rollout beside it has the baseline 0, as in verl.
    """
    assert inputs.energies is not None, "the learner computes the energies"
    return [
        _subtract_token_baseline(returns, energies)
        for returns, energies in zip(_returns(groups, inputs), inputs.energies, strict=True)
    ]


def _subtract_token_baseline(returns: list[Values], energies: Sequence[NDArray[np.floating[Any]]]) -> list[Values]:
    scored = [index for index, values in enumerate(returns) if len(values) and not np.isnan(values).any()]
    longest = max((len(returns[index]) for index in scored), default=0)
    weights, totals = np.zeros((2, len(scored), longest))
    for row, index in enumerate(scored):
        count = len(returns[index])
        weights[row, :count] = np.cumsum(energies[index], dtype=np.float64)
        totals[row, :count] = weights[row, :count] * returns[index]
    baseline = totals.sum(0) / (weights.sum(0) + TINY)
    lengths = sorted(len(returns[index]) for index in scored)
    baseline[lengths[-2] if len(lengths) > 1 else 0 :] = 0
    if len(scored) < 2:
        return [np.zeros_like(values) for values in returns]
    return [
        values - baseline[: len(values)] if index in scored else np.zeros_like(values)
        for index, values in enumerate(returns)
    ]


@register_advantage("remax")
def remax(groups: list[Values], inputs: AdvantageInputs) -> Sequence[Values | list[Values]]:
    """Return r - reward of the prompt's greedy completion (ReMax, arXiv:2310.10505).

    With penalties, r is the return of each token.
    """
    if inputs.penalties is None:
        return [group - baseline for group, baseline in zip(groups, inputs.baselines, strict=True)]
    returns = zip(_returns(groups, inputs), inputs.baselines, strict=True)
    return [[values - baseline for values in group] for group, baseline in returns]


@register_advantage("gae")
def gae(groups: list[Values], inputs: AdvantageInputs) -> Sequence[Values | list[Values]]:
    """Return generalized advantage estimates (arXiv:1506.02438), whitened over all loss tokens as in verl.

    The divisor is √(variance + 1e-8), whatever ``eps`` is.
    """
    assert inputs.estimates is not None, "the learner computes the estimates"
    return _whiten_tokens(inputs.estimates)


def generalized_advantages(
    rewards: Sequence[FloatArray], values: TokenValues, penalties: TokenValues | None, config: AdvantageConfig
) -> list[list[Values]]:
    """Return Σ_k (γ λ)^k δ_{t+k} of each loss token t, with δ_t = r_t + γ V_{t+1} - V_t, and V = 0 after the last one.

    r_t is minus the penalty, plus the rollout's reward at the last loss token.
    """
    decay = config.gamma * config.lam
    advantages: list[list[Values]] = []
    for number, (group, group_values) in enumerate(zip(rewards, values, strict=True)):
        advantages.append([])
        for index, (reward, token_values) in enumerate(zip(group, group_values, strict=True)):
            errors = config.gamma * np.append(token_values[1:], 0.0)[: len(token_values)] - token_values
            if penalties is not None:
                errors -= penalties[number][index]
            errors[-1:] += reward
            backwards = accumulate(errors[::-1].tolist(), lambda later, error: error + decay * later)
            advantages[-1].append(np.array([*backwards], np.float64)[::-1])
    return advantages


def _margin_of_best(rewards: Values) -> Values:
    margins = np.zeros_like(rewards)
    scored = np.sort(rewards[~np.isnan(rewards)])
    if len(scored) > 1:
        margins[np.nanargmax(rewards)] = scored[-1] - scored[-2]
    return margins


def _stds(groups: list[Values], scale: str) -> list[float] | None:
    """Return the standard deviation to divide each group by; None for no division."""
    if scale == "group":
        return [_std(group) for group in groups]
    return [_batch_std(groups)] * len(groups) if scale == "batch" else None


def _divide_each(groups: list[Values], stds: Sequence[float], eps: float) -> list[Values]:
    return [_divide(group, std, eps) for group, std in zip(groups, stds, strict=True)]


def _divide(centered: Values, std: float, eps: float) -> Values:
    """Divide by the standard deviation plus ``eps``; if that is 0, every difference is 0 too."""
    return centered / (std + eps) if std + eps > 0 else centered


def _center(values: Values, counts: IntArray | None = None) -> Values:
    """Return the differences from the mean of the scored values, each weighted by its count."""
    scored = ~np.isnan(values)
    if counts is None or not counts[scored].sum():
        return values - values[scored].mean() if scored.any() else values
    return values - np.average(values[scored], weights=counts[scored])


def _std(values: Values) -> float:
    """Return the sample standard deviation of the scored values; 0 for fewer than two."""
    scored = values[~np.isnan(values)]
    return float(scored.std(ddof=1)) if len(scored) > 1 else 0.0


def _batch_std(groups: list[Values]) -> float:
    return _std(np.concatenate(groups)) if groups else 0.0


def _leave_one_out(centered: Values) -> Values:
    """Return r minus the mean of the n - 1 others, which is n / (n - 1) times r minus the mean of all n."""
    count = np.count_nonzero(~np.isnan(centered))
    return centered * (count / (count - 1)) if count > 1 else centered


def _leave_pairs_out(rewards: Values, differences: Values, pairwise: Values) -> Values:
    """Return rloo's differences with another baseline for the pairwise part: the mean of the pairs without the rollout.

    With n means m, each over n - 1 pairs, that is (sum of m - 2 m_j) / (n - 2), and 0 if there is no such pair. A
    rollout without others keeps its reward.
    """
    count = len(rewards)
    if count == 1:
        return rewards
    total = pairwise.sum()
    mean_of_others = (total - pairwise) / (count - 1)
    without_pairs = (total - 2 * pairwise) / (count - 2) if count > 2 else np.zeros_like(pairwise)
    return differences + mean_of_others - without_pairs


def turn_advantages(rewards: Sequence[Sequence[float]]) -> list[FloatArray]:
    """Return the advantage of each turn ``[N]`` of every sibling, from its turns' rewards ``[N]``.

    It is the turn's return, the sum of the rewards from there on, minus the mean return of the other siblings at that
    turn, with 0 for siblings that have ended. So the baseline depends on nothing that the sibling itself does, its own
    stopping included, and the gradient is unbiased. A mean over the siblings that still play would depend on it, as
    soon as the sibling itself is among them. A single sibling has its returns.
    """
    longest = max(map(len, rewards), default=0)
    returns: Values = np.zeros((len(rewards), longest))
    for sibling_returns, values in zip(returns, rewards, strict=True):
        sibling_returns[: len(values)] = np.cumsum(np.asarray(values, np.float64)[::-1])[::-1]
    mean_of_others = (returns.sum(0) - returns) / max(len(rewards) - 1, 1)
    advantages = returns - mean_of_others if len(rewards) > 1 else returns
    return [row[: len(values)].astype(np.float32) for row, values in zip(advantages, rewards, strict=True)]

"""Advantages of rollouts, from the rewards of a step's groups.

Shapes: G rollouts of one group, R reward functions. ``nan`` stands for a reward that was not given. A rollout that
no reward function scored has the reward ``nan``: it counts in no mean and no standard deviation, and its advantage
is 0. Everything is computed in float64, so that equal rewards give advantages of exactly 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rlpipe.configs.schema.algorithm_config import AdvantageConfig
from rlpipe.types import FloatArray

Values = NDArray[np.float64]


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


def compute_advantages(
    rewards: Sequence[FloatArray], config: AdvantageConfig, pairwise: Sequence[FloatArray] | None = None
) -> list[FloatArray]:
    """Return the advantages ``[G]`` of every group of a step, from its rewards ``[G]``; groups may differ in size.

    ``pairwise`` is the part ``[G]`` of each reward that is a mean over the rollout's pairs with the others, such as
    EBFT's diversity. Each pair counts in the means of both of its rollouts, so the mean of the others is not a baseline
    that is independent of the rollout: ``rloo`` and ``group_norm`` then use the mean of the pairs without the rollout.

    - ``grpo``: (r - mean of the group) / (std + eps), the standard deviation being the group's or the batch's, or no
      division (arXiv:2402.03300; without it arXiv:2503.20783).
    - ``rloo``: r - mean of the others (arXiv:2402.14740).
    - ``group_norm``: rloo's, divided by the group's standard deviation plus eps.
    - ``reinforce``: r.
    - ``reinforce_baseline``: r - mean of the group, divided by the batch's standard deviation of these differences
      plus eps; their mean over the batch is 0 already (REINFORCE++ with baseline, arXiv:2501.03262).

    Standard deviations are those of a sample (n - 1). A group with fewer than two scored rollouts has advantages of 0,
    because there is nothing to compare with, except for ``reinforce`` and for rewards with a pairwise part.
    """
    groups = [np.asarray(group, np.float64) for group in rewards]
    parts = None if pairwise is None else [np.asarray(part, np.float64) for part in pairwise]
    return [np.nan_to_num(group, nan=0.0).astype(np.float32) for group in _advantages(groups, config, parts)]


def _advantages(groups: list[Values], config: AdvantageConfig, pairwise: list[Values] | None) -> list[Values]:
    if config.name == "reinforce":
        return groups
    centered = [_center(group) for group in groups]
    if config.name in ("rloo", "group_norm"):
        differences = [_leave_one_out(group) for group in centered]
        if pairwise is not None:
            differences = [_leave_pairs_out(*group) for group in zip(groups, differences, pairwise, strict=True)]
        if config.name == "rloo":
            return differences
        return [_divide(own, _std(group), config.eps) for own, group in zip(differences, groups, strict=True)]
    if config.name == "reinforce_baseline":
        stds = [_batch_std(centered)] * len(groups)
    elif config.name != "grpo":
        raise ValueError(
            f"advantage.name is {config.name!r}; use grpo, rloo, group_norm, reinforce or reinforce_baseline"
        )
    elif config.scale == "group":
        stds = [_std(group) for group in groups]
    elif config.scale == "batch":
        stds = [_batch_std(groups)] * len(groups)
    else:
        return centered
    return [_divide(group, std, config.eps) for group, std in zip(centered, stds, strict=True)]


def _divide(centered: Values, std: float, eps: float) -> Values:
    """Divide by the standard deviation plus ``eps``; if that is 0, every difference is 0 too."""
    return centered / (std + eps) if std + eps > 0 else centered


def _center(values: Values) -> Values:
    scored = values[~np.isnan(values)]
    return values - scored.mean() if len(scored) else values


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
    of_others = (total - pairwise) / (count - 1)
    without_pairs = (total - 2 * pairwise) / (count - 2) if count > 2 else np.zeros_like(pairwise)
    return differences + of_others - without_pairs

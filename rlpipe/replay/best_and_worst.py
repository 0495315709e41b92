"""Pairs of preferences that the policy samples itself: the best and the worst rollout of each group, by reward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from rlpipe.types import Rollout, RolloutGroup, RolloutStatus

SAME = 1e-8
"""Difference below which two rewards count as equal."""


def pair_up(groups: Iterable[RolloutGroup], *, without_truncated: bool) -> list[Rollout]:
    """Return the best rollout of each group, with the worst one in ``rejected``; of equal ones the first.

    A group whose rewards are all equal makes no pair. ``without_truncated`` leaves out what was cut off at the length
    limit.
    """
    pairs = []
    for group in groups:
        usable = [rollout for rollout in group if _is_usable(rollout, without_truncated=without_truncated)]
        ordered = sorted(usable, key=lambda rollout: -float(rollout.reward or 0.0))  # stable
        if len(ordered) > 1 and (ordered[0].reward or 0.0) - (ordered[-1].reward or 0.0) > SAME:
            worst = next(rollout for rollout in ordered if rollout.reward == ordered[-1].reward)
            pairs.append(_marked(ordered[0], 1.0, rejected=_marked(worst, -1.0)))
    return pairs


def _is_usable(rollout: Rollout, *, without_truncated: bool) -> bool:
    if rollout.reward is None or not np.isfinite(rollout.reward) or not rollout.num_loss_tokens:
        return False
    return not (without_truncated and rollout.status is RolloutStatus.TRUNCATED)


def _marked(rollout: Rollout, sign: float, rejected: Rollout | None = None) -> Rollout:
    advantages = np.where(rollout.loss_mask, sign, 0).astype(np.float32)
    return replace(rollout, advantages=advantages, rejected=rejected)

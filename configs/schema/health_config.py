"""Limits of the health rules, which watch a run's metrics."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.configs.schema.option import MAX_WEIGHT, Freezable, option

HEALTH_RULES = (
    "equal_rewards",
    "no_reward",
    "low_reward",
    "reward_falls",
    "entropy_low",
    "entropy_high",
    "gradient_norm",
    "skipped_updates",
    "not_finite",
    "clipping",
    "kl",
    "logprob_difference",
    "importance_mean",
    "importance_min",
    "effective_samples",
    "missing_logprobs",
    "truncated",
    "length_drift",
    "held_out_falls",
    "overfitting",
    "wrong_preferences",
    "failed_groups",
    "staleness",
    "learner_waits",
    "engines_wait",
    "ebft_alignment",
    "ebft_diversity",
    "ebft_cfm",
)
"""Names of the rules in ``rlpipe.tracking.health_rules``."""


@dataclass(kw_only=True)
class HealthLimits(Freezable):
    """Limits of one health rule."""

    warn: float | None = option(
        None,
        "Value from which on the rule warns; null: its default, see docs/health.md.",
        minimum=-MAX_WEIGHT,
        maximum=MAX_WEIGHT,
    )
    stop: float | None = option(
        None,
        "Value from which on the run stops, with a checkpoint; null: never.",
        minimum=-MAX_WEIGHT,
        maximum=MAX_WEIGHT,
    )
    enabled: bool = option(True, "false: the rule is not checked.")

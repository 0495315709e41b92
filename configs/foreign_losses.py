"""Rules of losses, advantages and corrections, whose names mean something else in each system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpipe.configs.foreign_rules import OFF, Made, Options, PartOf, Rule, named
from rlpipe.configs.foreign_values import ForeignValues, is_on

NAME, LEVEL, AGGREGATE = "algorithm.loss.name", "algorithm.loss.level", "algorithm.loss.aggregate"
LOW, HIGH, DELTA = "algorithm.loss.clip_low", "algorithm.loss.clip_high", "algorithm.loss.clip_delta"
ADVANTAGE, SCALE = "algorithm.advantage.name", "algorithm.advantage.scale"
MODE, CAP, FLOOR = "algorithm.correction.mode", "algorithm.correction.cap", "algorithm.correction.floor"
NO_EFFECT = "it has no effect with this loss"
CONSTANT_KL = "the weight of the KL is constant"
KL_COEF = "algorithm.reward_kl.coef"
KL_OF_TOKENS = f"there each token's KL is subtracted after the baseline; {KL_COEF} is subtracted before it"
MEAN_IN_IPO = "there it sums log-probs, while algorithm.preference.loss=ipo takes their means"
TRL_LOSSES: Mapping[str, Options] = {
    "grpo": {NAME: "clip", AGGREGATE: "sequence"},
    "bnpo": {NAME: "clip", AGGREGATE: "token"},
    "dapo": {NAME: "clip", AGGREGATE: "token"},
    "dr_grpo": {NAME: "clip", AGGREGATE: "constant"},
    "luspo": {NAME: "clip", LEVEL: "sequence", AGGREGATE: "sequence_sum"},
    "cispo": {NAME: "cispo", AGGREGATE: "token"},
    "sapo": {NAME: "sapo", AGGREGATE: "sequence"},
    "vespo": {NAME: "vespo", AGGREGATE: "token"},
}
PREFERENCE_LOSSES = {"sigmoid": "dpo", "exo_pair": "exo", "sppo_hard": "sppo"} | {
    name: name for name in ("ipo", "hinge", "robust", "nca_pair", "apo_zero", "apo_down")
}
VERL_LOSSES: Mapping[str, Options] = {
    "vanilla": {NAME: "clip"},
    "gspo": {NAME: "clip", LEVEL: "sequence", AGGREGATE: "sequence"},
    "sapo": {NAME: "sapo", AGGREGATE: "sequence"},
    "geo_mean": {NAME: "geo_mean", AGGREGATE: "sequence"},
    "gpg": {NAME: "reinforce"},
    **{name: {NAME: name} for name in ("clip_cov", "kl_cov", "cispo", "dppo_tv", "dppo_kl")},
}
VERL_AGGREGATES = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
VERL_ADVANTAGES = {"reinforce_plus_plus_baseline": "reinforce_baseline", "grpo_passk": "pass_at_k"} | {
    name: name
    for name in ("grpo", "rloo", "reinforce_plus_plus", "opo", "gpg", "gae", "remax", "optimal_token_baseline")
}
OPENRLHF_ADVANTAGES: Mapping[str, Options] = {
    "gae": {ADVANTAGE: "gae"},
    "reinforce": {ADVANTAGE: "reinforce_plus_plus"},
    "reinforce_baseline": {ADVANTAGE: "reinforce_baseline"},
    "rloo": {ADVANTAGE: "rloo"},
    "group_norm": {ADVANTAGE: "grpo", SCALE: "group"},
    "dr_grpo": {ADVANTAGE: "grpo", SCALE: "none"},
}
OPENRLHF_LOSSES: Mapping[str, Options] = {
    "ppo": {NAME: "clip", AGGREGATE: "token"},
    "gspo": {NAME: "clip", LEVEL: "sequence", AGGREGATE: "sequence"},
}
CORRECTIONS = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


def trl_loss(values: ForeignValues, value: Any) -> Made:
    """Translate TRL's ``loss_type``, which is of the policy gradient, of preferences or of next tokens."""
    names = value if isinstance(value, list) else [value]
    if values.run.method in ("rl", "ebft"):
        return dict(TRL_LOSSES.get(str(value), {})) or f"there is no loss {value}; see algorithm.loss.name"
    if values.run.method in ("cpo", "kto"):
        return PartOf("algorithm") if value in ("simpo", "sigmoid", "kto") else f"there is no loss {value} here"
    if values.run.method == "sft":
        return "it is the loss here" if value in ("nll", "chunked_nll") else f"there is no loss {value} here"
    if len(names) != 1:
        return "a sum of losses: algorithm.preference.loss is one"
    return named("algorithm.preference.loss", PREFERENCE_LOSSES)(values, names[0])


def trl_bounds(values: ForeignValues, value: Any) -> Made:
    """Translate TRL's ``epsilon``: one bound for both sides, unless the upper one is set by itself."""
    if values.get("loss_type") in ("sapo", "vespo", "cispo"):
        return NO_EFFECT
    return {LOW: value} | ({HIGH: value} if values.get("epsilon_high") is None else {})


def trl_upper_bound(values: ForeignValues, value: Any) -> Made:
    """Translate TRL's ``epsilon_high``, which for CISPO is the bound itself, not its distance from 1."""
    if values.get("loss_type") in ("sapo", "vespo"):
        return NO_EFFECT
    if values.get("loss_type") == "cispo":
        return {HIGH: value - 1} if isinstance(value, int | float) and value >= 1 else f"{HIGH} is at least 0"
    return {HIGH: value}


def trl_beta(values: ForeignValues, value: Any) -> Made:
    if values.run.method in ("rl", "ebft"):
        return {"algorithm.loss.beta": value}
    if values.run.method == "rloo":
        return {KL_COEF: value} if value else OFF
    return (
        "there is no weight of a KL here"
        if values.algorithm in ("sft", "reward_model")
        else {"algorithm.preference.beta": value}
    )


def trl_combine(values: ForeignValues, value: Any) -> Made:
    """Translate how rewards are summed; after normalizing each, their sum is divided by the batch's deviation."""
    return {"algorithm.combine": value} | ({SCALE: "batch"} if value == "normalize_then_sum" else {})


def axolotl_method(values: ForeignValues, value: Any) -> Made:
    return trl_combine(values, "normalize_then_sum") if value == "gdpo" else PartOf("algorithm")


def trl_scale(values: ForeignValues, value: Any) -> Made:
    if values.get("multi_objective_aggregation") == "normalize_then_sum" or values.get("rl") == "gdpo":
        return "each reward is divided by its deviation in the group, and their sum by that of the batch"
    text = {"true": "group", "false": "none"}.get(str(value).lower(), str(value))
    if text == "mean":
        return {ADVANTAGE: "max_rl"}
    return {SCALE: text} if text in ("group", "batch", "none") else f"{SCALE} is one of group, batch, none"


def trl_correction(values: ForeignValues, value: Any) -> Made:
    """Translate the mode of TRL's correction, which has no lower bound and only exists with vLLM."""
    if not is_on(values.get("use_vllm")):
        return "there is nothing to correct without vLLM there"
    if str(values.get("vllm_importance_sampling_correction")).lower() == "false":
        return {MODE: "none"}
    floor = values.get("vllm_importance_sampling_clip_min")
    cap = values.get("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max")
    made = {MODE: value, CAP: 3.0 if cap is None else cap, FLOOR: 0 if floor is None else floor}
    return made if value in CORRECTIONS else f"{MODE} is one of none, {', '.join(CORRECTIONS)}"


def of_correction(values: ForeignValues, value: Any) -> Made:
    """Say that a setting is part of TRL's correction."""
    mode = values.get("vllm_importance_sampling_mode")
    made = trl_correction(values, mode)
    return PartOf(MODE) if isinstance(made, dict) else made


def verl_loss(values: ForeignValues, value: Any) -> Made:
    return dict(VERL_LOSSES.get(str(value), {})) or f"there is no loss {value}; see algorithm.loss.name"


def verl_aggregate(values: ForeignValues, value: Any) -> Made:
    if values.get("actor.policy_loss.loss_mode") in ("gspo", "sapo", "geo_mean"):
        return NO_EFFECT
    return named(AGGREGATE, VERL_AGGREGATES)(values, value)


def verl_clip(values: ForeignValues, value: Any) -> Made:
    """Translate one bound for both sides; those of each side replace it."""
    if values.get("actor.policy_loss.loss_mode") in ("sapo", "gpg", "kl_cov"):
        return NO_EFFECT
    given = {LOW: values.get("actor.clip_ratio_low"), HIGH: values.get("actor.clip_ratio_high")}
    made = {option: value for option, other in given.items() if other is None}
    return made or "actor.clip_ratio_low and clip_ratio_high replace it"


def verl_lower_bound(values: ForeignValues, value: Any) -> Made:
    loss = values.get("actor.policy_loss.loss_mode")
    if loss == "cispo":
        is_number = isinstance(value, int | float)
        return {"algorithm.loss.cispo_floor": max(1 - value, 0)} if is_number else "set algorithm.loss.cispo_floor"
    return NO_EFFECT if loss in ("sapo", "gpg", "kl_cov") else {LOW: value}


def verl_upper_bound(values: ForeignValues, value: Any) -> Made:
    return NO_EFFECT if values.get("actor.policy_loss.loss_mode") in ("sapo", "gpg", "kl_cov") else {HIGH: value}


def verl_dual_clip(values: ForeignValues, value: Any) -> Made:
    if values.get("actor.policy_loss.loss_mode") in ("dppo_tv", "dppo_kl"):
        return "see algorithm.loss.dppo_cap"
    is_used = values.get("actor.policy_loss.loss_mode") in (None, "vanilla") and not is_on(
        values.get("actor.use_gpg_loss")
    )
    return {DELTA: value} if is_used else NO_EFFECT


def verl_advantage(values: ForeignValues, value: Any) -> Made:
    if value == "gdpo":
        return {ADVANTAGE: "grpo", SCALE: "batch", "algorithm.combine": "normalize_then_sum"}
    return named(ADVANTAGE, VERL_ADVANTAGES)(values, value)


def verl_scale(values: ForeignValues, value: Any) -> Made:
    if values.get("algorithm.adv_estimator") not in ("grpo", "grpo_passk"):
        return NO_EFFECT
    return {SCALE: "group" if is_on(value) else "none"}


def verl_kl(values: ForeignValues, value: Any) -> Made:
    if not is_on(values.get("actor.use_kl_loss")):
        return "actor.use_kl_loss is off"
    return {"algorithm.loss.beta": value}


def verl_kl_switch(values: ForeignValues, value: Any) -> Made:
    if not is_on(value):
        return OFF
    coefficient = values.get("actor.kl_loss_coef")
    return PartOf("algorithm.loss.beta") if coefficient is not None else {"algorithm.loss.beta": 0.001}


def in_reward(rule: Rule) -> Rule:
    """Return a rule of the KL in the rewards, for runs that have one."""
    return lambda values, value: rule(values, value) if is_on(values.get("algorithm.use_kl_in_reward")) else OFF


def verl_reward_kl(values: ForeignValues, value: Any) -> Made:
    return PartOf(KL_COEF) if values.get("algorithm.kl_ctrl.kl_coef") is not None else {KL_COEF: 0.001}


def verl_kl_type(values: ForeignValues, value: Any) -> Made:
    """Translate whether the weight of the KL is adapted, which takes a target."""
    if value != "adaptive":
        return {"algorithm.reward_kl.target": None}
    target, horizon = (values.get(f"algorithm.kl_ctrl.{name}") for name in ("target_kl", "horizon"))
    return {
        "algorithm.reward_kl.target": 0.1 if target is None else target,
        "algorithm.reward_kl.horizon": 10_000 if horizon is None else horizon,
    }


def verl_kl_target(values: ForeignValues, value: Any) -> Made:
    is_adapted = values.get("algorithm.kl_ctrl.type") == "adaptive"
    return PartOf("algorithm.reward_kl.target") if is_adapted else CONSTANT_KL


def of_gae(option: str, *estimators: str) -> Rule:
    """Return a rule of a setting that only the generalized advantage estimates have here."""

    def rule(values: ForeignValues, value: Any) -> Made:
        if values.get(*estimators) in (None, "gae"):
            return {option: value}
        return OFF if value == 1 and "critic" not in option else "only algorithm.advantage.name=gae has it here"

    return rule


def verl_correction(values: ForeignValues, value: Any) -> Made:
    """Translate verl's truncated weights, which have no lower bound."""
    cap = values.get("algorithm.rollout_correction.rollout_is_threshold", "algorithm.rollout_is_threshold")
    modes = {"token": "token_truncate", "sequence": "sequence_truncate"}
    if str(value) in ("none", "False"):
        return {MODE: "none"}
    if str(value) not in modes:
        return f"{MODE} is one of none, {', '.join(CORRECTIONS)}"
    return {MODE: modes[str(value)], CAP: 2.0 if cap is None else cap, FLOOR: 0}


def verl_correction_cap(values: ForeignValues, value: Any) -> Made:
    mode = values.get("algorithm.rollout_correction.rollout_is", "algorithm.rollout_is")
    return PartOf(CAP) if mode in ("token", "sequence") else "there is no correction"


def verl_ratio_cap(values: ForeignValues, value: Any) -> Made:
    """Translate the bound of the first versions of verl's correction, which is of each token."""
    is_set = isinstance(value, int | float) and value > 0
    return {MODE: "token_truncate", CAP: value, FLOOR: 0} if is_set else {MODE: "none"}


def of_covariance(name: str) -> Any:
    """Return the rule of a setting of one of the two losses that look at covariances."""

    def rule(values: ForeignValues, value: Any) -> Made:
        is_used = values.get("actor.policy_loss.loss_mode") == name.partition(":")[0]
        return {f"algorithm.loss.covariance.{name.partition(':')[2]}": value} if is_used else NO_EFFECT

    return rule


def verl_refill(values: ForeignValues, value: Any) -> Made:
    """Translate sampling until the groups differ; the batches that it may take include the first."""
    if not is_on(values.get("algorithm.filter_groups.enable")):
        return OFF
    batches = values.number("algorithm.filter_groups.max_num_gen_batches")
    return {"replay.refill_attempts": max(batches - 1, 1) if batches else 1_000_000}


def openrlhf_advantage(values: ForeignValues, value: Any) -> Made:
    return dict(OPENRLHF_ADVANTAGES.get(str(value), {})) or f"there is no {value} here; see {ADVANTAGE}"


def openrlhf_loss(values: ForeignValues, value: Any) -> Made:
    return dict(OPENRLHF_LOSSES.get(str(value), {})) or f"there is no loss {value}; see algorithm.loss.name"


def openrlhf_bounds(values: ForeignValues, value: Any) -> Made:
    if isinstance(value, list):
        return {LOW: value[0], HIGH: value[1]} if len(value) == 2 else f"set {LOW} and {HIGH}"
    return {LOW: value, HIGH: value} if values.get("eps_clip_low_high") is None else "eps_clip_low_high replaces it"


def openrlhf_kl(values: ForeignValues, value: Any) -> Made:
    return (
        {"algorithm.loss.beta": value}
        if is_on(values.get("use_kl_loss"))
        else in_reward_of_openrlhf(KL_COEF)(values, value)
    )


def in_reward_of_openrlhf(option: str) -> Rule:
    """Return a rule of the KL in the rewards, which is of each token: a sum over the completion is another reward."""

    def rule(values: ForeignValues, value: Any) -> Made:
        if is_on(values.get("use_kl_loss")) or not values.get("init_kl_coef") or not value:
            return OFF
        return {option: value} if values.get("advantage_estimator") in ("gae", "reinforce") else KL_OF_TOKENS

    return rule


def openrlhf_kl_switch(values: ForeignValues, value: Any) -> Made:
    return PartOf("algorithm.loss.beta") if is_on(value) else OFF


def openrlhf_correction(values: ForeignValues, value: Any) -> Made:
    """Translate the correction and its bounds, of which older versions have one."""
    if not is_on(value):
        return {MODE: "none"}
    kind = str(values.get("vllm_is_correction_type"))
    modes = {"None": "token_truncate", "tis": "token_truncate", "icepop": "token_mask"}
    if kind not in modes:
        return f"{MODE} is one of none, {', '.join(CORRECTIONS)}"
    is_masked = is_on(values.get("use_icepop"))
    bounds = values.get("vllm_is_truncated_threshold")
    floor, cap = bounds if isinstance(bounds, list) and len(bounds) == 2 else (0, bounds)
    if not isinstance(cap, int | float):
        return f"its bounds differ between versions: set {MODE}, {CAP} and {FLOOR}"
    return {MODE: "token_mask" if is_masked else modes[kind], CAP: cap, FLOOR: floor}


def of_openrlhf_correction(values: ForeignValues, value: Any) -> Made:
    made = openrlhf_correction(values, values.get("enable_vllm_is_correction", "vllm_enable_is_correction"))
    return PartOf(MODE) if isinstance(made, dict) and made[MODE] != "none" else made if isinstance(made, str) else OFF

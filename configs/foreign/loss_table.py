"""Settings of losses, advantages and the KL, whose names mean something else in each system."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlpipe.configs.foreign.foreign_values import ForeignValues, is_on
from rlpipe.configs.foreign.model_table import part
from rlpipe.configs.foreign.setting_rules import (
    NO_EFFECT,
    OFF,
    Condition,
    Made,
    Options,
    Rule,
    SettingRow,
    UsedBy,
    about,
    copied,
    enabling,
    for_method,
    named,
    only_if,
    sampled,
    switched,
    without,
    without_option,
)

NAME, LEVEL, AGGREGATE = "algorithm.loss.name", "algorithm.loss.level", "algorithm.loss.aggregate"
LOW, HIGH, BETA = "algorithm.loss.clip_low", "algorithm.loss.clip_high", "algorithm.loss.beta"
ADVANTAGE, SCALE, COMBINE = "algorithm.advantage.name", "algorithm.advantage.scale", "algorithm.combine"
ENTROPY_TARGET = "algorithm.loss.entropy_target"
KL_COEF, KL_TARGET, KL_HORIZON = (f"algorithm.reward_kl.{name}" for name in ("coef", "target", "horizon"))
PREFERENCE, FEATURES, STRIDED = "algorithm.preference", "algorithm.ebft.features", "algorithm.ebft.strided"
SMOOTHING = f"{PREFERENCE}.label_smoothing"
CONSTANT_KL = "the weight of the KL is constant"
KL_OF_TOKENS = f"there each token's KL is subtracted after the baseline; {KL_COEF} is subtracted before it"
CRITIC = (
    "algorithm=gae has a critic, a value head on the policy: set algorithm.critic.lr or algorithm.critic.value_clip"
)
NO_CRITIC = f"there is no critic, there as here, without {ADVANTAGE}=gae"
NO_LOSS = f"there is no such loss here; see {NAME}"
NO_PREFERENCE = f"there is no such loss of this method here; see {PREFERENCE}.loss"
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
VERL_ADVANTAGES: Mapping[str, str | Options] = {
    "reinforce_plus_plus_baseline": "reinforce_baseline",
    "grpo_passk": "pass_at_k",
    "gdpo": {ADVANTAGE: "grpo", SCALE: "batch", COMBINE: "normalize_then_sum"},
    **{
        name: name
        for name in ("grpo", "rloo", "reinforce_plus_plus", "opo", "gpg", "gae", "remax", "optimal_token_baseline")
    },
}
OPENRLHF_ADVANTAGES: Mapping[str, str | Options] = {
    "gae": "gae",
    "reinforce": "reinforce_plus_plus",
    "reinforce_baseline": "reinforce_baseline",
    "rloo": "rloo",
    "group_norm": {ADVANTAGE: "grpo", SCALE: "group"},
    "dr_grpo": {ADVANTAGE: "grpo", SCALE: "none"},
}
OPENRLHF_LOSSES: Mapping[str, Options] = {
    "ppo": {NAME: "clip", AGGREGATE: "token"},
    "gspo": {NAME: "clip", LEVEL: "sequence", AGGREGATE: "sequence"},
}
KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"} | {name: name for name in ("abs", "k1", "k2", "k3")}
VERL_LOSS, VERL_ADVANTAGE = "actor.policy_loss.loss_mode", "algorithm.adv_estimator"
UNCLIPPED = ("sapo", "gpg", "kl_cov")
"""Losses of verl without the bounds of PPO's."""
kl_estimator = named("algorithm.loss.kl", KL_ESTIMATORS)


def on(name: str) -> Condition:
    return lambda values: is_on(values.get(name))


def both_bounds(low: str, high: str) -> Rule:
    """Return the rule of one bound for both sides; settings for each side replace it."""

    def make(values: ForeignValues, value: Any) -> Made:
        if isinstance(value, list):
            return {LOW: value[0], HIGH: value[1]} if len(value) == 2 else f"set {LOW} and {HIGH}"
        options = {option: value for option, name in ((LOW, low), (HIGH, high)) if values.get(name) is None}
        return options or f"{low} and {high} replace it"

    return Rule(LOW, make)


def of_gae(option: str) -> Rule:
    """Return a rule of a setting that only the generalized advantage estimates have here."""

    def make(values: ForeignValues, value: Any) -> Made:
        if values.get(VERL_ADVANTAGE, "advantage_estimator") in (None, "gae"):
            return {option: value}
        return OFF if value == 1 and "critic" not in option else f"only {ADVANTAGE}=gae has it here"

    return Rule(option, make)


@about("the option")
def normalized_reward(values: ForeignValues, value: Any) -> Made:
    """Translate whether OpenRLHF divides rewards by their running deviation."""
    if not is_on(value):
        return OFF
    is_grouped = values.get("advantage_estimator") == "group_norm"
    return "rewards are as the functions return them" + ("; advantages are normalized within groups" * is_grouped)


@about(ADVANTAGE)
def openrlhf_critic(values: ForeignValues, value: Any) -> Made:
    """Translate settings of the critic, which has an effect only with the generalized advantage estimates."""
    if values.get("advantage_estimator") != "gae":
        return NO_CRITIC
    return OFF if value is False or value == -1 else CRITIC


@about(NAME)
def trl_loss(values: ForeignValues, value: Any) -> Made:
    """Translate TRL's ``loss_type``, which is of the policy gradient, of preferences or of next tokens."""
    if values.run.method in ("rl", "ebft"):
        return named(NAME, TRL_LOSSES, NO_LOSS).make(values, value)
    if values.run.method in ("cpo", "kto"):
        return UsedBy("algorithm") if value in ("simpo", "sigmoid", "kto") else NO_PREFERENCE
    if values.run.method == "sft":
        return "it is the loss here" if value in ("nll", "chunked_nll") else NO_LOSS
    names = value if isinstance(value, list) else [value]
    if len(names) == 2 and names[1] == "sft":
        return _with_cross_entropy(values, names[0])
    if len(names) != 1:
        return "a sum of losses: algorithm.preference.loss is one, and preference.cross_entropy_coef adds a second"
    return named(f"{PREFERENCE}.loss", PREFERENCE_LOSSES).make(values, names[0])


def _with_cross_entropy(values: ForeignValues, name: Any) -> Made:
    """Translate the sum of a loss of pairs and the chosen completions' cross-entropy, up to its scale."""
    options, weights = named(f"{PREFERENCE}.loss", PREFERENCE_LOSSES).make(values, name), values.get("loss_weights")
    weights = [1.0, 1.0] if weights is None else weights
    are_weights = isinstance(weights, list) and len(weights) == 2 and all(isinstance(w, int | float) for w in weights)
    if not isinstance(options, dict):
        return options
    if not are_weights or weights[0] <= 0:
        return "weights of two losses that are not two numbers above 0"
    return {**options, f"{PREFERENCE}.cross_entropy_coef": weights[1] / weights[0]}


@about(SMOOTHING)
def trl_smoothing(values: ForeignValues, value: Any) -> Made:
    """Translate TRL's ``label_smoothing``, which ``sigmoid`` ignores: DPO's loss, but for that of CPO's trainer."""
    losses = values.get("loss_type") or values.get("dpo_loss_type")
    is_used = bool({"robust", "exo_pair"} & set(map(str, losses if isinstance(losses, list) else [losses])))
    return {SMOOTHING: value} if is_used or values.run.method == "cpo" or not value else NO_EFFECT


@about(HIGH)
def trl_upper_bound(values: ForeignValues, value: Any) -> Made:
    """Translate TRL's ``epsilon_high``, which for CISPO is the bound itself, not its distance from 1."""
    if values.get("loss_type") != "cispo":
        return {HIGH: value}
    return {HIGH: value - 1} if isinstance(value, int | float) and value >= 1 else f"{HIGH} is at least 0"


@about(BETA)
def trl_beta(values: ForeignValues, value: Any) -> Made:
    if values.run.method == "rloo":
        return {KL_COEF: value} if value else OFF
    if values.algorithm in ("sft", "reward_model"):
        return "there is no weight of a KL here"
    return {BETA if values.run.method in ("rl", "ebft") else f"{PREFERENCE}.beta": value}


@about(COMBINE)
def trl_combine(values: ForeignValues, value: Any) -> Made:
    """Translate how rewards are summed; after normalizing each, their sum is divided by the batch's deviation."""
    return {COMBINE: value} | ({SCALE: "batch"} if value == "normalize_then_sum" else {})


@about("algorithm")
def axolotl_method(values: ForeignValues, value: Any) -> Made:
    return trl_combine.make(values, "normalize_then_sum") if value == "gdpo" else UsedBy("algorithm")


@about(SCALE)
def trl_scale(values: ForeignValues, value: Any) -> Made:
    if values.get("multi_objective_aggregation") == "normalize_then_sum" or values.get("rl") == "gdpo":
        return "each reward is divided by its deviation in the group, and their sum by that of the batch"
    text = {"true": "group", "false": "none"}.get(str(value).lower(), str(value))
    return {SCALE: text} if text in ("group", "batch", "none") else f"{SCALE} is one of group, batch, none"


@about("algorithm.reference.sync_steps")
def reference_steps(values: ForeignValues, value: Any) -> Made:
    """Translate the updates of the reference, which a switch of their own turns on."""
    if not is_on(values.get("sync_ref_model")):
        return OFF
    if values.model != "full":
        return "the reference of an adapter is its base, which does not change"
    every, mixup = values.number("ref_model_sync_steps") or 512, values.get("ref_model_mixup_alpha")
    steps = {"algorithm.reference.sync_steps": -(-every // values.updates_per_step)}
    return steps | {"algorithm.reference.mixup": 0.6 if mixup is None else mixup}


@about("algorithm.loss.cispo_floor")
def verl_lower_bound(values: ForeignValues, value: Any) -> Made:
    if values.get(VERL_LOSS) != "cispo":
        return {LOW: value}
    is_number = isinstance(value, int | float)
    return {"algorithm.loss.cispo_floor": max(1 - value, 0)} if is_number else "set algorithm.loss.cispo_floor"


@about("algorithm.loss.clip_delta")
def verl_dual_clip(values: ForeignValues, value: Any) -> Made:
    loss = values.get(VERL_LOSS)
    if loss in ("dppo_tv", "dppo_kl"):
        return "see algorithm.loss.dppo_cap"
    is_used = loss in (None, "vanilla") and not is_on(values.get("actor.use_gpg_loss"))
    return {"algorithm.loss.clip_delta": value} if is_used else NO_EFFECT


@about(KL_TARGET)
def verl_kl_type(values: ForeignValues, value: Any) -> Made:
    """Translate whether the weight of the KL is adapted, which takes a target."""
    if value != "adaptive":
        return {KL_TARGET: None}
    target, horizon = (values.get(f"algorithm.kl_ctrl.{name}") for name in ("target_kl", "horizon"))
    return {KL_TARGET: 0.1 if target is None else target, KL_HORIZON: 10_000 if horizon is None else horizon}


@about("replay.refill_attempts")
def refill(values: ForeignValues, value: Any) -> Made:
    """Translate sampling until the groups differ; the batches that it may take include the first."""
    if not is_on(values.get("algorithm.filter_groups.enable", "dynamic_filtering")):
        return OFF
    batches = values.number("algorithm.filter_groups.max_num_gen_batches")
    return {"replay.refill_attempts": max(batches - 1, 1) if batches else 1_000_000}


def in_openrlhf_reward(option: str) -> Rule:
    """Return a rule of the KL in the rewards, which is of each token: a sum over the completion is another reward."""

    def make(values: ForeignValues, value: Any) -> Made:
        if is_on(values.get("use_kl_loss")) or not values.get("init_kl_coef") or not value:
            return OFF
        return {option: value} if values.get("advantage_estimator") in ("gae", "reinforce") else KL_OF_TOKENS

    return Rule(option, make)


def of_openrlhf_kl(in_loss: Rule, option: str) -> Rule:
    """Return a rule of the KL that is in the loss if a switch says so, and otherwise in the rewards."""
    in_reward, is_in_loss = in_openrlhf_reward(option), on("use_kl_loss")
    return Rule(
        in_loss.option, lambda values, value: (in_loss if is_in_loss(values) else in_reward).make(values, value)
    )


def of_adaptive_entropy(option: str) -> Rule:
    """Return the rule of a setting that has no effect without TRL's adaptive entropy."""
    return only_if(on("use_adaptive_entropy"), option, OFF)


def in_verl_reward(rule: Rule) -> Rule:
    """Return a rule of the KL in the rewards, for runs that have one."""
    return only_if(on("algorithm.use_kl_in_reward"), rule, OFF)


def of_covariance(loss: str, name: str) -> Rule:
    """Return the rule of a setting of one of the two losses that look at covariances."""
    return only_if(lambda values: values.get(VERL_LOSS) == loss, f"algorithm.loss.covariance.{name}", NO_EFFECT)


LOSSES = (
    SettingRow(trl_loss, "loss_type"),
    SettingRow(Rule(f"{PREFERENCE}.cross_entropy_coef", lambda *_: UsedBy(f"{PREFERENCE}.loss")), "loss_weights"),
    SettingRow(named(NAME, VERL_LOSSES, NO_LOSS), verl=VERL_LOSS),
    SettingRow(named(NAME, OPENRLHF_LOSSES, NO_LOSS), openrlhf="policy_loss_type"),
    SettingRow(switched(NAME, "reinforce"), verl="actor.use_gpg_loss"),
    SettingRow(
        without(VERL_LOSS, ("gspo", "sapo", "geo_mean"), named(AGGREGATE, VERL_AGGREGATES)), verl="actor.loss_agg_mode"
    ),
    SettingRow(LEVEL, "importance_sampling_level"),
    SettingRow(without("loss_type", ("sapo", "vespo", "cispo"), both_bounds("", "epsilon_high")), "epsilon"),
    SettingRow(without("loss_type", ("sapo", "vespo"), trl_upper_bound), "epsilon_high"),
    SettingRow(
        without(VERL_LOSS, UNCLIPPED, both_bounds("actor.clip_ratio_low", "actor.clip_ratio_high")),
        verl="actor.clip_ratio",
    ),
    SettingRow(without(VERL_LOSS, UNCLIPPED, verl_lower_bound), verl="actor.clip_ratio_low"),
    SettingRow(without(VERL_LOSS, UNCLIPPED, HIGH), verl="actor.clip_ratio_high"),
    SettingRow(both_bounds("eps_clip_low_high", "eps_clip_low_high"), openrlhf="eps_clip"),
    SettingRow(both_bounds("", ""), openrlhf="eps_clip_low_high"),
    SettingRow(sampled("algorithm.loss.clip_delta"), "delta", openrlhf="dual_clip"),
    SettingRow(verl_dual_clip, verl="actor.clip_ratio_c"),
    SettingRow(switched("algorithm.loss.mask_truncated"), "mask_truncated_completions"),
    SettingRow("algorithm.loss.top_entropy_quantile", "top_entropy_quantile"),
    SettingRow(
        "algorithm.loss.entropy_coef", "entropy_coef", "actor.entropy_coeff", "entropy_loss_coef=actor.entropy_coef"
    ),
    SettingRow(enabling(ENTROPY_TARGET, "entropy_target", 0.2), "use_adaptive_entropy"),
    SettingRow(of_adaptive_entropy(ENTROPY_TARGET), "entropy_target"),
    SettingRow(of_adaptive_entropy("algorithm.loss.entropy_step"), "entropy_coef_delta"),
    SettingRow(of_adaptive_entropy("algorithm.loss.entropy_coef_min"), "entropy_coef_min"),
    SettingRow(of_adaptive_entropy("algorithm.loss.entropy_coef_max"), "entropy_coef_max"),
    SettingRow("algorithm.loss.sapo.temperature_positive", "sapo_temperature_pos", "actor.tau_pos"),
    SettingRow("algorithm.loss.sapo.temperature_negative", "sapo_temperature_neg", "actor.tau_neg"),
    SettingRow("algorithm.loss.vespo.k_positive", "vespo_k_pos"),
    SettingRow("algorithm.loss.vespo.k_negative", "vespo_k_neg"),
    SettingRow("algorithm.loss.vespo.lambda_positive", "vespo_lambda_pos"),
    SettingRow("algorithm.loss.vespo.lambda_negative", "vespo_lambda_neg"),
    SettingRow(of_covariance("clip_cov", "share"), verl="actor.policy_loss.clip_cov_ratio"),
    SettingRow(of_covariance("clip_cov", "low"), verl="actor.policy_loss.clip_cov_lb"),
    SettingRow(of_covariance("clip_cov", "high"), verl="actor.policy_loss.clip_cov_ub"),
    SettingRow(of_covariance("kl_cov", "share"), verl="actor.policy_loss.kl_cov_ratio"),
    SettingRow(of_covariance("kl_cov", "penalty"), verl="actor.policy_loss.ppo_kl_coef"),
    SettingRow(
        Rule("the option", lambda values, value: "there is no loss of a router here" if value else OFF),
        openrlhf="aux_loss_coef",
    ),
    SettingRow(without_option("losses are computed in float32"), openrlhf="compute_fp32_loss"),
    # KL
    SettingRow(trl_beta, "beta rl_beta"),
    SettingRow(only_if(on("actor.use_kl_loss"), BETA, "actor.use_kl_loss is off"), verl="actor.kl_loss_coef"),
    SettingRow(enabling(BETA, "actor.kl_loss_coef", 0.001), verl="actor.use_kl_loss"),
    SettingRow(kl_estimator, verl="actor.kl_loss_type"),
    SettingRow(enabling(KL_COEF, "algorithm.kl_ctrl.kl_coef", 0.001), verl="algorithm.use_kl_in_reward"),
    SettingRow(in_verl_reward(named("algorithm.reward_kl.kl", KL_ESTIMATORS)), verl="algorithm.kl_penalty"),
    SettingRow(in_verl_reward(copied(KL_COEF)), verl="algorithm.kl_ctrl.kl_coef"),
    SettingRow(in_verl_reward(verl_kl_type), verl="algorithm.kl_ctrl.type"),
    SettingRow(
        in_verl_reward(
            only_if(lambda values: values.get("algorithm.kl_ctrl.type") == "adaptive", part(KL_TARGET), CONSTANT_KL)
        ),
        verl="algorithm.kl_ctrl.target_kl algorithm.kl_ctrl.horizon",
    ),
    SettingRow(of_openrlhf_kl(copied(BETA), KL_COEF), openrlhf="init_kl_coef=algo.kl.init_coef"),
    SettingRow(enabling(BETA, "init_kl_coef", 0.01), openrlhf="use_kl_loss=algo.kl.use_loss"),
    SettingRow(of_openrlhf_kl(kl_estimator, "algorithm.reward_kl.kl"), openrlhf="kl_estimator"),
    SettingRow(switched("algorithm.loss.kl", "k3"), openrlhf="use_kl_estimator_k3"),
    SettingRow(in_openrlhf_reward(KL_TARGET), openrlhf="kl_target"),
    SettingRow(without("kl_target", (None,), in_openrlhf_reward(KL_HORIZON), CONSTANT_KL), openrlhf="kl_horizon"),
    SettingRow(reference_steps, "sync_ref_model ref_model_sync_steps ref_model_mixup_alpha"),
    SettingRow(
        "the reference is the base without its adapter, or a frozen copy, in the learner's own processes", verl="ref.*"
    ),
    # advantages
    SettingRow(named(ADVANTAGE, VERL_ADVANTAGES), verl=VERL_ADVANTAGE),
    SettingRow(named(ADVANTAGE, OPENRLHF_ADVANTAGES), openrlhf="advantage_estimator"),
    SettingRow(trl_scale, "scale_rewards"),
    SettingRow(
        only_if(
            lambda values: values.get(VERL_ADVANTAGE) in ("grpo", "grpo_passk"),
            Rule(SCALE, lambda values, value: {SCALE: "group" if is_on(value) else "none"}),
            NO_EFFECT,
        ),
        verl="algorithm.norm_adv_by_std_in_grpo",
    ),
    SettingRow(trl_combine, "multi_objective_aggregation"),
    SettingRow(without_option(f"see {ADVANTAGE}"), "normalize_advantages", openrlhf="no_advantage_std_norm"),
    SettingRow(normalized_reward, openrlhf="normalize_reward=reward.normalize_enable"),
    SettingRow(of_gae("algorithm.advantage.gamma"), verl="algorithm.gamma", openrlhf="gamma"),
    SettingRow(of_gae("algorithm.advantage.lam"), verl="algorithm.lam", openrlhf="lambd"),
    SettingRow(
        of_gae("algorithm.critic.value_clip"), verl="critic.cliprange_value", openrlhf="value_clip=critic.value_clip"
    ),
    SettingRow(CRITIC, verl="critic.* trainer.critic_warmup"),
    SettingRow(openrlhf_critic, openrlhf="save_value_network freezing_actor_steps critic.* critic_*"),
    SettingRow(
        refill,
        verl="algorithm.filter_groups.enable algorithm.filter_groups.max_num_gen_batches",
        openrlhf="dynamic_filtering=algo.dynamic_filtering_enable",
    ),
    SettingRow("groups are compared by the sum of their rewards", verl="algorithm.filter_groups.metric"),
    SettingRow(
        "groups whose rewards are all equal are replaced",
        openrlhf="dynamic_filtering_reward_range=algo.dynamic_filtering_range",
    ),
    # preferences and reward models
    SettingRow(f"{PREFERENCE}.beta", openrlhf="beta"),
    SettingRow(trl_loss, "dpo_loss_type"),
    SettingRow(
        without_option("there it sums log-probs, while algorithm.preference.loss=ipo takes their means"),
        openrlhf="ipo=model.ipo_enable",
    ),
    SettingRow(
        Rule("the option", lambda values, value: "it is the loss here" if value in ("sigmoid", "logexp") else NO_LOSS),
        openrlhf="loss",
    ),
    SettingRow(trl_smoothing, "label_smoothing"),
    SettingRow(SMOOTHING, openrlhf="label_smoothing"),
    SettingRow(only_if(lambda values: values.get("rl") == "dpo", trl_smoothing, NO_EFFECT), "dpo_label_smoothing"),
    SettingRow(
        f"{PREFERENCE}.desirable_weight", "desirable_weight kto_desirable_weight", openrlhf="desirable_loss_weight"
    ),
    SettingRow(
        f"{PREFERENCE}.undesirable_weight",
        "undesirable_weight kto_undesirable_weight",
        openrlhf="undesirable_loss_weight",
    ),
    SettingRow(switched(f"{PREFERENCE}.precompute_ref_log_probs"), "precompute_ref_log_probs"),
    SettingRow(
        only_if(lambda values: values.algorithm == "simpo", f"{PREFERENCE}.margin", "it is of SimPO"), "simpo_gamma"
    ),
    SettingRow(f"{PREFERENCE}.cross_entropy_coef", "cpo_alpha rpo_alpha", openrlhf="nll_loss_coef"),
    SettingRow(for_method("orpo", rule=f"{PREFERENCE}.beta"), "orpo_alpha"),
    SettingRow(for_method("reward_model", rule="algorithm.reward_model.center_coef"), "center_rewards_coefficient"),
    SettingRow(for_method("process_reward_model", rule="algorithm.process_reward_model.separator"), "step_separator"),
    SettingRow(axolotl_method, "rl"),
    SettingRow(part("algorithm"), "reward_model process_reward_model ebft.mode TrainingArguments"),
    # EBFT
    SettingRow(f"{FEATURES}.layers", "ebft.feature_layers"),
    SettingRow(f"{FEATURES}.pooling", "ebft.embed_method"),
    SettingRow(f"{FEATURES}.alignment_coef", "ebft.alignment_coef"),
    SettingRow(f"{FEATURES}.diversity_coef", "ebft.diversity_coef"),
    SettingRow(named(f"{FEATURES}.whitening", {"true": "feature", "false": "none"}), "ebft.use_whitening"),
    SettingRow("algorithm.ebft.rl_coef", "ebft.rl_coef"),
    SettingRow("algorithm.ebft.ce_coef", "ebft.ce_coef"),
    *(SettingRow(f"{STRIDED}.{name}", f"ebft.{name}") for name in ("stride", "context_length", "temperature", "top_p")),
    SettingRow(f"{STRIDED}.generate_tokens", "ebft.generate_max_len"),
    SettingRow("algorithm.group_size", "ebft.n_samples_per_prompt"),
    SettingRow(ADVANTAGE, "ebft.advantage_estimator"),
)

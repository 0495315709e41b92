"""Rules of a config's objective: advantages, losses, corrections, functions of one's own, and preferences."""

from __future__ import annotations

from collections.abc import Iterator

from rlpipe.configs.data_sources import all_sources
from rlpipe.configs.options import changed, leaves, to_tree
from rlpipe.configs.schema.algorithm_config import (
    PAIRS,
    AdvantageConfig,
    AlgorithmConfig,
    CorrectionConfig,
    CriticConfig,
    LossConfig,
    RewardKlConfig,
)
from rlpipe.configs.schema.option import UserFunction
from rlpipe.configs.schema.preference_config import PreferenceConfig
from rlpipe.configs.schema.root_config import Config

PREFERENCE = "algorithm.preference"
PRECOMPUTE = f"{PREFERENCE}.precompute_ref_log_probs"
PREFERENCE_TAKERS = {
    "label_smoothing": ("dpo", "robust", "exo", "simpo", "cpo"),
    "margin": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
}
"""Losses that an option has an effect on."""
LOSS_TAKERS = {
    "cispo_floor": ("cispo",),
    "dppo_cap": ("dppo_tv", "dppo_kl"),
    "m2_threshold": ("m2po",),
    "dro_beta": ("dro",),
    "sapo": ("sapo",),
    "vespo": ("vespo",),
    "covariance": ("clip_cov", "kl_cov"),
}
"""Surrogates that an option, or a section of options, has an effect on."""
EPS_TAKERS = ("grpo", "group_norm", "reinforce_baseline", "pass_at_k", "max_rl")
"""Advantages with ``eps`` in their divisor."""
ROW_KINDS = ("preference", "reward_model", "process_reward_model")
"""Kinds of algorithms with rows of their own; each has a section of its name."""
ROLLOUT_OPTIONS = (
    "algorithm.advantage",
    "algorithm.loss",
    "algorithm.correction",
    "algorithm.replay",
    "algorithm.reward_kl",
    "algorithm.critic",
    "algorithm.ebft",
    "algorithm.combine",
)
"""Options, and sections of them, that only rollouts, or blocks of raw text, have a use for."""
UNUSED = {
    **dict.fromkeys(ROW_KINDS, ROLLOUT_OPTIONS),
    "sft": (*ROLLOUT_OPTIONS, "algorithm.reference"),
    "ebft_strided": ("algorithm.combine", "algorithm.replay"),
}
"""Options, and sections of them, that a kind of algorithm ignores.

``replay`` is not among them, because experiments whose algorithm is exchanged have set it.
"""


def check_group_size(algorithm: AlgorithmConfig) -> Iterator[str]:
    advantage, size = algorithm.advantage, algorithm.group_size
    pairs = algorithm.ebft.reward and advantage.name in ("rloo", "group_norm")
    alone = advantage.path is not None or advantage.name in ("reinforce", "reinforce_plus_plus", "remax", "gae")
    if size < 2 and not alone and not pairs:
        yield (
            f"algorithm.group_size: {size}, but advantage {advantage.name} compares the rollouts of a group; set 2 or "
            "more, or algorithm=reinforce"
        )
    elif size < 2 and algorithm.combine == "normalize_then_sum":
        yield f"algorithm.group_size: {size}, but combine=normalize_then_sum normalizes within a group; set 2 or more"
    if algorithm.samples_greedy and (algorithm.ebft.reward or algorithm.combine == "normalize_then_sum"):
        option = "algorithm.ebft.reward" if algorithm.ebft.reward else "algorithm.combine"
        yield f"{option}: remax compares plain rewards with that of a greedy completion; leave it out, or set rloo"
    if advantage.name == "max_rl" and advantage.path is None and algorithm.combine == "normalize_then_sum":
        yield "algorithm.combine: max_rl divides by the mean of plain rewards, not of normalized ones; leave it out"
    if advantage.name not in ("grpo", "pass_at_k") and advantage.scale != "group":
        yield f"algorithm.advantage.scale: {advantage.scale} has no effect on {advantage.name}, only on grpo; set group"
    divides = advantage.name in EPS_TAKERS or advantage.path is not None or algorithm.combine == "normalize_then_sum"
    if advantage.eps != AdvantageConfig().eps and not divides:
        yield f"algorithm.advantage.eps: has no effect on {advantage.name}; leave it out, or set name={EPS_TAKERS[0]}"
    yield from check_function(advantage, "algorithm.advantage")


def check_function(config: UserFunction, section: str) -> Iterator[str]:
    """Yield contradictions of a function of the user's own; its import is checked when a run begins."""
    if config.path is not None and ":" not in config.path:
        yield (
            f"{section}.path: {config.path!r:.200} names no function; write file.py:function or package.module:function"
        )
    for name in ("kwargs", "digest"):
        if config.path is None and getattr(config, name):
            yield f"{section}.{name}: there is no function to use it; set {section}.path, or leave it out"


def check_loss(algorithm: AlgorithmConfig) -> Iterator[str]:
    loss = algorithm.loss
    yield from check_function(loss, "algorithm.loss")
    yield from _check_entropy(loss)
    if algorithm.kind != "rl" and loss.name == PAIRS:
        yield f"algorithm.loss.name: {PAIRS} compares rollouts, which {algorithm.kind} has none of; set reinforce"
    elif loss.path is not None and loss.name == PAIRS:
        yield (
            f"algorithm.loss.path: your function would replace the loss {PAIRS}, which compares pairs; set "
            f"{PREFERENCE}.path for a loss of pairs, or algorithm.loss.name=clip"
        )
    if loss.path is not None:
        return
    if algorithm.samples_pairs:
        yield from check_sampled_pairs(algorithm)
    for name in changed(loss, LOSS_TAKERS):
        if loss.name not in (losses := LOSS_TAKERS[name]):
            yield f"algorithm.loss.{name}: has no effect on {loss.name}, only on {', '.join(losses)}; leave it out"
    if loss.name == "vespo" and algorithm.correction.mode.startswith("sequence"):
        yield (
            f"algorithm.correction.mode: {algorithm.correction.mode} would count a sequence's ratio once for each "
            "token of vespo's product; set token_truncate, token_mask or none"
        )
    if loss.name == "clip_cov" and loss.covariance.low >= loss.covariance.high:
        yield (
            f"algorithm.loss.covariance.low: {loss.covariance.low:g} is not below high={loss.covariance.high:g}, so no "
            "token is chosen; set it lower"
        )
    if loss.name == "cispo" and loss.cispo_floor > 1 + loss.clip_high:
        yield "algorithm.loss.cispo_floor: is above 1 + clip_high; set it lower"
    if loss.level != "token" and loss.name != "clip":
        yield f"algorithm.loss.level: {loss.level} needs algorithm.loss.name=clip; {loss.name} works per token"
    if loss.name == "clip" and loss.clip_low >= 1:
        yield f"algorithm.loss.clip_low: {loss.clip_low} leaves no lower bound; set it below 1"
    if loss.clip_delta is not None and loss.name != "clip":
        yield f"algorithm.loss.clip_delta: has no effect on the loss {loss.name}; set it to null"
    elif loss.clip_delta is not None and loss.clip_delta < 1 + loss.clip_high:
        yield f"algorithm.loss.clip_delta: {loss.clip_delta} is below 1 + clip_high; set {1 + loss.clip_high:g} or more"


def _check_entropy(loss: LossConfig) -> Iterator[str]:
    low, high = loss.entropy_coef_min, loss.entropy_coef_max
    for name in changed(loss, ("entropy_step", "entropy_coef_min", "entropy_coef_max")):
        if loss.entropy_target is None:
            yield f"algorithm.loss.{name}: the weight is constant without a target; set entropy_target, or leave it out"
    if low > high:
        yield f"algorithm.loss.entropy_coef_min: {low:g} is above entropy_coef_max={high:g}; set it lower"
    elif loss.entropy_target is not None and loss.entropy_coef > high:
        yield f"algorithm.loss.entropy_coef: {loss.entropy_coef:g} is above entropy_coef_max={high:g}; set it lower"


def check_correction(algorithm: AlgorithmConfig) -> Iterator[str]:
    correction = algorithm.correction
    yield from check_function(correction, "algorithm.correction")
    for option in changed(correction, ("mode", "cap", "floor")):
        if correction.path is not None:
            yield f"algorithm.correction.{option}: has no effect on the function of path; remove it, or set path=null"
    for option in changed(correction, ("rejection_cap", "rejection_floor")):
        if correction.rejection == "none":
            yield f"algorithm.correction.{option}: nothing is rejected; set rejection, or leave it out"
    if correction.rejection_cap == 1 and correction.rejection_floor in (None, 1.0):
        yield "algorithm.correction.rejection_cap: 1 keeps only ratios of exactly 1; set it higher"
    if correction.rejection != "none" and correction.rejection_cap is None and not correction.rejection_floor:
        yield (
            f"algorithm.correction.rejection: {correction.rejection} drops nothing without bounds; set rejection_cap "
            "or rejection_floor, or none here"
        )
    name = "algorithm.correction.bias_corrected_kl"
    if correction.bias_corrected_kl and algorithm.loss.beta == 0:
        yield f"{name}: there is no KL to weight; set algorithm.loss.beta above 0, or false here"
    if correction.bias_corrected_kl and correction.mode == "none":
        yield f"{name}: there are no weights with algorithm.correction.mode=none; set another mode, or false here"


def check_engine_dtype(config: Config) -> Iterator[str]:
    """Yield contradictions of ``rollout.dtype``, whose rounding the correction makes up for.

    ``model.dtype=auto`` contradicts nothing; the type that it becomes is checked once it is known.
    """
    algorithm, dtype = config.algorithm, config.rollout.dtype
    if dtype is None:
        return
    if dtype == "float16" and not config.rollout.num_gpus:
        yield "rollout.dtype: float16 needs a GPU; set float32, bfloat16, or null"
    if dtype == "float32" and config.model.attention == "flash_attention_2":
        yield "rollout.dtype: flash_attention_2 does not support float32; set model.attention=sdpa, or bfloat16 here"
    has_correction = algorithm.correction.path is not None or algorithm.correction.mode != "none"
    if dtype != config.model.dtype != "auto" and not has_correction and not algorithm.samples_pairs:
        yield (
            f"rollout.dtype: engines that compute in {dtype} sample from another distribution than the learner's; set "
            "algorithm.correction.mode, such as token_truncate, or null here"
        )


def check_reward_kl(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield contradictions of the KL in the reward, and of other advantages that the learner computes."""
    name, options, advantage = "algorithm.reward_kl", algorithm.reward_kl, algorithm.advantage
    if advantage.name != "gae" and (advantage.gamma, advantage.lam) != (1.0, 1.0):
        yield f"algorithm.advantage.gamma: gamma and lam have no effect on {advantage.name}; leave them out, or set gae"
    if not algorithm.has_critic and algorithm.critic != CriticConfig():
        yield "algorithm.critic: only algorithm.advantage.name=gae has a critic; set that, or leave it out"
    if algorithm.has_critic and (algorithm.ebft.reward or algorithm.combine == "normalize_then_sum"):
        option = "algorithm.ebft.reward" if algorithm.ebft.reward else "algorithm.combine"
        yield f"{option}: gae compares plain rewards with a critic's values; leave it out, or set rloo"
    if algorithm.learner_computes_advantages and algorithm.loss.mask_truncated:
        yield (
            "algorithm.loss.mask_truncated: the learner computes the advantages from the log-probs of all rollouts "
            "(reward_kl, optimal_token_baseline, gae), and has none of these; set false"
        )
    if not options.coef and options != RewardKlConfig():
        yield f"{name}: there is no KL in the reward with coef=0, which stays 0; set {name}.coef, or leave it out"
    elif options.target is None and options.horizon != RewardKlConfig().horizon:
        yield f"{name}.horizon: coef is constant without a target; set {name}.target, or leave it out"
    elif options.coef and algorithm.samples_pairs:
        yield f"{name}.coef: has no effect on the loss dpo, which has a reference of its own; set 0"
    elif options.coef and advantage.name == "max_rl" and advantage.path is None:
        yield (
            f"{name}.coef: max_rl divides by a group's mean reward, which a KL can make negative; set 0, and "
            "algorithm.loss.beta for a penalty in the loss"
        )
    elif options.target is not None and 5 * options.horizon <= algorithm.groups_per_step * algorithm.group_size:
        yield (
            f"{name}.horizon: {options.horizon} is in rollouts, and a step has {algorithm.groups_per_step} x "
            f"{algorithm.group_size}, which could change the coefficient by more than its value; set 10000 or so"
        )
    elif options.coef and advantage.credit == "turns":
        yield f"{name}.coef: rewards of single turns take no KL; set 0, or algorithm.advantage.credit=episode"


def check_sampled_pairs(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Yield contradictions of ``algorithm.loss.name=dpo``, which compares rollouts of a group."""
    yield from _check_preference_loss(algorithm.preference)
    if algorithm.preference.precompute_ref_log_probs:
        yield f"{PRECOMPUTE}: rollouts are not known before they are sampled; remove it"
    if not algorithm.preference.takes_pairs:
        yield f"{PREFERENCE}.loss: kto takes no pairs; set dpo, ipo or another loss of pairs"
    if algorithm.ebft.reward:
        yield "algorithm.loss.name: dpo has no part for EBFT's losses; set algorithm.ebft.reward=false, or another loss"
    if algorithm.loss.top_entropy_quantile < 1:
        yield "algorithm.loss.top_entropy_quantile: has no effect on the loss dpo; set it to 1"
    for name in ("beta", "entropy_coef"):
        if getattr(algorithm.loss, name):
            yield f"algorithm.loss.{name}: has no effect on the loss dpo; set it to 0"
    for name in changed(algorithm.loss, ("aggregate", "clip_low", "clip_high")):
        yield f"algorithm.loss.{name}: has no effect on the loss dpo; leave it out"
    if algorithm.loss.entropy_target is not None:
        yield "algorithm.loss.entropy_target: has no effect on the loss dpo; leave it out"
    if algorithm.combine != AlgorithmConfig().combine:
        yield "algorithm.combine: the loss dpo compares sums of rewards; leave it out"
    if algorithm.correction != CorrectionConfig():
        yield "algorithm.correction: the loss dpo has no importance weights; leave it out"
    if algorithm.advantage != AdvantageConfig():
        yield "algorithm.advantage: the loss dpo compares rewards in pairs, without advantages; leave it out"


def check_preference(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    yield from _check_preference_loss(algorithm.preference)
    yield from _check_kto_update(algorithm)
    if algorithm.loss.beta:
        yield f"algorithm.loss.beta: has no effect on preferences; set {PREFERENCE}.beta"
    if algorithm.reference.sync_steps and not algorithm.preference.needs_reference:
        yield f"algorithm.reference.sync_steps: {algorithm.preference.loss} has no reference; set it to 0"
    yield from _check_precomputed(config)
    yield from _check_preference_rows(config)
    if config.model.adapter.path is not None and algorithm.preference.runs_reference:
        yield (
            "model.adapter.path: the reference is this adapter as it is now, whose log-probs must be known before it "
            f"is trained; set {PRECOMPUTE}=true, or merge it (rlpipe merge) and give the merged model as model.path"
        )
    if algorithm.preference.loss == "kto":
        for name, value in (("loss_mask", "all"), ("train_on_inputs", True)):
            if any(getattr(source.data, name) == value for source in all_sources(config.data)):
                yield f"data.{name}: kto trains only completions, so prompts can't count; remove it"


def _check_preference_loss(preference: PreferenceConfig) -> Iterator[str]:
    loss = preference.loss
    yield from check_function(preference, PREFERENCE)
    if preference.path is not None and not preference.takes_pairs:
        yield f"{PREFERENCE}.loss: your own function takes pairs, which kto has none of; set dpo, or simpo"
    for name in changed(preference, PREFERENCE_TAKERS):
        if loss not in (losses := PREFERENCE_TAKERS[name]):
            yield f"{PREFERENCE}.{name}: has no effect on {loss}, only on {', '.join(losses)}; remove it"
    if preference.label_smoothing == 0.5:
        yield f"{PREFERENCE}.label_smoothing: with half of all labels wrong there is nothing to learn; set it below 0.5"
    if loss == "exo" and not preference.label_smoothing:
        yield f"{PREFERENCE}.label_smoothing: exo needs more than 0; set 0.001"
    if loss == "orpo" and not preference.cross_entropy_coef:
        yield (
            f"{PREFERENCE}.cross_entropy_coef: orpo's odds ratio is added to a cross-entropy; set 1, or algorithm=orpo"
        )
    if loss == "kto" and preference.cross_entropy_coef:
        yield f"{PREFERENCE}.cross_entropy_coef: kto has no chosen completions; set it to 0"
    if loss == "kto" and not preference.desirable_weight and not preference.undesirable_weight:
        yield f"{PREFERENCE}.desirable_weight: with both weights 0 nothing is trained; set one above 0"


def _check_kto_update(algorithm: AlgorithmConfig) -> Iterator[str]:
    rows = algorithm.groups_per_step // algorithm.num_minibatches
    if algorithm.preference.loss == "kto" and rows < 2:
        yield (
            "algorithm.groups_per_step: kto estimates the KL from the completions of other rows, so an update needs "
            f"at least 2; set it to {2 * algorithm.num_minibatches} or more"
        )


def _check_precomputed(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    if not algorithm.preference.precompute_ref_log_probs:
        return
    if not algorithm.preference.needs_reference:
        yield f"{PRECOMPUTE}: {algorithm.preference.loss} has no reference; remove it"
    if algorithm.reference.sync_steps:
        yield f"{PRECOMPUTE}: log-probs of a reference that moves can't be computed before; set reference.sync_steps=0"
    if any(source.data.streaming for source in all_sources(config.data)):
        yield f"{PRECOMPUTE}: the rows of a stream would be read twice; set data.streaming=false, or remove it"


def check_reward_model(config: Config) -> Iterator[str]:
    model, kind = config.model, config.algorithm.kind
    if config.learner.offload == "chunked":
        yield "learner.offload: chunked can't hold a reward model so far; set none, or policy with strategy=fsdp2"
    if model.images:
        yield f"model.images: {kind} takes no images so far; set false"
    if model.adapter.kind == "qlora":
        yield f"model.adapter.kind: qlora has no whole weights, which {kind} exports; set lora, or model=full"
    if model.adapter.path is not None:
        yield (
            "model.adapter.path: an adapter without a reward head can't be trained further; merge it (rlpipe merge), "
            "and give the merged model as model.path"
        )
    if config.algorithm.reference.sync_steps:
        yield f"algorithm.reference.sync_steps: {kind} has no reference; set it to 0"
    yield from _check_preference_rows(config)


def _check_preference_rows(config: Config) -> Iterator[str]:
    has_steps = config.algorithm.kind == "process_reward_model"
    for source in all_sources(config.data):
        section = f"data.sources.{source.name}" if source.name else "data"
        if source.data.text_column is not None:
            subject = "labels are of steps after" if has_steps else "preferences are between completions of"
            yield f"{section}.text_column: {subject} a prompt; set it to null"
        if source.data.source == "reasoning_gym" and source.data.transform is None:
            subject = "labelled steps" if has_steps else "preferences"
            yield f"{section}.source: tasks of reasoning_gym have no {subject}; set jsonl, parquet or datasets"


def check_unused(config: Config) -> Iterator[str]:
    """Yield the changed options that an algorithm ignores: of rollouts without any, and of the other kinds of rows.

    Those of engines and rewards are not among them, because ``rlpipe eval`` reads them.
    """
    algorithm, usual = config.algorithm, dict(leaves(to_tree(Config())))
    samples_pairs = algorithm.kind == "rl" and algorithm.loss.name == PAIRS
    used = "preference" if samples_pairs else algorithm.kind
    unused = (*UNUSED.get(algorithm.kind, ()), *(f"algorithm.{kind}" for kind in ROW_KINDS if kind != used))
    for name, value in leaves(to_tree(config)):
        is_unused = any(name == option or name.startswith(f"{option}.") for option in unused)
        if is_unused and (name, value) not in usual.items():
            online = algorithm.kind == "rl" and name.startswith(f"{PREFERENCE}.")
            fix = "remove it, or set algorithm=online_dpo" if online else "remove it"
            yield f"{name}: has no effect with algorithm.kind={algorithm.kind}; {fix}"

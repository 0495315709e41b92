"""Rules by which settings of TRL, axolotl, verl and OpenRLHF become options of rlpipe, or say why they do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlpipe.configs.foreign_names import NO_CRITIC, QUANTIZED, STEPS, WARMUP
from rlpipe.configs.foreign_values import BATCH_NAMES, ForeignValues, is_on

Options = dict[str, Any]


@dataclass(frozen=True)
class Chooses:
    """Result of a rule for a setting that is part of what chooses a group's file."""

    group: str


Made = Options | Chooses | str
"""Options of rlpipe by their dotted names, the group that a setting chooses in, or the reason why it makes neither."""
Rule = Callable[[ForeignValues, Any], Made]

ADVANTAGES = {
    "reinforce": "reinforce_plus_plus",
    "reinforce_plus_plus_baseline": "reinforce_baseline",
    "grpo_passk": "pass_at_k",
} | {name: name for name in ("grpo", "group_norm", "rloo", "reinforce_plus_plus", "reinforce_baseline", "opo", "gpg")}
AGGREGATES = {
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum": "sequence_sum",
    "seq-mean-token-sum-norm": "constant",
}
POLICY_LOSSES = {"vanilla": "clip", "ppo": "clip"} | {
    name: name for name in ("geo_mean", "clip_cov", "kl_cov", "cispo", "sapo", "vespo", "dppo_tv", "dppo_kl")
}
TRL_LOSSES: Mapping[str, Options] = {
    "grpo": {"algorithm.loss.aggregate": "sequence"},
    "bnpo": {"algorithm.loss.aggregate": "token"},
    "dapo": {"algorithm.loss.aggregate": "token"},
    "dr_grpo": {"algorithm.loss.aggregate": "constant"},
    "luspo": {"algorithm.loss.level": "sequence", "algorithm.loss.aggregate": "sequence_sum"},
    "cispo": {"algorithm.loss.name": "cispo", "algorithm.loss.aggregate": "token"},
    "sapo": {"algorithm.loss.name": "sapo"},
    "vespo": {"algorithm.loss.name": "vespo"},
}
PREFERENCE_LOSSES = {"sigmoid": "dpo", "exo_pair": "exo", "sppo_hard": "sppo"} | {
    name: name for name in ("ipo", "hinge", "robust", "nca_pair", "apo_zero", "apo_down", "simpo", "kto")
}
KL_ESTIMATORS = {"kl": "k1", "mse": "k2", "low_var_kl": "k3"} | {name: name for name in ("abs", "k1", "k2", "k3")}
SCHEDULES = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"} | {
    name: name for name in ("linear", "cosine", "constant")
}
OPTIMIZERS = {"adamw_bnb_8bit": "adamw_8bit"} | {
    **dict.fromkeys(("adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused"), "adamw"),
    **{name: name for name in ("adamw_8bit", "paged_adamw_8bit")},
}
DTYPES = {
    **dict.fromkeys(("bf16", "bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "float16"), "float16"),
    **dict.fromkeys(("fp32", "float32"), "float32"),
    "auto": "auto",
}
ATTENTION = ("sdpa", "eager", "flex_attention", "flash_attention_2")


def copied(option: str) -> Rule:
    return lambda values, value: {option: value}


def named(option: str, names: Mapping[str, str]) -> Rule:
    """Return a rule that translates names."""

    def rule(values: ForeignValues, value: Any) -> Made:
        known = names.get(str(value).lower())
        return f"{option} is one of {', '.join(dict.fromkeys(names.values()))}" if known is None else {option: known}

    return rule


def positive(option: str) -> Rule:
    """Return a rule that copies whole numbers above 0; -1 and shares of a run mean something else."""
    return lambda values, value: {option: value} if type(value) is int and value > 0 else f"set {option}"


def switched(option: str, setting: Any = True) -> Rule:
    """Return a rule that sets an option if a switch is on."""
    return lambda values, value: {option: setting} if is_on(value) else f"it is off; {option} is, too"


def typed(name: str) -> Rule:
    """Return the rule of a switch that selects a type."""
    return lambda values, value: {"model.dtype": DTYPES[name]} if is_on(value) else "set model.dtype"


def dtype(values: ForeignValues, value: Any) -> Made:
    return named("model.dtype", DTYPES)(values, str(value).removeprefix("torch."))


def engine_argument(name: str) -> Rule:
    return lambda values, value: {f"rollout.engine_args.{name}": value} if values.samples else "nothing is sampled"


def top_k(values: ForeignValues, value: Any) -> Made:
    return {"rollout.sampling.top_k": max(value, 0)} if isinstance(value, int) else "all tokens are the default"


def warmup_ratio(values: ForeignValues, value: Any) -> Made:
    if values.num_steps is None or not isinstance(value, int | float):
        return WARMUP
    return {"learner.schedule.warmup_steps": round(value * values.num_steps)}


def betas(values: ForeignValues, value: Any) -> Made:
    pair = value if isinstance(value, list | tuple) else (values.get("adam_beta1"), values.get("adam_beta2"))
    return {"learner.optimizer.betas": [given or default for given, default in zip(pair, (0.9, 0.999), strict=True)]}


def attention(values: ForeignValues, value: Any) -> Made:
    name = "flash_attention_2" if is_on(value) else str(value)
    return {"model.attention": name} if name in ATTENTION else f"model.attention is one of {', '.join(ATTENTION)}"


def tracker(values: ForeignValues, value: Any) -> Made:
    if is_on(value) or "wandb" in str(value):
        return {"tracking.wandb": True}
    return "metrics go to files, TensorBoard and Ray's dashboard"


def target_modules(values: ForeignValues, value: Any) -> Made:
    if value in (True, "all", ["all"], ["all-linear"]):
        value = "all-linear"
    elif isinstance(value, str) and "," in value:
        value = [name.strip() for name in value.split(",")]
    return {"model.adapter.target_modules": value} if value else "set model.adapter.target_modules"


def quantized(values: ForeignValues, value: Any) -> Made:
    return Chooses("model") if values.model == "qlora" else QUANTIZED if is_on(value) else "it is off"


def adapter(values: ForeignValues, value: Any) -> Made:
    return Chooses("model")


def rank(values: ForeignValues, value: Any) -> Made:
    return adapter(values, value) if values.model == "full" else {"model.adapter.r": value}


def with_adapter(option: str) -> Rule:
    """Return a rule that copies a setting of the adapter if there is one."""
    return lambda values, value: {option: value} if values.model != "full" else "there is no adapter"


def data(values: ForeignValues, value: Any) -> Made:
    return Chooses("data")


def kl_weight(values: ForeignValues, value: Any) -> Made:
    if not values.samples:
        return {"algorithm.preference.beta": value}
    if values.run.system in ("verl", "openrlhf") and not is_on(values.get("use_kl_loss")):
        return "its KL is not in the loss (use_kl_loss is off); algorithm.loss.beta would add one"
    return {"algorithm.loss.beta": value}


def loss_type(values: ForeignValues, value: Any) -> Made:
    name = str(value[0] if isinstance(value, list) and len(value) == 1 else value)
    if values.samples:
        return dict(TRL_LOSSES.get(name, {})) or f"there is no loss {name}; see algorithm.loss.name"
    if name in ("nll", "chunked_nll"):
        return "it is the loss of supervised fine-tuning"
    return named("algorithm.preference.loss", PREFERENCE_LOSSES)(values, name)


def policy_loss(values: ForeignValues, value: Any) -> Made:
    if value == "gspo":
        return {"algorithm.loss.level": "sequence"}
    return named("algorithm.loss.name", POLICY_LOSSES)(values, value)


def advantage(values: ForeignValues, value: Any) -> Made:
    if value == "gdpo":
        return {"algorithm.combine": "normalize_then_sum"}
    if value == "dr_grpo":
        return {"algorithm.advantage.scale": "none", "algorithm.loss.aggregate": "constant"}
    return NO_CRITIC if value == "gae" else named("algorithm.advantage.name", ADVANTAGES)(values, value)


def advantage_scale(values: ForeignValues, value: Any) -> Made:
    text = str(value).lower()
    return {"algorithm.advantage.scale": {"true": "group", "false": "none"}.get(text, text)}


def clip_bounds(values: ForeignValues, value: Any) -> Made:
    """Translate one bound for both sides, unless the upper one is set by itself."""
    if isinstance(value, list | tuple):
        return {"algorithm.loss.clip_low": value[0], "algorithm.loss.clip_high": value[-1]}
    is_alone = values.get("epsilon_high", "clip_ratio_high") is None
    return {"algorithm.loss.clip_low": value} | ({"algorithm.loss.clip_high": value} if is_alone else {})


def batch(values: ForeignValues, value: Any) -> Made:
    return dict(values.batch) or "set algorithm.groups_per_step"


def of_engines(rule: Rule) -> Rule:
    """Return a rule for runs that sample; the others have no engines."""
    return lambda values, value: rule(values, value) if values.samples else "nothing is sampled"


def engine(values: ForeignValues, value: Any) -> Made:
    is_vllm = value == "vllm" or is_on(value)
    return {"rollout.engine": "vllm"} if is_vllm else "rollout.engine is vllm if it can be imported, else hf"


def refill(values: ForeignValues, value: Any) -> Made:
    return {"replay.refill_attempts": 10} if is_on(value) else "it is off; replay.refill_attempts is 0"


def held_out_file(values: ForeignValues, value: Any) -> Made:
    path = value[0] if isinstance(value, list) and len(value) == 1 else value
    return {"data.held_out.path": path} if isinstance(path, str) else "set data.held_out.path, one file"


def tensor_parallel(values: ForeignValues, value: Any) -> Made:
    return {"rollout.tensor_parallel_size": value, "rollout.num_gpus": value}


def passes(values: ForeignValues, value: Any) -> Made:
    return {"algorithm.num_epochs_per_step": value} if values.samples else STEPS


def wired(values: ForeignValues, value: Any) -> Made:
    return "it is read where the script makes it"


def held_out(values: ForeignValues, value: Any) -> Made:
    return {"data.held_out.size": value} if type(value) is int else "set data.held_out.size, a number of rows"


def sampling(name: str) -> Rule:
    return of_engines(copied(f"rollout.sampling.{name}"))


def max_tokens(values: ForeignValues, value: Any) -> Made:
    return {"rollout.sampling.max_tokens": value}


WIRED = ("args", "train_dataset", "eval_dataset", "peft_config", "processing_class", "tokenizer", "quantization_config")
"""Arguments by which a script passes on what it has made elsewhere."""
RULES: Mapping[str, Rule] = {
    **{name: sampling(name) for name in ("temperature", "top_p", "min_p", "repetition_penalty")},
    "top_k": of_engines(top_k),
    "max_completion_length": of_engines(max_tokens),
    "max_response_length": of_engines(max_tokens),
    "generate_max_len": of_engines(max_tokens),
    "max_new_tokens": of_engines(max_tokens),
    # optimizer and length
    "seed": copied("seed"),
    "weight_decay": copied("learner.optimizer.weight_decay"),
    "l2": copied("learner.optimizer.weight_decay"),
    "clip_grad": copied("learner.max_grad_norm"),
    "max_grad_norm": copied("learner.max_grad_norm"),
    "adam_beta1": betas,
    "adam_beta2": betas,
    "adam_betas": betas,
    "optim": named("learner.optimizer.name", OPTIMIZERS),
    "optimizer": named("learner.optimizer.name", OPTIMIZERS),
    "lr_scheduler": named("learner.schedule.name", SCHEDULES),
    "lr_scheduler_type": named("learner.schedule.name", SCHEDULES),
    "warmup_steps": positive("learner.schedule.warmup_steps"),
    "lr_warmup_steps": positive("learner.schedule.warmup_steps"),
    **dict.fromkeys(("warmup_ratio", "lr_warmup_ratio", "lr_warmup_steps_ratio"), warmup_ratio),
    "max_steps": positive("algorithm.num_steps"),
    "total_training_steps": positive("algorithm.num_steps"),
    # the batch of a step
    **dict.fromkeys(BATCH_NAMES, batch),
    # losses
    "beta": kl_weight,
    "rl_beta": kl_weight,
    "dpo_beta": kl_weight,
    "kl_loss_coef": kl_weight,
    "init_kl_coef": kl_weight,
    "kl_loss_type": named("algorithm.loss.kl", KL_ESTIMATORS),
    "kl_estimator": named("algorithm.loss.kl", KL_ESTIMATORS),
    "use_kl_estimator_k3": switched("algorithm.loss.kl", "k3"),
    "loss_type": loss_type,
    "dpo_loss_type": loss_type,
    "loss_mode": policy_loss,
    "policy_loss_type": policy_loss,
    "loss_agg_mode": named("algorithm.loss.aggregate", AGGREGATES),
    "importance_sampling_level": copied("algorithm.loss.level"),
    "adv_estimator": advantage,
    "advantage_estimator": advantage,
    "scale_rewards": advantage_scale,
    "norm_adv_by_std_in_grpo": advantage_scale,
    **dict.fromkeys(("epsilon", "clip_ratio", "eps_clip", "eps_clip_low_high"), clip_bounds),
    "dynamic_filtering": refill,
    "filter_groups.enable": refill,
    "label_smoothing": copied("algorithm.preference.label_smoothing"),
    **{name: copied(f"algorithm.preference.{name}") for name in ("desirable_weight", "undesirable_weight")},
    "ipo": switched("algorithm.preference.loss", "ipo"),
    # the model
    **dict.fromkeys(("torch_dtype", "dtype", "param_dtype"), dtype),
    "bf16": typed("bf16"),
    "fp16": typed("fp16"),
    "attn_implementation": attention,
    "flash_attention": attention,
    "flash_attn": attention,
    "trust_remote_code": switched("model.trust_remote_code"),
    "gradient_checkpointing": switched("model.gradient_checkpointing"),
    "enable_gradient_checkpointing": switched("model.gradient_checkpointing"),
    **dict.fromkeys(("lora_r", "lora_rank", "r"), rank),
    "lora_alpha": with_adapter("model.adapter.alpha"),
    "lora_dropout": with_adapter("model.adapter.dropout"),
    **dict.fromkeys(("target_modules", "lora_target_modules", "lora_target_linear"), target_modules),
    "use_dora": switched("model.adapter.use_dora"),
    "use_rslora": switched("model.adapter.use_rslora"),
    "modules_to_save": with_adapter("model.adapter.modules_to_save"),
    "lora_modules_to_save": with_adapter("model.adapter.modules_to_save"),
    "lora_model_dir": with_adapter("model.adapter.path"),
    **dict.fromkeys(WIRED, wired),
    **dict.fromkeys(("adapter", "use_peft", "task_type"), adapter),
    **dict.fromkeys(("load_in_4bit", "load_in_8bit"), quantized),
    "model": copied("model.path"),
    "pretrained": copied("model.path"),
    # data
    **dict.fromkeys(
        (
            *("datasets", "train_files", "prompt_data", "dataset_name", "dataset", "dataset_config"),
            *("dataset_config_name", "dataset_train_split", "split"),
        ),
        data,
    ),
    "val_set_size": held_out,
    "val_files": held_out_file,
    "max_epochs": passes,
    "dataset_test_split": copied("data.held_out.split"),
    **{name: copied(f"data.{name}") for name in ("roles_to_train", "train_on_eos", "train_on_inputs")},
    "chosen_key": copied("data.chosen_column"),
    "rejected_key": copied("data.rejected_column"),
    "label_key": copied("data.label_column"),
    # engines, files
    "rollout.name": engine,
    "use_vllm": engine,
    "vllm_num_engines": of_engines(copied("rollout.num_engines")),
    "rollout.tensor_model_parallel_size": of_engines(tensor_parallel),
    "vllm_tensor_parallel_size": of_engines(tensor_parallel),
    "vllm_gpu_memory_utilization": engine_argument("gpu_memory_utilization"),
    **{
        name: engine_argument(name)
        for name in ("gpu_memory_utilization", "enforce_eager", "max_num_batched_tokens", "max_num_seqs")
    },
    **dict.fromkeys(("save_steps", "save_freq"), positive("checkpoint.every_steps")),
    "save_total_limit": positive("checkpoint.keep"),
    **dict.fromkeys(("eval_steps", "test_freq"), positive("data.held_out.every_steps")),
    **dict.fromkeys(("report_to", "logger", "use_wandb"), tracker),
    "wandb_project": copied("tracking.wandb_project"),
    "wandb_name": copied("name"),
}
"""Rules by the ends of dotted names, for settings whose values or meanings differ from those of options here."""
OFF_TOPIC = {
    "eot_tokens": "end markers are found in the chat template; data.role_boundaries sets them",
    "val_kwargs": "evaluations take the likeliest tokens, with one answer to a prompt",
    "critic": NO_CRITIC,
    "ref": "the reference is the base without its adapter, or a frozen copy, in the learner's own processes",
    "megatron": "there is no Megatron here: learner=fsdp2_gpu and learner=zero3_gpu shard the policy",
    "reward_kwargs": "write a reward function: scoring.rewards.<name>.path",
    "special_tokens": "the tokenizer's own special tokens are used",
}
"""Reasons, by parts of dotted names, why nothing below them has an equivalent."""

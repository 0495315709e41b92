"""Rules for the settings of OpenRLHF by their older names."""

from __future__ import annotations

from typing import Any

from rlpipe.configs.foreign_losses import (
    CONSTANT_KL,
    MEAN_IN_IPO,
    in_reward_of_openrlhf,
    of_gae,
    of_openrlhf_correction,
    openrlhf_advantage,
    openrlhf_bounds,
    openrlhf_correction,
    openrlhf_kl,
    openrlhf_kl_switch,
    openrlhf_loss,
)
from rlpipe.configs.foreign_names import (
    ACCUMULATION,
    COLOCATED,
    CRITIC,
    GPUS,
    LENGTH,
    OFFLOAD,
    REWARD_SERVER,
    STEPS,
    STRATEGY,
)
from rlpipe.configs.foreign_rules import (
    OFF,
    OVERLONG_REWARD,
    Made,
    Table,
    attention,
    batch,
    betas,
    counted,
    data,
    dtype,
    engine_argument,
    group_size,
    held_out_file,
    kl_estimator,
    minibatches,
    of_engines,
    positive,
    quantized,
    rank,
    schedule,
    switched,
    target_modules,
    tensor_parallel,
    text,
    typed,
    warmup_ratio,
    with_adapter,
)
from rlpipe.configs.foreign_values import ForeignValues, is_on

CHECKPOINTS = "checkpoints are in the output folder"
PACKED = "rows are always packed, up to learner.max_tokens_per_microbatch"
NORMALIZED = "rewards are as the functions return them; advantages are normalized within groups"
LAST_TURN = "the last turn alone is trained there; data.messages_column trains each of the assistant's turns"
TEMPLATE = "a data.transform may add the text around a prompt"
STEP_MODEL = (
    "steps are scored by a head here, and rows have lists of steps and labels: a data.transform makes them, and "
    "algorithm.process_reward_model.step_token is the text after each step"
)
ASYNCHRONOUS = "write replay=async, and set replay.max_staleness"
AGENT = "see environment.agent and environment.path"
SUBSET = "a number of rows of the data set: a data.split such as train[:1000] selects them"


def train_batch(values: ForeignValues, value: Any) -> Made:
    """Translate a number of rows, or of completions for runs that sample them."""
    return minibatches(values, value) if values.samples else batch(values, value)


def input_column(values: ForeignValues, value: Any) -> Made:
    """Translate the column of prompts, which holds whole conversations if there is no column of answers."""
    if values.run.method == "sft" and values.get("output_key") is None:
        return {"data.messages_column": value} if is_on(values.get("multiturn")) else LAST_TURN
    return {"data.prompt_column": value}


def label_column(values: ForeignValues, value: Any) -> Made:
    if values.run.method == "kto":
        return {"data.label_column": value}
    return "all columns go to the rewards by their names" if values.samples else STEP_MODEL


def remote_reward(values: ForeignValues, value: Any) -> Made:
    if str(value).startswith("http"):
        return REWARD_SERVER
    return "set scoring.rewards.<name>.path to a function that takes completions and the columns of the rows by name"


def filtering(values: ForeignValues, value: Any) -> Made:
    return {"replay.refill_attempts": 1_000_000} if is_on(value) else OFF


def total_length(values: ForeignValues, value: Any) -> Made:
    """Translate the length of a row; with completions, what they leave of it is for the prompt."""
    longest = values.number("generate_max_len")
    if not values.samples:
        return LENGTH
    is_known = type(value) is int and longest is not None and value > longest
    prompt = {"data.max_prompt_tokens": value - longest} if is_known else {}
    return {"rollout.max_model_len": value, **prompt}


def tokens(values: ForeignValues, value: Any) -> Made:
    return {"learner.max_tokens_per_microbatch": value} if is_on(values.get("use_dynamic_batch")) else PACKED


def passes(values: ForeignValues, value: Any) -> Made:
    return {"algorithm.num_epochs_per_step": value} if values.samples else STEPS


def weights_and_biases(values: ForeignValues, value: Any) -> Made:
    return OFF if str(value).lower() in ("false", "none") else {"tracking.wandb": True}


def templated(values: ForeignValues, value: Any) -> Made:
    return {"data.chat": is_on(value)}


OPENRLHF: Table = {
    # the algorithm
    "advantage_estimator": openrlhf_advantage,
    "policy_loss_type": openrlhf_loss,
    **dict.fromkeys(("eps_clip", "eps_clip_low_high"), openrlhf_bounds),
    "dual_clip": of_engines("algorithm.loss.clip_delta"),
    "init_kl_coef": openrlhf_kl,
    "use_kl_loss": openrlhf_kl_switch,
    "kl_estimator": lambda values, value: (
        kl_estimator if is_on(values.get("use_kl_loss")) else in_reward_of_openrlhf("algorithm.reward_kl.kl")
    )(values, value),
    "use_kl_estimator_k3": switched("algorithm.loss.kl", "k3"),
    "kl_target": in_reward_of_openrlhf("algorithm.reward_kl.target"),
    "kl_horizon": lambda values, value: (
        CONSTANT_KL
        if values.get("kl_target") is None
        else in_reward_of_openrlhf("algorithm.reward_kl.horizon")(values, value)
    ),
    "entropy_loss_coef": "algorithm.loss.entropy_coef",
    **dict.fromkeys(("enable_vllm_is_correction", "vllm_enable_is_correction"), openrlhf_correction),
    **dict.fromkeys(("vllm_is_truncated_threshold", "vllm_is_correction_type", "use_icepop"), of_openrlhf_correction),
    "dynamic_filtering": filtering,
    "dynamic_filtering_reward_range": "groups whose rewards are all equal are replaced",
    "gamma": of_gae("algorithm.advantage.gamma", "advantage_estimator"),
    "lambd": of_gae("algorithm.advantage.lam", "advantage_estimator"),
    "value_clip": of_gae("algorithm.critic.value_clip", "advantage_estimator"),
    **dict.fromkeys(("save_value_network", "freezing_actor_steps"), CRITIC),
    "normalize_reward": lambda values, value: NORMALIZED if is_on(value) else OFF,
    "no_advantage_std_norm": lambda values, value: "see algorithm.advantage.name" if is_on(value) else OFF,
    **dict.fromkeys(("overlong_buffer_len", "overlong_penalty_factor"), OVERLONG_REWARD),
    "beta": "algorithm.preference.beta",
    "ipo": lambda values, value: MEAN_IN_IPO if is_on(value) else OFF,
    "label_smoothing": "algorithm.preference.label_smoothing",
    "nll_loss_coef": "algorithm.preference.cross_entropy_coef",
    "desirable_loss_weight": "algorithm.preference.desirable_weight",
    "undesirable_loss_weight": "algorithm.preference.undesirable_weight",
    "loss": lambda values, value: (
        "it is the loss here" if value in ("sigmoid", "logexp") else f"there is no loss {value}"
    ),
    "aux_loss_coef": lambda values, value: "there is no loss of a router here" if value else OFF,
    # the batch of a step
    "train_batch_size": train_batch,
    "rollout_batch_size": of_engines(batch),
    "n_samples_per_prompt": group_size,
    **dict.fromkeys(("micro_train_batch_size", "micro_rollout_batch_size"), ACCUMULATION),
    "vllm_generate_batch_size": ACCUMULATION,
    "train_max_tokens_per_gpu": tokens,
    **dict.fromkeys(("rollout_max_tokens_per_gpu", "use_dynamic_batch"), PACKED),
    "packing_samples": PACKED,
    "max_epochs": passes,
    "num_episodes": STEPS,
    "max_samples": SUBSET,
    # optimizer
    **dict.fromkeys(("learning_rate", "actor_learning_rate"), "learner.optimizer.lr"),
    "lr_warmup_ratio": warmup_ratio,
    "lr_scheduler": schedule,
    "min_lr_ratio": "learner.schedule.min_ratio",
    "adam_betas": betas,
    "l2": "learner.optimizer.weight_decay",
    "max_norm": "learner.max_grad_norm",
    "seed": "seed",
    # model
    "pretrain": "model.path",
    "ref_pretrain": "the reference is the model that training starts from",
    **dict.fromkeys(("reward_pretrain",), "see experiment=reward_model for a reward model of transformers"),
    "param_dtype": dtype,
    "bf16": typed("bf16"),
    "attn_implementation": attention,
    "flash_attn": lambda values, value: attention(values, "flash_attention_2") if is_on(value) else OFF,
    "gradient_checkpointing": switched("model.gradient_checkpointing"),
    "gradient_checkpointing_use_reentrant": switched("model.reentrant_checkpointing"),
    "lora_rank": rank,
    "lora_alpha": with_adapter("model.adapter.alpha"),
    "lora_dropout": with_adapter("model.adapter.dropout"),
    "target_modules": target_modules,
    "load_in_4bit": quantized,
    # data
    **dict.fromkeys(("dataset", "prompt_data", "dataset_probs", "prompt_data_probs"), data),
    **dict.fromkeys(("prompt_split", "train_split", "dataset_split"), data),
    "eval_dataset": held_out_file,
    "prompt_key": "data.prompt_column",
    "input_key": input_column,
    "output_key": "data.completion_column",
    "label_key": label_column,
    "chosen_key": "data.chosen_column",
    "rejected_key": "data.rejected_column",
    "apply_chat_template": templated,
    "multiturn": lambda values, value: "each of the assistant's turns is trained" if is_on(value) else OFF,
    "input_template": TEMPLATE,
    "tokenizer_chat_template": "it is a template's text; model.chat_template names a Jinja file",
    "prompt_max_len": of_engines("data.max_prompt_tokens"),
    "max_len": total_length,
    **dict.fromkeys(("placeholder_token", "reward_tokens", "specialize_reward_tokens"), STEP_MODEL),
    "margin_loss": "algorithm.reward_model.margin_column names the column",
    "compute_fp32_loss": lambda values, value: "losses are computed in float32" if is_on(value) else OFF,
    # engines
    "generate_max_len": of_engines("rollout.sampling.max_tokens"),
    **{name: of_engines(f"rollout.sampling.{name}") for name in ("temperature", "top_p")},
    "vllm_num_engines": of_engines("rollout.num_engines"),
    "vllm_tensor_parallel_size": of_engines(tensor_parallel),
    "vllm_gpu_memory_utilization": engine_argument("gpu_memory_utilization"),
    **{name: engine_argument(name) for name in ("enforce_eager", "enable_prefix_caching")},
    **dict.fromkeys(("vllm_sync_backend", "vllm_sync_with_ray"), "see weights.transport"),
    **dict.fromkeys(("vllm_enable_sleep", "deepspeed_enable_sleep", "fsdp2_enable_sleep"), COLOCATED),
    **dict.fromkeys(("colocate_all_models", "colocate_actor_ref", "colocate_critic_reward"), COLOCATED),
    **dict.fromkeys(("async_train", "async_queue_size", "partial_rollout"), ASYNCHRONOUS),
    "agent_func_path": AGENT,
    "remote_rm_url": remote_reward,
    **{f"{name}_num_nodes": GPUS for name in ("actor", "ref", "reward")},
    **{f"{name}_num_gpus_per_node": GPUS for name in ("actor", "ref", "reward")},
    **dict.fromkeys(
        ("zero_stage", "zpg", "overlap_comm", "deepcompile", "ring_attn_size", "ring_head_stride"), STRATEGY
    ),
    **dict.fromkeys(("ds_tensor_parallel_size", "grad_accum_dtype"), STRATEGY),
    **dict.fromkeys(("adam_offload", "ref_offload", "ref_reward_offload", "ref.offload"), OFFLOAD),
    # files
    "save_path": text("output"),
    "ckpt_path": CHECKPOINTS,
    "save_steps": counted("checkpoint.every_steps", is_never=True),
    "eval_steps": counted("data.held_out.every_steps", is_never=True),
    "logging_steps": "every step is logged",
    "max_ckpt_num": positive("checkpoint.keep"),
    "load_checkpoint": switched("resume", "auto"),
    **dict.fromkeys(
        ("save_hf_ckpt", "disable_ds_ckpt", "save_hf_model"), "rlpipe export writes a checkpoint for transformers"
    ),
    **dict.fromkeys(
        ("eval_temperature", "eval_n_samples_per_prompt"), "held-out prompts have one answer of the likeliest tokens"
    ),
    "use_wandb": weights_and_biases,
    "wandb_project": text("tracking.wandb_project"),
    "wandb_run_name": text("name"),
    "use_tensorboard": "tracking.tensorboard is on, in the output folder",
}
OPENRLHF_BELOW = {
    "critic": CRITIC,
    "critic_learning_rate": CRITIC,
    "critic_pretrain": CRITIC,
    "critic_num_nodes": CRITIC,
    "critic_num_gpus_per_node": CRITIC,
    "ref": GPUS,
    "vllm": "see rollout.engine_args",
    "ds": STRATEGY,
    "fsdp": STRATEGY,
    "eval": "held-out prompts have one answer of the likeliest tokens",
    "reward": "see scoring.rewards",
}
"""Reasons for all settings below a name."""

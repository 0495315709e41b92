"""Rules for the settings of TRL and axolotl, whose trainers are those of transformers, by name."""

from __future__ import annotations

from typing import Any

from rlpipe.configs.foreign_losses import (
    of_correction,
    trl_beta,
    trl_bounds,
    trl_combine,
    trl_correction,
    trl_loss,
    trl_scale,
    trl_upper_bound,
)
from rlpipe.configs.foreign_names import COLOCATED, LENGTH, STRATEGY
from rlpipe.configs.foreign_python import WIRED
from rlpipe.configs.foreign_rules import (
    OFF,
    OPTIMIZERS,
    Made,
    Table,
    adapter_switch,
    attention,
    batch,
    betas,
    counted,
    data,
    dtype,
    engine,
    engine_argument,
    epochs,
    for_method,
    group_size,
    in_8_bit,
    minibatches,
    named,
    of_engines,
    part,
    positive,
    quantized,
    rank,
    reward_functions,
    reward_weights,
    schedule,
    switched,
    target_modules,
    tensor_parallel,
    text,
    top_k,
    tracker,
    typed,
    warmup_ratio,
    warmup_steps,
    with_adapter,
)
from rlpipe.configs.foreign_values import ForeignValues, is_on

CHECKPOINTS = "its checkpoints can't be read here; model.path or model.adapter.path starts from weights"
UPLOAD = "nothing is uploaded: rlpipe export writes a folder for transformers, PEFT and vLLM"
EPOCHS = "epochs are not counted: set the number of steps"
PACKING = "rows are packed up to learner.max_tokens_per_microbatch"
COLUMNS = "columns that rendering does not read go to the rewards"
PASSED_ON = "it is read where the script makes it"
MICRO = "what is computed at one time is bounded by learner.max_tokens_per_microbatch"
WHOLE = (
    "a conversation is trained in full there, and here the assistant's turns are; data.loss_mask=all trains all of it. "
    "With prompt and completion, both train the completion"
)
TEMPLATE = "model.chat_template names a Jinja file; the tokenizer's own template is the default"
TURNS = "see environment.tools and environment.max_turns"


def reference_steps(values: ForeignValues, value: Any) -> Made:
    """Translate the updates of the reference, which a switch of their own turns on."""
    if not is_on(values.get("sync_ref_model")):
        return OFF
    if values.model != "full":
        return "the reference of an adapter is its base, which does not change"
    every = values.number("ref_model_sync_steps") or 512
    mixup = values.get("ref_model_mixup_alpha")
    steps = {"algorithm.reference.sync_steps": -(-every // values.updates_per_step)}
    return steps | {"algorithm.reference.mixup": 0.6 if mixup is None else mixup}


def margin(values: ForeignValues, value: Any) -> Made:
    return {"algorithm.preference.margin": value} if values.algorithm == "simpo" else "it is of SimPO"


def evaluation(values: ForeignValues, value: Any) -> Made:
    """Translate when it is evaluated, which TRL's commands do on another split."""
    if str(value).lower() in ("no", "false", "none"):
        return OFF
    split = values.get("dataset_test_split")
    return {"data.held_out.split": "test" if split is None else split} if values.run.system == "trl" else EPOCHS


def saving(values: ForeignValues, value: Any) -> Made:
    if str(value).lower() in ("no", "false"):
        return {"checkpoint.every_steps": 0}
    return "checkpoint.every_steps says when" if value == "steps" else EPOCHS


def answers_only(values: ForeignValues, value: Any) -> Made:
    if is_on(value):
        return {"data.loss_mask": "roles"}
    return WHOLE


def text_column(values: ForeignValues, value: Any) -> Made:
    if values.run.method != "sft":
        return "rows have prompts"
    return "set data.text_column if the rows are raw text" if value == "text" else {"data.text_column": value}


def chat_template(values: ForeignValues, value: Any) -> Made:
    is_file = isinstance(value, str) and value.endswith((".jinja", ".jinja2", ".j2"))
    return {"model.chat_template": value} if is_file else TEMPLATE


def output(values: ForeignValues, value: Any) -> Made:
    return {"output": str(value)}


OPTIMIZATION: Table = {
    "learning_rate": "learner.optimizer.lr",
    "weight_decay": "learner.optimizer.weight_decay",
    "adam_beta1": betas,
    "adam_beta2": betas,
    "adam_epsilon": "learner.optimizer.eps",
    "max_grad_norm": "learner.max_grad_norm",
    **dict.fromkeys(("optim", "optimizer"), named("learner.optimizer.name", OPTIMIZERS)),
    **dict.fromkeys(("lr_scheduler", "lr_scheduler_type"), schedule),
    "lr_scheduler_kwargs.min_lr_rate": "learner.schedule.min_ratio",
    "cosine_min_lr_ratio": "learner.schedule.min_ratio",
    "warmup_steps": warmup_steps,
    "warmup_ratio": warmup_ratio,
    "max_steps": counted("algorithm.num_steps"),
    **dict.fromkeys(("num_train_epochs", "num_epochs"), epochs),
    **dict.fromkeys(("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps"), batch),
    **dict.fromkeys(("per_device_eval_batch_size", "eval_batch_size", "eval_accumulation_steps"), MICRO),
    "seed": "seed",
    "gradient_checkpointing": switched("model.gradient_checkpointing"),
    "gradient_checkpointing_kwargs.use_reentrant": "model.reentrant_checkpointing",
    **{
        name: typed(kind)
        for name, kind in (("bf16", "bf16"), ("bfloat16", "bf16"), ("fp16", "fp16"), ("float16", "fp16"))
    },
    "tf32": "torch's own default is kept",
    "attn_implementation": attention,
    "trust_remote_code": switched("model.trust_remote_code"),
    "output_dir": output,
    "save_steps": counted("checkpoint.every_steps", is_never=True),
    "save_total_limit": positive("checkpoint.keep"),
    "save_strategy": saving,
    "eval_steps": counted("data.held_out.every_steps", is_never=True),
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), evaluation),
    "logging_steps": "every step is logged",
    "resume_from_checkpoint": CHECKPOINTS,
    **dict.fromkeys(("push_to_hub", "hub_model_id", "hub_strategy", "hub_private_repo"), UPLOAD),
    "report_to": tracker,
    "run_name": text("name"),
    **dict.fromkeys(("remove_unused_columns", "no_remove_unused_columns"), COLUMNS),
    "deepspeed": STRATEGY,
    **dict.fromkeys(("fsdp", "fsdp_config", "fsdp_version"), STRATEGY),
    **dict.fromkeys(
        ("dataset_num_proc", "dataset_processes"), "rlpipe data prepare renders the rows once, with --workers"
    ),
}
"""Settings of transformers' trainer, and of what both systems add in the same way."""
ADAPTER: Table = {
    **dict.fromkeys(
        ("use_peft", "adapter", "LoraConfig", "BitsAndBytesConfig", "task_type", "lora_task_type"), part("model")
    ),
    "load_in_4bit": quantized,
    "load_in_8bit": in_8_bit,
    "bnb_4bit_quant_type": lambda values, value: (
        part("model")(values, value) if value == "nf4" else "a 4-bit base is in NF4"
    ),
    **dict.fromkeys(("lora_r", "r"), rank),
    "lora_alpha": with_adapter("model.adapter.alpha"),
    "lora_dropout": with_adapter("model.adapter.dropout"),
    **dict.fromkeys(("lora_target_modules", "target_modules"), target_modules),
    **dict.fromkeys(("lora_target_parameters", "target_parameters"), with_adapter("model.adapter.target_parameters")),
    **dict.fromkeys(("lora_modules_to_save", "modules_to_save"), with_adapter("model.adapter.modules_to_save")),
    **dict.fromkeys(("use_dora", "peft_use_dora"), adapter_switch("model.adapter.use_dora")),
    **dict.fromkeys(("use_rslora", "peft_use_rslora"), adapter_switch("model.adapter.use_rslora")),
    "lora_model_dir": with_adapter("model.adapter.path"),
    "bias": lambda values, value: OFF if value == "none" else "biases are not adapted",
}
SAMPLING: Table = {
    **{
        name: of_engines(f"rollout.sampling.{name}") for name in ("temperature", "top_p", "min_p", "repetition_penalty")
    },
    "top_k": of_engines(top_k),
    **dict.fromkeys(("max_completion_length", "max_new_tokens"), of_engines("rollout.sampling.max_tokens")),
    "max_prompt_length": of_engines("data.max_prompt_tokens"),
    "num_generations": group_size,
    **dict.fromkeys(("steps_per_generation", "generation_batch_size"), minibatches),
    "num_iterations": of_engines("algorithm.num_epochs_per_step"),
    "loss_type": trl_loss,
    "epsilon": trl_bounds,
    "epsilon_high": trl_upper_bound,
    "delta": of_engines("algorithm.loss.clip_delta"),
    "beta": trl_beta,
    "scale_rewards": trl_scale,
    "multi_objective_aggregation": trl_combine,
    "importance_sampling_level": "algorithm.loss.level",
    "mask_truncated_completions": switched("algorithm.loss.mask_truncated"),
    "top_entropy_quantile": "algorithm.loss.top_entropy_quantile",
    "entropy_coef": "algorithm.loss.entropy_coef",
    "sapo_temperature_pos": "algorithm.loss.sapo.temperature_positive",
    "sapo_temperature_neg": "algorithm.loss.sapo.temperature_negative",
    **{
        f"vespo_{letter}_{short}": f"algorithm.loss.vespo.{letter}_{long}"
        for letter in ("k", "lambda")
        for short, long in (("pos", "positive"), ("neg", "negative"))
    },
    "vllm_importance_sampling_mode": trl_correction,
    **{f"vllm_importance_sampling_{name}": of_correction for name in ("correction", "cap", "clip_max", "clip_min")},
    "off_policy_mask_threshold": "algorithm.correction.off_policy_threshold",
    "use_bias_correction_kl": switched("algorithm.correction.bias_corrected_kl"),
    **dict.fromkeys(("sync_ref_model", "ref_model_sync_steps", "ref_model_mixup_alpha"), reference_steps),
    "normalize_advantages": lambda values, value: "see algorithm.advantage.name" if is_on(value) else OFF,
    "use_vllm": engine,
    "vllm_mode": COLOCATED,
    "vllm_enable_sleep_mode": COLOCATED,
    "vllm_gpu_memory_utilization": engine_argument("gpu_memory_utilization"),
    **dict.fromkeys(("vllm_max_model_length", "vllm_max_model_len"), of_engines("rollout.max_model_len")),
    "vllm_tensor_parallel_size": of_engines(tensor_parallel),
    **dict.fromkeys(("vllm_structured_outputs_regex", "vllm_guided_decoding_regex"), "rollout.sampling.guided_regex"),
    "reward_funcs": reward_functions,
    "reward_weights": reward_weights,
    **dict.fromkeys(
        ("reward_model_name_or_path", "reward_model_path"), "see experiment=reward_model for a reward model"
    ),
    **dict.fromkeys(("tools", "environment_factory", "rollout_func", "max_tool_calling_iterations"), TURNS),
    **dict.fromkeys(("log_completions", "num_completions_to_print"), "tracking.log_completions is a number of groups"),
    "shuffle_dataset": "data.shuffle",
}
"""Settings of TRL's trainers that sample; axolotl has them under ``trl``."""
PREFERENCES: Table = {
    "label_smoothing": "algorithm.preference.label_smoothing",
    **dict.fromkeys(("desirable_weight", "kto_desirable_weight"), "algorithm.preference.desirable_weight"),
    **dict.fromkeys(("undesirable_weight", "kto_undesirable_weight"), "algorithm.preference.undesirable_weight"),
    "precompute_ref_log_probs": switched("algorithm.preference.precompute_ref_log_probs"),
    "simpo_gamma": margin,
    **dict.fromkeys(("cpo_alpha", "rpo_alpha"), "algorithm.preference.cross_entropy_coef"),
    "center_rewards_coefficient": for_method("reward_model", rule="algorithm.reward_model.center_coef", others=OFF),
    "step_separator": for_method("process_reward_model", rule="algorithm.process_reward_model.separator", others=OFF),
}
TRL: Table = {
    **OPTIMIZATION,
    **ADAPTER,
    **SAMPLING,
    **PREFERENCES,
    **dict.fromkeys(("model_name_or_path", "model", "pretrained"), "model.path"),
    "model_revision": "model.revision",
    "revision": "model.revision",
    **dict.fromkeys(("torch_dtype", "dtype", "model_init_kwargs.dtype", "model_init_kwargs.torch_dtype"), dtype),
    "model_init_kwargs.attn_implementation": attention,
    "dtype": dtype,
    **dict.fromkeys(
        (
            "dataset",
            "dataset_name",
            "dataset_config",
            "dataset_config_name",
            "name",
            "data_files",
            "dataset_train_split",
            "split",
        ),
        data,
    ),
    "dataset_test_split": lambda values, value: evaluation(values, values.get("eval_strategy") or "no"),
    **dict.fromkeys(("streaming", "dataset_streaming"), switched("data.streaming")),
    "dataset_text_field": text_column,
    "assistant_only_loss": answers_only,
    "completion_only_loss": answers_only,
    **dict.fromkeys(("packing", "packing_strategy", "padding_free", "eval_packing"), PACKING),
    **dict.fromkeys(("max_length", "max_seq_length"), LENGTH),
    "chat_template_path": chat_template,
    **dict.fromkeys(("eos_token", "pad_token"), "the tokenizer's own special tokens are used"),
    "config": "its settings are not read: import that file, too",
    **dict.fromkeys(WIRED, PASSED_ON),
}
TRL_BELOW = {
    "chat_template_kwargs": "data.chat_template_kwargs",
    "generation_kwargs": "see rollout.sampling, and rollout.sampling.extra for other arguments of the engine",
    "quantization_config": PASSED_ON,
}
"""Options, or reasons, for all settings below a name."""

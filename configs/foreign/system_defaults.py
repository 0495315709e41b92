"""Defaults of other systems that matter to training and differ from those of rlpipe."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

NO_LIMIT = "no limit"
TRL_ROWS = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "lr_scheduler_type": "linear"}
LENGTHS = {"max_prompt_length": NO_LIMIT, "max_completion_length": 512}
TRL_TRAINING = {"gradient_checkpointing": True, "learning_rate": 1e-6, **TRL_ROWS}
TRL_SAMPLING = {**LENGTHS, **TRL_TRAINING}
PREFERENCES = {**TRL_TRAINING, "max_length": 1024}
GRPO = {"num_generations": 8, "loss_type": "dapo"}
PEFT_DEFAULT = "those of PEFT"
AXOLOTL_DEFAULT = "0.03, at most 100 steps"
COMMAND_LORA = {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": PEFT_DEFAULT}
PEFT_LORA = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": PEFT_DEFAULT}
LORA_OF_UNSLOTH = {
    **dict.fromkeys(("r", "lora_alpha"), 16),
    "lora_dropout": 0.0,
    "load_in_4bit": True,
    "use_gradient_checkpointing": "unsloth",
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
TRANSFORMERS_DEFAULTS = {"learning_rate": 5e-5, "gradient_checkpointing": False}
"""Defaults of ``TrainingArguments``, which replace those of TRL's own configs."""
AXOLOTL = {
    "micro_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "lr_scheduler": "cosine",
    "warmup_ratio": AXOLOTL_DEFAULT,
}
OPENRLHF = {
    "train_batch_size": 128,
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": 0.03,
    "adam_betas": [0.9, 0.95],
    "apply_chat_template": False,
}
DEFAULTS: Mapping[tuple[str, str], Mapping[str, Any]] = {
    ("trl", "rl"): {**TRL_SAMPLING, **GRPO, "use_bias_correction_kl": True},
    ("trl", "rloo"): {**TRL_SAMPLING, "num_generations": 2, "beta": 0.05},
    ("trl", "online_dpo"): {**TRL_ROWS, "learning_rate": 5e-7, "temperature": 0.9, "max_new_tokens": 64},
    ("trl", "sft"): {**PREFERENCES, "learning_rate": 2e-5, "assistant_only_loss": False},
    **{("trl", method): PREFERENCES for method in ("dpo", "kto", "orpo")},
    ("trl", "cpo"): {**PREFERENCES, "beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 1.0},
    ("trl", "reward_model"): {**PREFERENCES, "learning_rate": 1e-4},
    ("trl", "process_reward_model"): {**TRL_TRAINING, "learning_rate": 1e-5},
    ("axolotl", "rl"): {**GRPO, **LENGTHS, "max_completion_length": 256},
    ("axolotl", "ebft"): {"num_generations": 8, "max_completion_length": 256},
    ("axolotl", "simpo"): {"rl_beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 1.0},
    ("axolotl", "process_reward_model"): {"step_separator": "\n"},
    ("axolotl", ""): AXOLOTL,
    ("verl", "rl"): {
        "algorithm.adv_estimator": "gae",
        "algorithm.rollout_correction.rollout_is": "none",
        "data.train_batch_size": 1024,
        "data.max_prompt_length": 512,
        "data.max_response_length": 512,
        "actor.ppo_mini_batch_size": 256,
        "actor.loss_agg_mode": "token-mean",
        "actor.clip_ratio_low": 0.2,
        "actor.clip_ratio_high": 0.2,
        "actor.clip_ratio_c": 3.0,
        "actor.policy_loss.ppo_kl_coef": 0.1,
        "actor.optim.lr": 1e-6,
        "actor.optim.weight_decay": 0.01,
        "model.enable_gradient_checkpointing": True,
        "rollout.n": 1,
    },
    ("verl", "sft"): {"data.train_batch_size": 256, "optim.weight_decay": 0.01, "optim.lr": 1e-3},
    ("openrlhf", "rl"): {
        **OPENRLHF,
        "advantage_estimator": "gae",
        "policy_loss_type": "ppo",
        "actor_learning_rate": 1e-6,
        "init_kl_coef": 0.01,
        "kl_estimator": "k1",
        "rollout_batch_size": 1024,
        "n_samples_per_prompt": 1,
        "prompt_max_len": 1024,
        "generate_max_len": 1024,
        "enable_vllm_is_correction": False,
        "input_key": "input",
    },
    ("openrlhf", "sft"): {**OPENRLHF, "learning_rate": 5e-6, "input_key": "input"},
    ("openrlhf", "dpo"): {**OPENRLHF, "learning_rate": 1e-5},
    ("openrlhf", "kto"): {**OPENRLHF, "learning_rate": 1e-5, "beta": 0.01},
    ("openrlhf", "process_reward_model"): {**OPENRLHF, "learning_rate": 1e-6},
    ("openrlhf", "reward_model"): {**OPENRLHF, "learning_rate": 9e-6, "margin_loss": False},
}
"""Defaults by system and method, or by system alone; those of TRL are of version 1."""
VERL_FSDP_SFT = {
    "optim.lr": 1e-5,
    "optim.betas": [0.9, 0.95],
    "optim.lr_scheduler": "cosine",
    "optim.lr_warmup_steps_ratio": 0.1,
}
"""Defaults of verl's older trainer of SFT, whose model is ``model.partial_pretrain``."""
ALPHA_OF_RANK = {"model.lora_rank": "model.lora_alpha", "lora_rank": "lora_alpha"}
"""Names of a scale, 16 by default, by those of the rank of adapters of verl and OpenRLHF."""
INSTEAD = {
    "num_generations": ("rollout.n",),
    "prompt_max_len": ("max_len",),
    "lr_warmup_ratio": ("lr_warmup_steps",),
    "optim.lr_warmup_steps_ratio": ("actor.optim.lr_warmup_steps", "actor.optim.warmup_steps_ratio"),
    "optim.lr_scheduler": tuple(
        f"actor.optim.{name}" for name in ("lr_scheduler_type", "warmup_style", "lr_decay_style")
    ),
    "warmup_ratio": ("warmup_steps",),
    "max_length": ("max_seq_length",),
    "kl_estimator": ("use_kl_estimator_k3",),
    "algorithm.rollout_correction.rollout_is": ("actor.tis_imp_ratio_cap", "algorithm.rollout_is"),
    "enable_vllm_is_correction": ("vllm_enable_is_correction",),
    "step_separator": tuple(f"datasets.{index}.step_separator" for index in range(10)),
    "per_device_train_batch_size": ("auto_find_batch_size",),
}
"""Settings with which a default has no effect."""


def default_values(system: str, method: str, given: Collection[str]) -> dict[str, Any]:
    """Return the defaults of a system, without those that the given settings replace."""
    defaults = {**DEFAULTS.get((system, ""), {}), **DEFAULTS.get((system, method), {})}
    if (system, method) == ("verl", "sft") and "model.partial_pretrain" in given:
        defaults |= VERL_FSDP_SFT
    if system == "trl":
        makers = {"get_peft_model": LORA_OF_UNSLOTH, "LoraConfig": PEFT_LORA, "use_peft": COMMAND_LORA}
        defaults |= next((values for maker, values in makers.items() if maker in given), {})
        defaults |= TRANSFORMERS_DEFAULTS if "TrainingArguments" in given else {}
    if system in ("trl", "axolotl") and "use_vllm" in given and method in ("rl", "rloo"):
        defaults["vllm_importance_sampling_mode"] = "sequence_mask"
    defaults |= {alpha: 16 for rank, alpha in ALPHA_OF_RANK.items() if rank in given}
    return {
        name: value
        for name, value in defaults.items()
        if not any(setting in given for setting in INSTEAD.get(name, ()))
    }

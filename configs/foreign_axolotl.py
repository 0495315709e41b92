"""Rules for the settings of axolotl by name, without ``trl``, in addition to those of transformers' trainers."""

from __future__ import annotations

from typing import Any

from rlpipe.configs.foreign_hf import ADAPTER, EPOCHS, OPTIMIZATION, PACKING, PREFERENCES, SAMPLING, chat_template
from rlpipe.configs.foreign_losses import axolotl_method, trl_beta, trl_loss
from rlpipe.configs.foreign_names import LENGTH, STRATEGY
from rlpipe.configs.foreign_rules import (
    OFF,
    Made,
    Table,
    attention,
    engine_argument,
    for_method,
    held_out_file,
    of_engines,
    part,
    switched,
    target_modules,
    tensor_parallel,
    text,
)
from rlpipe.configs.foreign_values import ForeignValues, is_on

FOUND = "found from the model's files"
KERNELS = "kernels are chosen here by what the GPU supports"
END = "end markers are found in the chat template; data.role_boundaries sets them"


def flash_attention(values: ForeignValues, value: Any) -> Made:
    return attention(values, "flash_attention_2") if is_on(value) else OFF


def linear_targets(values: ForeignValues, value: Any) -> Made:
    return target_modules(values, "all-linear") if is_on(value) else OFF


def held_out(values: ForeignValues, value: Any) -> Made:
    """Translate axolotl's held-out rows: a number if it is above 1, otherwise a share of all."""
    is_number = value == 0 or (type(value) is int and value > 1)
    return {"data.held_out.size": int(value)} if is_number else "a share of the rows; set data.held_out.size, a number"


AXOLOTL: Table = {
    **OPTIMIZATION,
    **ADAPTER,
    **SAMPLING,
    **PREFERENCES,
    "base_model": "model.path",
    "revision_of_model": "model.revision",
    "tokenizer_config": "model.tokenizer",
    **dict.fromkeys(("model_type", "tokenizer_type", "processor_type", "is_llama_derived_model", "num_labels"), FOUND),
    "rl": axolotl_method,
    **dict.fromkeys(("reward_model", "process_reward_model"), part("algorithm")),
    "rl_beta": trl_beta,
    "dpo_loss_type": trl_loss,
    "orpo_alpha": for_method("orpo", rule="algorithm.preference.beta", others=OFF),
    "lora_target_linear": linear_targets,
    "val_set_size": held_out,
    "train_on_inputs": "data.train_on_inputs",
    "sequence_len": LENGTH,
    **dict.fromkeys(("sample_packing", "eval_sample_packing", "pad_to_sequence_len", "group_by_length"), PACKING),
    "chat_template": lambda values, value: chat_template(values, None),
    "chat_template_jinja": chat_template,
    **dict.fromkeys(("flash_attention", "flash_attn"), flash_attention),
    "sdp_attention": switched("model.attention", "sdpa"),
    "eager_attention": switched("model.attention", "eager"),
    "flex_attention": switched("model.attention", "flex_attention"),
    **dict.fromkeys(("saves_per_epoch", "evals_per_epoch"), EPOCHS),
    "dataset_prepared_path": "data.cache is where rlpipe data prepare keeps rows",
    "streaming": switched("data.streaming"),
    "use_wandb": switched("tracking.wandb"),
    "wandb_project": lambda values, value: {"tracking.wandb": True, "tracking.wandb_project": str(value)},
    **dict.fromkeys(("wandb_name", "wandb_run_id"), text("name")),
    "use_tensorboard": switched("tracking.tensorboard"),
    "early_stopping_patience": "a run ends after algorithm.num_steps",
    **dict.fromkeys(("eot_tokens", "train_on_eot"), END),
    "vllm.gpu_memory_utilization": engine_argument("gpu_memory_utilization"),
    "vllm.tensor_parallel_size": of_engines(tensor_parallel),
    "vllm.max_model_len": of_engines("rollout.max_model_len"),
    "test_datasets": held_out_file,
    **{
        f"ebft.{theirs}": f"algorithm.ebft.features.{ours}"
        for theirs, ours in (
            ("feature_layers", "layers"),
            ("embed_method", "pooling"),
            ("alignment_coef", "alignment_coef"),
            ("diversity_coef", "diversity_coef"),
        )
    },
    "ebft.use_whitening": lambda values, value: {
        "algorithm.ebft.features.whitening": "feature" if is_on(value) else "none"
    },
    **{f"ebft.{name}": f"algorithm.ebft.{name}" for name in ("rl_coef", "ce_coef")},
    **{
        f"ebft.{name}": f"algorithm.ebft.strided.{name}"
        for name in ("stride", "context_length", "temperature", "top_p")
    },
    "ebft.generate_max_len": "algorithm.ebft.strided.generate_tokens",
    "ebft.n_samples_per_prompt": "algorithm.group_size",
    "ebft.advantage_estimator": "algorithm.advantage.name",
    "ebft.mode": part("algorithm"),
}
AXOLOTL_BELOW = {
    "chat_template_kwargs": "data.chat_template_kwargs",
    "special_tokens": "the tokenizer's own special tokens are used",
    "deepspeed": STRATEGY,
    "fsdp_config": STRATEGY,
    "fsdp": STRATEGY,
    "plugins": KERNELS,
    "vllm": "engines are started by the run: see rollout.engine_args",
    "unfrozen_parameters": "model.adapter selects what is trained",
    "lora_mlp_kernel": KERNELS,
}
"""Options, or reasons, for all settings below a name."""

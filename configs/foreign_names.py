"""Names of options in TRL, verl, OpenRLHF, axolotl and others, with what to set here instead."""

from __future__ import annotations

STEPS = "a run is counted in steps: set algorithm.num_steps to epochs * rows / algorithm.groups_per_step"
WARMUP = "set learner.schedule.warmup_steps, a number of steps"
LENGTH = (
    "set data.max_prompt_tokens and rollout.sampling.max_tokens; in supervised fine-tuning rows are as long as "
    "learner.max_tokens_per_microbatch allows"
)
ACCUMULATION = (
    "a step is algorithm.groups_per_step groups of algorithm.group_size completions, and what is computed at one time "
    "is bounded by learner.max_tokens_per_microbatch, so there is nothing to accumulate"
)
PRECISION = "set model.dtype to bfloat16, float16 or float32"
REWARD_SERVER = (
    "set scoring.rewards.<name>.path to a function that asks the server, or rlpipe.scoring.judge:NumberJudge"
)
GPUS = "set rollout.num_engines and learner.num_ranks, with rollout.num_gpus and learner.num_gpus for each process"
COLOCATED = "engines and learner share a GPU if rollout.num_gpus and learner.num_gpus are fractions, such as 0.5"
OFFLOAD = "set learner.offload, or learner.zero3.offload_optimizer and learner.zero3.offload_parameters"
QUANTIZED = "write model=qlora for a base in NF4"
ADAPTER = "write model=lora, model=qlora or model=full"
ALGORITHM = "write algorithm=grpo, dapo, dr_grpo, gspo, rloo or another of rlpipe config --groups algorithm"
STRATEGY = "write learner=fsdp2_gpu or learner=zero3_gpu"
MEMORY = "set rollout.engine_args.gpu_memory_utilization"
NO_CRITIC = "there is no critic: advantages come from the rewards of a group (algorithm.advantage.name)"

FOREIGN_NAMES = {
    # optimizer and length of a run
    "learning_rate": "learner.optimizer.lr",
    "actor_learning_rate": "learner.optimizer.lr",
    "optim.lr": "learner.optimizer.lr",
    "max_steps": "algorithm.num_steps",
    "total_steps": "algorithm.num_steps",
    "total_training_steps": "algorithm.num_steps",
    "num_train_epochs": STEPS,
    "num_epochs": STEPS,
    "num_episodes": STEPS,
    "total_epochs": STEPS,
    "max_epochs": "algorithm.num_epochs_per_step",
    "ppo_epochs": "algorithm.num_epochs_per_step",
    "num_iterations": "algorithm.num_epochs_per_step",
    "lr_warmup_steps": "learner.schedule.warmup_steps",
    "warmup_ratio": WARMUP,
    "lr_warmup_ratio": WARMUP,
    "lr_warmup_steps_ratio": WARMUP,
    "lr_scheduler_type": "learner.schedule.name",
    "lr_scheduler": "learner.schedule.name",
    "adam_beta1": "learner.optimizer.betas",
    "adam_beta2": "learner.optimizer.betas",
    "adam_betas": "learner.optimizer.betas",
    "adam_epsilon": "learner.optimizer.eps",
    "optim": "learner.optimizer.name",
    "grad_clip": "learner.max_grad_norm",
    "max_norm": "learner.max_grad_norm",
    # groups and batches
    "num_generations": "algorithm.group_size",
    "n_samples_per_prompt": "algorithm.group_size",
    "rollout.n": "algorithm.group_size",
    "batch_size": "algorithm.groups_per_step",
    "train_batch_size": "algorithm.groups_per_step",
    "rollout_batch_size": "algorithm.groups_per_step",
    "generation_batch_size": "algorithm.groups_per_step",
    "per_device_train_batch_size": ACCUMULATION,
    "gradient_accumulation_steps": ACCUMULATION,
    "micro_batch_size": ACCUMULATION,
    "micro_train_batch_size": ACCUMULATION,
    "micro_rollout_batch_size": ACCUMULATION,
    "ppo_micro_batch_size": ACCUMULATION,
    "ppo_micro_batch_size_per_gpu": ACCUMULATION,
    "log_prob_micro_batch_size_per_gpu": ACCUMULATION,
    "ppo_max_token_len_per_gpu": "learner.max_tokens_per_microbatch",
    "ppo_mini_batch_size": "set algorithm.num_minibatches to the number of updates in a pass over a step",
    "steps_per_generation": "algorithm.num_minibatches",
    # losses
    "epsilon": "algorithm.loss.clip_low",
    "epsilon_high": "algorithm.loss.clip_high",
    "eps_clip": "algorithm.loss.clip_low",
    "eps_clip_low_high": "algorithm.loss.clip_low",
    "clip_ratio": "algorithm.loss.clip_low",
    "clip_ratio_low": "algorithm.loss.clip_low",
    "clip_ratio_high": "algorithm.loss.clip_high",
    "clip_ratio_c": "algorithm.loss.clip_delta",
    "delta": "algorithm.loss.clip_delta",
    "kl_coef": "algorithm.loss.beta",
    "init_kl_coef": "algorithm.loss.beta",
    "kl_loss_coef": "algorithm.loss.beta",
    "use_kl_loss": "the KL term is on if algorithm.loss.beta is above 0",
    "use_kl_in_reward": "the KL term belongs to the loss here: set algorithm.loss.beta",
    "entropy_coeff": "algorithm.loss.entropy_coef",
    "loss_type": "algorithm.loss.name",
    "loss_agg_mode": "algorithm.loss.aggregate",
    "importance_sampling_level": "algorithm.loss.level",
    "scale_rewards": "algorithm.advantage.scale",
    "norm_adv_by_std_in_grpo": "algorithm.advantage.scale",
    "mask_truncated_completions": "algorithm.loss.mask_truncated",
    "adv_estimator": ALGORITHM,
    "advantage_estimator": ALGORITHM,
    "rl": ALGORITHM,
    "critic_learning_rate": NO_CRITIC,
    "lambd": NO_CRITIC,
    "gamma": NO_CRITIC,
    "lam": NO_CRITIC,
    # lengths and sampling
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "max_completion_length": "rollout.sampling.max_tokens",
    "max_new_tokens": "rollout.sampling.max_tokens",
    "max_response_length": "rollout.sampling.max_tokens",
    "response_length": "rollout.sampling.max_tokens",
    "generate_max_len": "rollout.sampling.max_tokens",
    "max_seq_length": LENGTH,
    "sequence_len": LENGTH,
    "max_length": LENGTH,
    "max_len": LENGTH,
    # model and adapter
    "model_name_or_path": "model.path",
    "base_model": "model.path",
    "pretrain": "model.path",
    "actor_rollout_ref.model.path": "model.path",
    "lora_r": "model.adapter.r",
    "lora_rank": "model.adapter.r",
    "lora_alpha": "model.adapter.alpha",
    "lora_dropout": "model.adapter.dropout",
    "lora_target_modules": "model.adapter.target_modules",
    "lora_target_linear": "model.adapter.target_modules",
    "use_peft": ADAPTER,
    "adapter": ADAPTER,
    "load_in_4bit": QUANTIZED,
    "load_in_8bit": QUANTIZED,
    "bf16": PRECISION,
    "fp16": PRECISION,
    "tf32": PRECISION,
    "torch_dtype": PRECISION,
    "param_dtype": PRECISION,
    "attn_implementation": "model.attention",
    "flash_attention": "model.attention",
    "flash_attn": "model.attention",
    "enable_gradient_checkpointing": "model.gradient_checkpointing",
    "template": "model.chat_template",
    "chat_template_path": "model.chat_template",
    "chat_template_jinja": "model.chat_template",
    "custom_chat_template": "model.chat_template",
    "tokenizer_chat_template": "model.chat_template",
    # data
    "dataset_name": "data.path",
    "datasets": "data.path",
    "dataset": "data.path",
    "train_files": "data.path",
    "prompt_data": "data.path",
    "val_files": "data.held_out.path",
    "eval_dataset": "data.held_out.path",
    "val_set_size": "data.held_out.size",
    "train_on_input": "data.train_on_inputs",
    "train_on_prompt": "data.train_on_inputs",
    "mask_prompt": "data.roles_to_train",
    "roles": "data.roles_to_train",
    "assistant_only_loss": "data.roles_to_train",
    "completion_only_loss": "data.roles_to_train",
    "train_on_responses_only": "data.roles_to_train",
    "train_on_eot": "data.train_on_eos",
    "eot_tokens": "data.role_boundaries",
    "instruction_template": "data.role_boundaries",
    "response_template": "data.role_boundaries",
    "apply_chat_template": "data.chat",
    "apply_chat_template_kwargs": "data.chat_template_kwargs",
    "enable_thinking": "data.chat_template_kwargs",
    "default_system": "data.system_prompt",
    "default_system_message": "data.system_prompt",
    "prompt_key": "data.prompt_column",
    "input_key": "data.prompt_column",
    "response_key": "data.completion_column",
    "output_key": "data.completion_column",
    "messages_key": "data.messages_column",
    "field_messages": "data.messages_column",
    "dataset_text_field": "data.text_column",
    "packing": "rows are always packed, up to learner.max_tokens_per_microbatch",
    "sample_packing": "rows are always packed, up to learner.max_tokens_per_microbatch",
    "packing_samples": "rows are always packed, up to learner.max_tokens_per_microbatch",
    # rewards
    "reward_funcs": "scoring.rewards",
    "custom_reward_function": "scoring.rewards",
    "reward_model_path": "see experiment=reward_model for a reward model of transformers",
    "reward_weights": "set scoring.rewards.<name>.weight",
    "remote_rm_url": REWARD_SERVER,
    "reward_pretrain": "see experiment=reward_model for a reward model of transformers",
    # processes, memory and engines
    "use_vllm": "rollout.engine",
    "vllm_mode": COLOCATED,
    "colocate_all_models": COLOCATED,
    "vllm_num_engines": "rollout.num_engines",
    "tensor_model_parallel_size": "rollout.tensor_parallel_size",
    "vllm_tensor_parallel_size": "rollout.tensor_parallel_size",
    "gpu_memory_utilization": MEMORY,
    "vllm_gpu_memory_utilization": MEMORY,
    "n_gpus_per_node": GPUS,
    "nnodes": GPUS,
    "actor_num_nodes": GPUS,
    "actor_num_gpus_per_node": GPUS,
    "zero_stage": STRATEGY,
    "deepspeed": STRATEGY,
    "fsdp_config": STRATEGY,
    "adam_offload": OFFLOAD,
    "param_offload": OFFLOAD,
    "optimizer_offload": OFFLOAD,
    "async_level": "replay.max_staleness",
    "max_async_level": "replay.max_staleness",
    "in_flight_weight_updates": "weights.on_update",
    "partial_rollout": "weights.on_update",
    # output
    "save_steps": "checkpoint.every_steps",
    "save_freq": "checkpoint.every_steps",
    "save_total_limit": "checkpoint.keep",
    "eval_steps": "data.held_out.every_steps",
    "test_freq": "data.held_out.every_steps",
    "output_dir": "output",
    "save_path": "output",
    "ckpt_path": "output",
    "default_local_dir": "output",
    "run_name": "name",
    "experiment_name": "name",
    "resume_from_checkpoint": "resume",
    "report_to": "tracking.wandb",
    "use_wandb": "tracking.wandb",
    "trainer.logger": "tracking.wandb",
    "project_name": "tracking.wandb_project",
    "logging_steps": "every step is logged; tracking.log_completions is the number of samples",
}
"""Option of rlpipe for each name, or a sentence for names without a counterpart; keys are ends of dotted names."""


def foreign_name(name: str) -> str | None:
    """Return the entry for the longest end of a dotted name that is known; None if none is."""
    parts = name.split(".")
    if parts[0] == "critic":
        return NO_CRITIC
    ends = (".".join(parts[index:]) for index in range(len(parts)))
    return next((FOREIGN_NAMES[end] for end in ends if end in FOREIGN_NAMES), None)

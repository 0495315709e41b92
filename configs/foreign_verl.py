"""Rules for the settings of verl by name, without ``actor_rollout_ref``."""

from __future__ import annotations

from typing import Any

from rlpipe.configs.foreign_losses import (
    KL_COEF,
    in_reward,
    of_covariance,
    of_gae,
    verl_advantage,
    verl_aggregate,
    verl_clip,
    verl_correction,
    verl_correction_cap,
    verl_dual_clip,
    verl_kl,
    verl_kl_switch,
    verl_kl_target,
    verl_kl_type,
    verl_loss,
    verl_lower_bound,
    verl_ratio_cap,
    verl_refill,
    verl_reward_kl,
    verl_scale,
    verl_upper_bound,
)
from rlpipe.configs.foreign_names import ACCUMULATION, CRITIC, GPUS, LENGTH, OFFLOAD, PRECISION, STRATEGY
from rlpipe.configs.foreign_rules import (
    KL_ESTIMATORS,
    OFF,
    OPTIMIZERS,
    OVERLONG_REWARD,
    Made,
    Rule,
    Table,
    batch,
    betas,
    copied,
    counted,
    data,
    engine,
    engine_argument,
    epochs,
    group_size,
    held_out_file,
    kl_estimator,
    minibatches,
    named,
    of_engines,
    positive,
    rank,
    schedule,
    switched,
    target_modules,
    tensor_parallel,
    text,
    top_k,
    tracker,
    warmup_ratio,
    warmup_steps,
    with_adapter,
)
from rlpipe.configs.foreign_values import ForeignValues, is_on

OVERLONG = "prompts that are too long are skipped and counted"
SHARDED = "how the model is computed is chosen here: learner=fsdp2_gpu and learner=zero3_gpu shard it"
DYNAMIC = "micro batches are filled up to learner.max_tokens_per_microbatch"
INSIDE = "the text is an entry of a dictionary in the column: a data.transform takes it out"
GENERATED = "the engine's log-probs are always kept"
REWARDS = (
    "set scoring.rewards.<name>.path to a function that takes lists: completions, and the columns of the rows by name"
)
OTHER_CONFIG = "the options of the file that it names are not read: import that file, too"
TURNS = "see environment.tools and environment.path for episodes of several turns"
MEGATRON = "there is no Megatron here: learner=fsdp2_gpu and learner=zero3_gpu shard the policy"
REFERENCE = "the reference is the base without its adapter, or a frozen copy, in the learner's own processes"
GREEDY = "evaluations take the likeliest tokens, with one answer to a prompt"


def resume(values: ForeignValues, value: Any) -> Made:
    names = {"auto": "auto", "disable": "never", "False": "never"}
    return {"resume": names[str(value)]} if str(value) in names else "its checkpoints can't be read here"


def column(option: str, keys: str) -> Rule:
    """Return the rule of a column, which may hold a dictionary whose entry is another setting."""

    def rule(values: ForeignValues, value: Any) -> Made:
        inside = values.get(f"data.{keys}_dict_keys")
        return INSIDE if inside and not values.samples else {option: value}

    return rule


def tokens(values: ForeignValues, value: Any) -> Made:
    """Translate the size of micro batches that are filled up with tokens, if they are."""
    switch = values.get("actor.use_dynamic_bsz" if values.samples else "data.use_dynamic_bsz")
    is_used = is_on(switch) or (switch is None and not values.samples)
    return {"learner.max_tokens_per_microbatch": value} if is_used else DYNAMIC


VERL: Table = {
    # the algorithm
    "algorithm.adv_estimator": verl_advantage,
    "algorithm.norm_adv_by_std_in_grpo": verl_scale,
    "algorithm.use_kl_in_reward": in_reward(verl_reward_kl),
    "algorithm.kl_penalty": in_reward(named("algorithm.reward_kl.kl", KL_ESTIMATORS)),
    "algorithm.kl_ctrl.kl_coef": in_reward(copied(KL_COEF)),
    "algorithm.kl_ctrl.type": in_reward(verl_kl_type),
    **dict.fromkeys(("algorithm.kl_ctrl.target_kl", "algorithm.kl_ctrl.horizon"), in_reward(verl_kl_target)),
    "algorithm.gamma": of_gae("algorithm.advantage.gamma", "algorithm.adv_estimator"),
    "algorithm.lam": of_gae("algorithm.advantage.lam", "algorithm.adv_estimator"),
    "critic.cliprange_value": of_gae("algorithm.critic.value_clip", "algorithm.adv_estimator"),
    "trainer.critic_warmup": CRITIC,
    **dict.fromkeys(("algorithm.filter_groups.enable", "algorithm.filter_groups.max_num_gen_batches"), verl_refill),
    "algorithm.filter_groups.metric": "groups are compared by the sum of their rewards",
    "algorithm.rollout_correction.rollout_is": verl_correction,
    "algorithm.rollout_is": verl_correction,
    **dict.fromkeys(
        ("algorithm.rollout_correction.rollout_is_threshold", "algorithm.rollout_is_threshold"), verl_correction_cap
    ),
    "actor.tis_imp_ratio_cap": verl_ratio_cap,
    "actor.policy_loss.loss_mode": verl_loss,
    "actor.use_gpg_loss": switched("algorithm.loss.name", "reinforce"),
    "actor.loss_agg_mode": verl_aggregate,
    "actor.clip_ratio": verl_clip,
    "actor.clip_ratio_low": verl_lower_bound,
    "actor.clip_ratio_high": verl_upper_bound,
    "actor.clip_ratio_c": verl_dual_clip,
    "actor.policy_loss.clip_cov_ratio": of_covariance("clip_cov:share"),
    "actor.policy_loss.clip_cov_lb": of_covariance("clip_cov:low"),
    "actor.policy_loss.clip_cov_ub": of_covariance("clip_cov:high"),
    "actor.policy_loss.kl_cov_ratio": of_covariance("kl_cov:share"),
    "actor.policy_loss.ppo_kl_coef": of_covariance("kl_cov:penalty"),
    "actor.tau_pos": "algorithm.loss.sapo.temperature_positive",
    "actor.tau_neg": "algorithm.loss.sapo.temperature_negative",
    "actor.entropy_coeff": "algorithm.loss.entropy_coef",
    "actor.use_kl_loss": verl_kl_switch,
    "actor.kl_loss_coef": verl_kl,
    "actor.kl_loss_type": kl_estimator,
    "actor.ppo_epochs": "algorithm.num_epochs_per_step",
    # the batch of a step
    "data.train_batch_size": batch,
    "data.gen_batch_size": "as many prompts are drawn as a step needs",
    "rollout.n": group_size,
    "actor.ppo_mini_batch_size": minibatches,
    **dict.fromkeys(("actor.ppo_micro_batch_size", "actor.ppo_micro_batch_size_per_gpu"), ACCUMULATION),
    **dict.fromkeys(("data.micro_batch_size", "data.micro_batch_size_per_gpu"), ACCUMULATION),
    **{f"rollout.log_prob_{name}": ACCUMULATION for name in ("micro_batch_size", "micro_batch_size_per_gpu")},
    "actor.ppo_max_token_len_per_gpu": tokens,
    "data.max_token_len_per_gpu": tokens,
    "rollout.log_prob_max_token_len_per_gpu": DYNAMIC,
    **dict.fromkeys(("actor.use_dynamic_bsz", "rollout.log_prob_use_dynamic_bsz", "data.use_dynamic_bsz"), DYNAMIC),
    "trainer.balance_batch": DYNAMIC,
    # optimizer and length of a run
    **{f"{section}lr": "learner.optimizer.lr" for section in ("actor.optim.", "optim.")},
    **{f"{section}weight_decay": "learner.optimizer.weight_decay" for section in ("actor.optim.", "optim.")},
    **{f"{section}betas": betas for section in ("actor.optim.", "optim.")},
    **{f"{section}optimizer": named("learner.optimizer.name", OPTIMIZERS) for section in ("actor.optim.", "optim.")},
    **{f"{section}min_lr_ratio": "learner.schedule.min_ratio" for section in ("actor.optim.", "optim.")},
    **{
        f"{section}{name}": schedule
        for section in ("actor.optim.", "optim.")
        for name in ("warmup_style", "lr_scheduler_type", "lr_scheduler", "lr_decay_style")
    },
    **{f"{section}lr_warmup_steps": warmup_steps for section in ("actor.optim.", "optim.")},
    **{
        f"{section}{name}": warmup_ratio
        for section in ("actor.optim.", "optim.")
        for name in ("lr_warmup_steps_ratio", "warmup_steps_ratio")
    },
    **dict.fromkeys(("actor.grad_clip", "actor.optim.clip_grad", "optim.clip_grad"), "learner.max_grad_norm"),
    **dict.fromkeys(
        ("trainer.total_training_steps", "actor.optim.total_training_steps"), counted("algorithm.num_steps")
    ),
    "trainer.total_epochs": epochs,
    "trainer.seed": "seed",
    # model
    **dict.fromkeys(("model.path", "model.partial_pretrain"), "model.path"),
    "model.tokenizer_path": "model.tokenizer",
    "model.trust_remote_code": switched("model.trust_remote_code"),
    "model.enable_gradient_checkpointing": switched("model.gradient_checkpointing"),
    **dict.fromkeys(("model.lora_rank", "model.lora.rank"), rank),
    **dict.fromkeys(("model.lora_alpha", "model.lora.alpha"), with_adapter("model.adapter.alpha")),
    "model.lora.dropout": with_adapter("model.adapter.dropout"),
    "model.target_modules": target_modules,
    "model.lora_adapter_path": with_adapter("model.adapter.path"),
    "model.custom_chat_template": "it is a template's text; model.chat_template names a Jinja file",
    **dict.fromkeys(
        ("model.use_remove_padding", "use_remove_padding", "actor.use_remove_padding"), "rows are always packed"
    ),
    **dict.fromkeys(("rollout.dtype", "actor.fsdp_config.model_dtype", "model.fsdp_config.model_dtype"), PRECISION),
    **dict.fromkeys(("actor.fsdp_config.dtype", "engine.model_dtype"), PRECISION),
    **{f"actor.fsdp_config.{name}": OFFLOAD for name in ("param_offload", "optimizer_offload", "offload_policy")},
    **{f"model.fsdp_config.{name}": OFFLOAD for name in ("cpu_offload", "offload_params")},
    **dict.fromkeys(
        ("model.strategy", "actor.strategy", "actor.fsdp_config.strategy", "model_engine", "engine", "optim"), STRATEGY
    ),
    # data
    "data.train_files": data,
    "data.val_files": held_out_file,
    "data.prompt_key": column("data.prompt_column", "prompt"),
    "data.response_key": column("data.completion_column", "response"),
    **dict.fromkeys(("data.prompt_dict_keys", "data.response_dict_keys"), INSIDE),
    **dict.fromkeys(("data.messages_key", "data.multiturn.messages_key"), "data.messages_column"),
    **dict.fromkeys(("data.tools_key", "data.multiturn.tools_key"), "data.tools_column"),
    "data.image_key": "data.images_column",
    "data.max_prompt_length": of_engines("data.max_prompt_tokens"),
    "data.max_response_length": of_engines("rollout.sampling.max_tokens"),
    "data.max_length": LENGTH,
    "data.shuffle": "data.shuffle",
    **dict.fromkeys(
        ("data.truncation", "data.filter_overlong_prompts", "data.filter_overlong_prompts_workers"), OVERLONG
    ),
    # engines
    "rollout.name": engine,
    **{f"rollout.{name}": of_engines(f"rollout.sampling.{name}") for name in ("temperature", "top_p")},
    "rollout.top_k": of_engines(top_k),
    "rollout.response_length": of_engines("rollout.sampling.max_tokens"),
    "rollout.prompt_length": of_engines("data.max_prompt_tokens"),
    "rollout.max_model_len": of_engines("rollout.max_model_len"),
    "rollout.tensor_model_parallel_size": of_engines(tensor_parallel),
    **{
        f"rollout.{name}": engine_argument(name)
        for name in (
            *("gpu_memory_utilization", "enforce_eager", "max_num_batched_tokens", "max_num_seqs"),
            *("enable_chunked_prefill", "enable_prefix_caching"),
        )
    },
    "rollout.calculate_log_probs": GENERATED,
    # files
    "trainer.default_local_dir": text("output"),
    "trainer.experiment_name": text("name"),
    "trainer.project_name": text("tracking.wandb_project"),
    "trainer.logger": tracker,
    "trainer.save_freq": counted("checkpoint.every_steps", is_never=True),
    **dict.fromkeys(("trainer.max_actor_ckpt_to_keep", "trainer.max_ckpt_to_keep"), positive("checkpoint.keep")),
    "trainer.test_freq": counted("data.held_out.every_steps", is_never=True),
    "trainer.resume_mode": resume,
    **dict.fromkeys(("trainer.n_gpus_per_node", "trainer.nnodes"), GPUS),
    "trainer.val_before_train": lambda values, value: (
        "held-out rows are evaluated at the start" if is_on(value) else OFF
    ),
    **dict.fromkeys(("config_path", "config_name", "config-path", "config-name", "defaults"), OTHER_CONFIG),
}
VERL_BELOW = {
    "critic": CRITIC,
    "ref": REFERENCE,
    "actor.megatron": MEGATRON,
    "rollout.val_kwargs": GREEDY,
    "rollout.engine_kwargs.vllm": "rollout.engine_args",
    "rollout.engine_kwargs": "an engine that does not exist here: rollout.engine is vllm or hf",
    "rollout.multi_turn": TURNS,
    "rollout.agent": TURNS,
    "reward_model.overlong_buffer": OVERLONG_REWARD,
    "reward_model.reward_kwargs": OVERLONG_REWARD,
    "reward_model": REWARDS,
    "reward": REWARDS,
    "custom_reward_function": REWARDS,
    "data.apply_chat_template_kwargs": "data.chat_template_kwargs",
    "engine": SHARDED,
    "ulysses_sequence_parallel_size": SHARDED,
    "actor.ulysses_sequence_parallel_size": SHARDED,
    "actor.fsdp_config": SHARDED,
}
"""Options, or reasons, for all settings below a name."""

"""Settings of the length of a run, its batches, the optimizer, the processes and the files, and what they become."""

from __future__ import annotations

import math
from typing import Any

from rlpipe.configs.foreign.foreign_run import Computed, read_value
from rlpipe.configs.foreign.foreign_values import GROUPS, SIZE, UPDATES, ForeignValues, is_on
from rlpipe.configs.foreign.setting_rules import (
    OFF,
    Made,
    Rule,
    SettingRow,
    UsedBy,
    about,
    counted,
    named,
    positive,
    sampled,
    switched,
    text,
    with_setting,
)
from rlpipe.configs.foreign.system_defaults import AXOLOTL_DEFAULT

STEPS = "a run is counted in steps: set algorithm.num_steps to epochs * rows / algorithm.groups_per_step"
STEPS_COUNT = "the number of steps is set, and counts instead, as it does there"
ACCUMULATION = (
    "a step is algorithm.groups_per_step groups of algorithm.group_size completions, and what is computed at one time "
    "is bounded by learner.max_tokens_per_microbatch, so there is nothing to accumulate"
)
PACKED = (
    "a row of a batch is a packed sequence there; set algorithm.groups_per_step, a number of rows before packing, and "
    "learner.max_tokens_per_microbatch, the tokens of a packed sequence"
)
NO_UPDATES = f"set {UPDATES} to the number of updates in a pass over a step"
ALWAYS_PACKED = "rows are always packed, up to learner.max_tokens_per_microbatch"
DYNAMIC = "micro batches are filled up to learner.max_tokens_per_microbatch"
MICRO = "what is computed at one time is bounded by learner.max_tokens_per_microbatch"
TOKENS = "learner.max_tokens_per_microbatch"
NO_WARMUP = "the schedule called constant has no warm-up there"
STEPS_OF_WARMUP = ("warmup_steps", "actor.optim.lr_warmup_steps", "lr_warmup_steps")
WARMUP = "set learner.schedule.warmup_steps, a number of steps"
STRATEGY = "write learner=fsdp2_gpu or learner=zero3_gpu"
NORM = "learner.max_grad_norm"
TRACKERS = ("wandb", "mlflow", "trackio", "tensorboard")
SHARDED = "how the model is computed is chosen here: learner=fsdp2_gpu and learner=zero3_gpu shard it"
MEGATRON = "there is no Megatron here: learner=fsdp2_gpu and learner=zero3_gpu shard the policy"
OFFLOAD = "set learner.offload, or learner.zero3.offload_optimizer and learner.zero3.offload_parameters"
GPUS = "set rollout.num_engines and learner.num_ranks, with rollout.num_gpus and learner.num_gpus for each process"
COLOCATED = "engines and learner share a GPU if rollout.num_gpus and learner.num_gpus are fractions, such as 0.5"
OWN_GPUS = "engines have GPUs of their own, as a server has: set rollout.num_engines and rollout.num_gpus"
PROCESSES = "for several GPUs, set learner.num_ranks and learner=fsdp2_gpu or learner=zero3_gpu"
OWN_PROCESSES = "how accelerate starts its processes; a run starts its own"
SHARDING, RANKS = {"DEEPSPEED": "zero3_gpu"}, "and set learner.num_ranks, for several GPUs"
ACCELERATE_TYPES = {"bf16": "bfloat16", "fp16": "float16"}
EPOCHS = "epochs are not counted: set the number of steps"
EXPORT = "rlpipe export writes a checkpoint for transformers"
GREEDY = "held-out prompts have one answer of the likeliest tokens"
SCHEDULES = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"} | {
    name: name for name in ("linear", "cosine", "constant")
}
OPTIMIZERS = {
    **dict.fromkeys(("adam", "adamw", "adamw_hf", "adamw_torch", "adamw_torch_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "adamw_torch_8bit"), "adamw_8bit"),
    "paged_adamw_8bit": "paged_adamw_8bit",
}


def of_batch(option: str, others: str) -> Rule:
    """Return the rule of a setting from which the size of a step follows, with others."""

    def make(values: ForeignValues, value: Any) -> Made:
        return UsedBy(option) if option in values.batch else PACKED if values.is_packed else others

    return Rule(option, make)


batch, updates = of_batch(GROUPS, f"set {GROUPS}"), of_batch(UPDATES, NO_UPDATES)


@about(GROUPS)
def train_batch(values: ForeignValues, value: Any) -> Made:
    """Translate a number of rows, or of completions for runs that sample them."""
    return (updates if values.samples else batch).make(values, value)


@about("algorithm.num_steps")
def epochs(values: ForeignValues, value: Any) -> Made:
    return STEPS if values.num_steps is None else STEPS_COUNT


@about("algorithm.num_epochs_per_step")
def passes(values: ForeignValues, value: Any) -> Made:
    return {"algorithm.num_epochs_per_step": value} if values.samples else STEPS


@about(TOKENS)
def tokens(values: ForeignValues, value: Any) -> Made:
    """Translate the size of micro batches that are filled up with tokens, if they are."""
    if values.run.system == "openrlhf":
        return {TOKENS: value} if is_on(values.get("use_dynamic_batch")) else ALWAYS_PACKED
    switch = values.get("actor.use_dynamic_bsz" if values.samples else "data.use_dynamic_bsz")
    is_used = is_on(switch) or (switch is None and not values.samples)
    return {TOKENS: value} if is_used else DYNAMIC


@about("learner.optimizer.betas")
def betas(values: ForeignValues, value: Any) -> Made:
    is_text = isinstance(value, str)  # such as verl's "(0.9,0.95)", or OpenRLHF's 0.9,0.95
    listed = [read_value(text.strip()) for text in value.strip("()[] ").split(",")] if is_text else value
    pair = listed if isinstance(listed, list | tuple) else (values.get("adam_beta1"), values.get("adam_beta2"))
    if len(pair) != 2 or any(isinstance(beta, str | Computed) for beta in pair):
        return "set learner.optimizer.betas, two numbers"
    filled = [default if beta is None else beta for beta, default in zip(pair, (0.9, 0.999), strict=True)]
    return {"learner.optimizer.betas": filled}


@about("learner.schedule.name")
def schedule(values: ForeignValues, value: Any) -> Made:
    """Translate the shape of the learning rate; the lowest rate may be another setting."""
    options = named("learner.schedule.name", SCHEDULES).make(values, value)
    if value != "cosine_with_min_lr" or not isinstance(options, dict):
        return options
    lowest = values.get("lr_scheduler_kwargs.min_lr_rate", "min_lr_ratio", "actor.optim.min_lr_ratio")
    rates = (values.get("lr_scheduler_kwargs.min_lr"), values.get("learning_rate"))
    if lowest is None and all(isinstance(rate, int | float) and rate > 0 for rate in rates):
        lowest = rates[0] / rates[1]
    if lowest is None and values.run.system != "openrlhf":
        return "set learner.schedule.name=cosine, and learner.schedule.min_ratio"
    return {**options, "learner.schedule.min_ratio": 0.1 if lowest is None else lowest}


def _has_no_warmup(values: ForeignValues) -> bool:
    """Return whether the schedule is the one of transformers that ignores warm-up."""
    is_constant = values.get("lr_scheduler", "lr_scheduler_type") == "constant"
    return is_constant and values.run.system in ("trl", "axolotl")


@about("learner.schedule.warmup_steps")
def warmup_ratio(values: ForeignValues, value: Any) -> Made:
    is_default = value == AXOLOTL_DEFAULT
    if _has_no_warmup(values):
        return OFF if is_default else NO_WARMUP
    if values.number(*STEPS_OF_WARMUP) is not None:
        return "a number of updates, such as warmup_steps, is set, and counts instead"
    value = 0.03 if is_default else value
    if values.num_steps is None or isinstance(value, bool) or not isinstance(value, int | float):
        return WARMUP
    steps = value * values.num_steps
    if values.run.system == "axolotl":
        return {"learner.schedule.warmup_steps": min(int(steps), 100) if is_default else int(steps)}
    return {"learner.schedule.warmup_steps": math.ceil(steps)}


@about("learner.schedule.warmup_steps")
def warmup_steps(values: ForeignValues, value: Any) -> Made:
    """Translate a number of updates; below 1 it is a share of the run, and 0 or less leaves it to the ratio."""
    if _has_no_warmup(values):
        return NO_WARMUP if value else OFF
    is_share = isinstance(value, float) and 0 < value < 1
    return (warmup_ratio if is_share else counted("learner.schedule.warmup_steps")).make(values, value)


@about("checkpoint.every_steps")
def saving(values: ForeignValues, value: Any) -> Made:
    if str(value).lower() in ("no", "false"):
        return {"checkpoint.every_steps": 0}
    return "checkpoint.every_steps says when" if value == "steps" else EPOCHS


@about("tracking.wandb")
def tracker(values: ForeignValues, value: Any) -> Made:
    """Translate one name of a tracker or several."""
    names = {str(name).lower() for name in (value if isinstance(value, list) else [value])}
    names |= {"wandb"} if "all" in names else set()
    options = {
        f"tracking.{name}": True for name in TRACKERS if name in names and (name != "wandb" or _has_wandb(values))
    }
    if "wandb" in names and not options:
        return OFF
    return options or "metrics go to files, TensorBoard and Ray's dashboard"


def _has_wandb(values: ForeignValues) -> bool:
    return str(values.get("wandb_mode")).lower() != "disabled"


@about("tracking.wandb")
def weights_and_biases(values: ForeignValues, value: Any) -> Made:
    """Translate a switch, which may be a key."""
    is_on_here = str(value).lower() not in ("false", "none") and _has_wandb(values)
    return {"tracking.wandb": True} if is_on_here else OFF


@about("tracking.wandb_mode")
def wandb_mode(values: ForeignValues, value: Any) -> Made:
    mode = str(value).lower()
    if mode in ("online", "offline"):
        return {"tracking.wandb_mode": mode}
    return OFF if mode == "disabled" else "tracking.wandb_mode is online or offline"


def project_of(service: str) -> Rule:
    """Return the rule of a project's name, with which axolotl turns a tracker on."""

    def make(values: ForeignValues, value: Any) -> Made:
        is_used = service != "wandb" or _has_wandb(values)
        return {"tracking.project": str(value), **({f"tracking.{service}": True} if is_used else {})}

    return Rule("tracking.project", make)


@about("rollout.num_engines")
def engines_mode(values: ForeignValues, value: Any) -> Made:
    return OWN_GPUS if value == "server" else COLOCATED


def clipping(values: ForeignValues, value: Any) -> Made:
    return {NORM: None if value == 0 else value}


TRAINING = (
    # the length of a run
    SettingRow(
        counted("algorithm.num_steps"), "max_steps", "trainer.total_training_steps actor.optim.total_training_steps"
    ),
    SettingRow(epochs, "num_train_epochs num_epochs", "trainer.total_epochs", "num_episodes"),
    SettingRow(passes, openrlhf="max_epochs"),
    SettingRow(sampled("algorithm.num_epochs_per_step"), "num_iterations"),
    SettingRow("algorithm.num_epochs_per_step", verl="actor.ppo_epochs"),
    SettingRow("a run ends after algorithm.num_steps", "early_stopping_patience"),
    # the batch of a step
    SettingRow(
        batch, "per_device_train_batch_size micro_batch_size gradient_accumulation_steps", "data.train_batch_size"
    ),
    SettingRow(train_batch, openrlhf="train_batch_size"),
    SettingRow(sampled(batch), openrlhf="rollout_batch_size"),
    SettingRow(of_batch(SIZE, "nothing is sampled"), "num_generations", "rollout.n", "n_samples_per_prompt"),
    SettingRow(updates, "steps_per_generation generation_batch_size", "actor.ppo_mini_batch_size"),
    SettingRow("as many prompts are drawn as a step needs", verl="data.gen_batch_size"),
    SettingRow(
        ACCUMULATION,
        verl="actor.ppo_micro_batch_size actor.ppo_micro_batch_size_per_gpu data.micro_batch_size* "
        "rollout.log_prob_micro*",
        openrlhf="micro_train_batch_size=train.micro_batch_size micro_rollout_batch_size=rollout.micro_batch_size "
        "vllm_generate_batch_size",
    ),
    SettingRow(MICRO, "per_device_eval_batch_size eval_batch_size eval_accumulation_steps"),
    SettingRow(
        tokens, verl="actor.ppo_max_token_len_per_gpu data.max_token_len_per_gpu", openrlhf="train_max_tokens_per_gpu"
    ),
    SettingRow(DYNAMIC, verl="rollout.log_prob_* actor.use_dynamic_bsz data.use_dynamic_bsz trainer.balance_batch"),
    SettingRow(
        ALWAYS_PACKED,
        openrlhf="rollout_max_tokens_per_gpu use_dynamic_batch=train.dynamic_batch_enable packing_samples",
    ),
    SettingRow("rows are always packed", verl="model.use_remove_padding use_remove_padding actor.use_remove_padding"),
    SettingRow(
        "rows are packed up to learner.max_tokens_per_microbatch",
        "packing* padding_free eval_packing sample_packing eval_sample_packing pad_to_sequence_len group_by_length",
    ),
    # optimizer
    SettingRow(
        "learner.optimizer.lr",
        "learning_rate",
        "actor.optim.lr",
        "learning_rate=adam.lr actor_learning_rate=actor.adam.lr",
    ),
    SettingRow(
        "learner.optimizer.weight_decay",
        "weight_decay",
        "actor.optim.weight_decay",
        "l2=adam.weight_decay=actor.adam.weight_decay",
    ),
    SettingRow(betas, "adam_beta1 adam_beta2", "actor.optim.betas", "adam_betas"),
    SettingRow("learner.optimizer.eps", "adam_epsilon"),
    SettingRow(named("learner.optimizer.name", OPTIMIZERS), "optim optimizer", "actor.optim.optimizer"),
    SettingRow(Rule(NORM, clipping), "max_grad_norm", openrlhf="max_norm"),
    SettingRow(NORM, verl="actor.grad_clip actor.optim.clip_grad"),
    SettingRow(
        schedule,
        "lr_scheduler lr_scheduler_type",
        "actor.optim.warmup_style actor.optim.lr_scheduler_type actor.optim.lr_scheduler actor.optim.lr_decay_style",
        "lr_scheduler",
    ),
    SettingRow(
        with_setting(schedule, "lr_scheduler_type", "lr_scheduler", option="learner.schedule.min_ratio"),
        "lr_scheduler_kwargs.min_lr",
    ),
    SettingRow(
        "learner.schedule.min_ratio",
        "lr_scheduler_kwargs.min_lr_rate cosine_min_lr_ratio",
        "actor.optim.min_lr_ratio",
        "min_lr_ratio",
    ),
    SettingRow(warmup_steps, "warmup_steps", "actor.optim.lr_warmup_steps", "lr_warmup_steps"),
    SettingRow(
        warmup_ratio,
        "warmup_ratio",
        "actor.optim.lr_warmup_steps_ratio actor.optim.warmup_steps_ratio",
        "lr_warmup_ratio",
    ),
    SettingRow("seed", "seed", "trainer.seed", "seed"),
    # processes and their memory
    SettingRow(
        STRATEGY,
        "deepspeed.* deepspeed_config.* fsdp.* fsdp_config.* fsdp_version",
        "model.strategy actor.strategy actor.fsdp_config.strategy model_engine engine optim",
        "zero_stage zpg overlap_comm deepcompile ring_attn_size ring_head_stride ds_tensor_parallel_size "
        "grad_accum_dtype ds.* fsdp.*",
    ),
    SettingRow(
        SHARDED, verl="engine.* ulysses_sequence_parallel_size actor.ulysses_sequence_parallel_size actor.fsdp_config.*"
    ),
    SettingRow(MEGATRON, verl="actor.megatron.*"),
    SettingRow(
        OFFLOAD,
        verl=(
            "actor.fsdp_config.param_offload actor.fsdp_config.optimizer_offload actor.fsdp_config.offload_policy "
            "model.fsdp_config.cpu_offload model.fsdp_config.offload_params"
        ),
        openrlhf="adam_offload ref_offload ref_reward_offload ref.offload",
    ),
    SettingRow(
        GPUS,
        verl="trainer.n_gpus_per_node trainer.nnodes",
        openrlhf="actor_num_nodes actor_num_gpus_per_node ref_num_* reward_num_* ref.*",
    ),
    SettingRow(PROCESSES, "num_processes num_machines accelerate_config"),
    SettingRow(
        Rule("learner", lambda values, value: f"write learner={SHARDING.get(str(value), 'fsdp2_gpu')}, {RANKS}"),
        "distributed_type",
    ),
    SettingRow(named("model.dtype", ACCELERATE_TYPES, "it is off; model.dtype is auto here"), "mixed_precision"),
    SettingRow(
        OWN_PROCESSES,
        "compute_environment debug use_cpu machine_rank main_process_ip main_process_port main_training_function "
        "rdzv_backend same_network downcast_bf16 gpu_ids enable_cpu_affinity tpu_*",
    ),
    SettingRow(engines_mode, "vllm_mode"),
    SettingRow(
        COLOCATED,
        "vllm_enable_sleep_mode",
        openrlhf=(
            "vllm_enable_sleep deepspeed_enable_sleep fsdp2_enable_sleep colocate_all_models=train.colocate_all "
            "colocate_actor_ref colocate_critic_reward"
        ),
    ),
    SettingRow(
        "write replay=async, and set replay.max_staleness",
        openrlhf="async_train=train.async_enable async_queue_size partial_rollout",
    ),
    # files
    SettingRow(text("output"), "output_dir", "trainer.default_local_dir", "save_path=ckpt.output_dir"),
    SettingRow(counted("checkpoint.every_steps", is_never=True), "save_steps", "trainer.save_freq", "save_steps"),
    SettingRow(
        positive("checkpoint.keep"),
        "save_total_limit",
        "trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep",
        "max_ckpt_num=ckpt.max_num",
    ),
    SettingRow(saving, "save_strategy"),
    SettingRow(EPOCHS, "saves_per_epoch evals_per_epoch"),
    SettingRow(
        named(
            "resume",
            {"auto": "auto", "disable": "never", "false": "never"},
            others="its checkpoints can't be read here",
        ),
        verl="trainer.resume_mode",
    ),
    SettingRow(switched("resume", "auto"), openrlhf="load_checkpoint=ckpt.load_enable"),
    SettingRow(
        "its checkpoints can't be read here; model.path or model.adapter.path starts from weights",
        "resume_from_checkpoint",
    ),
    SettingRow("checkpoints are in the output folder", openrlhf="ckpt_path"),
    SettingRow(EXPORT, openrlhf="save_hf_ckpt=ckpt.save_hf disable_ds_ckpt save_hf_model"),
    SettingRow(
        "nothing is uploaded: rlpipe export writes a folder for transformers, PEFT and vLLM", "push_to_hub hub_*"
    ),
    SettingRow(counted("data.held_out.every_steps", is_never=True), "eval_steps", "trainer.test_freq", "eval_steps"),
    SettingRow("held-out rows are always evaluated at the start", verl="trainer.val_before_train"),
    SettingRow("evaluations take the likeliest tokens, with one answer to a prompt", verl="rollout.val_kwargs.*"),
    SettingRow(GREEDY, openrlhf="eval_temperature eval_n_samples_per_prompt eval.*"),
    # tracking
    SettingRow("every step is logged", "logging_steps", openrlhf="logging_steps"),
    SettingRow(tracker, "report_to", "trainer.logger"),
    SettingRow(weights_and_biases, "use_wandb", openrlhf="use_wandb=logger.wandb.key"),
    SettingRow(project_of("wandb"), "wandb_project"),
    SettingRow(wandb_mode, "wandb_mode"),
    SettingRow(switched("tracking.mlflow"), "use_mlflow"),
    SettingRow(project_of("mlflow"), "mlflow_experiment_name"),
    SettingRow("the environment variable MLFLOW_TRACKING_URI says where MLflow is", "mlflow_tracking_uri"),
    SettingRow(switched("tracking.trackio"), "use_trackio"),
    SettingRow(project_of("trackio"), "trackio_project_name"),
    SettingRow(text("tracking.project"), verl="trainer.project_name", openrlhf="wandb_project"),
    SettingRow(text("name"), "run_name wandb_name wandb_run_id", "trainer.experiment_name", "wandb_run_name"),
    SettingRow(switched("tracking.tensorboard"), "use_tensorboard"),
    SettingRow("tracking.tensorboard is on, in the output folder", openrlhf="use_tensorboard"),
    SettingRow("tracking.log_completions is a number of groups", "log_completions num_completions_to_print"),
    SettingRow(
        "the options of the file that it names are not read: import that file, too",
        "config",
        "config_path config_name defaults",
    ),
)

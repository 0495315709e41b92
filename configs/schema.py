"""Every option of a run: its home, its type, its default and one line on what it does."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

MISSING = "???"
"""OmegaConf's mark of an option without a default."""


def option(
    default: Any,
    doc: str,
    *,
    choices: tuple[str, ...] | None = None,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
) -> Any:
    """Declares an option; ``minimum`` and ``maximum`` are inclusive, ``above`` is exclusive. None always passes."""
    metadata = {"doc": doc, "choices": choices, "minimum": minimum, "above": above, "maximum": maximum}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Freezable:
    """A config that refuses changes once it has been validated."""

    def freeze(self) -> None:
        for entry in fields(self):  # type: ignore[arg-type]
            value = getattr(self, entry.name)
            for child in value.values() if isinstance(value, dict) else [value]:
                if isinstance(child, Freezable):
                    child.freeze()
            if isinstance(value, list):
                object.__setattr__(self, entry.name, tuple(value))
        object.__setattr__(self, "_frozen", True)

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "_frozen", False):
            raise AttributeError(f"the config is frozen: {type(self).__name__}.{name} can't be set after validation")
        object.__setattr__(self, name, value)


@dataclass(kw_only=True)
class AdapterConfig(Freezable):
    kind: str = option(
        "lora",
        "Train a LoRA adapter, one over a base in NF4 (QLoRA), or all weights.",
        choices=("none", "lora", "qlora"),
    )
    path: str | None = option(None, "A PEFT adapter to start from.")
    r: int = option(16, "Rank.", minimum=1)
    alpha: float = option(32.0, "Scale; the update is alpha / r times B·A.", above=0)
    dropout: float = option(0.0, "Dropout before A.", minimum=0, maximum=0.99)
    target_modules: Any = option("all-linear", "Module names, a regex, or all-linear.")
    target_parameters: list[str] = option([], "Names of parameters that are no linear layer's, such as experts'.")
    modules_to_save: list[str] = option([], "Names of modules that are trained as a whole beside the adapter.")
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r).")
    use_dora: bool = option(False, "Train direction and magnitude of each weight apart (DoRA).")
    merge: bool | None = option(
        None, "Engines are given whole models with the adapter in them; null: only where they can't serve it as it is."
    )


@dataclass(kw_only=True)
class WeightScaleRule(Freezable):
    name_pattern: str = option(MISSING, "A regex; the parameters whose names it matches are a group.")
    threshold: float = option(1.5, "Factor by which a standard deviation may leave the group's median.", above=1)
    dry_run: bool = option(False, "Report only.")


@dataclass(kw_only=True)
class ModelConfig(Freezable):
    path: str = option(MISSING, "A folder or a hub id of a transformers causal language model.")
    revision: str | None = option(None, "Hub revision.")
    tokenizer: str | None = option(None, "Another folder or hub id for the tokenizer.")
    chat_template: str | None = option(None, "A Jinja file that replaces the tokenizer's chat template.")
    dtype: str = option("bfloat16", "Type of weights and activations.", choices=("float32", "bfloat16", "float16"))
    attention: str = option(
        "sdpa",
        "transformers' attention implementation.",
        choices=("sdpa", "eager", "flex_attention", "flash_attention_2"),
    )
    trust_remote_code: bool = option(False, "Run code that comes with the model.")
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass.")
    reentrant_checkpointing: bool | None = option(
        None, "The form of it; null: reentrant for learner.strategy=zero3 and flex_attention, else the other."
    )
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    normalize_weight_scales: dict[str, WeightScaleRule] = field(default_factory=dict)
    prepare: str | None = option(
        None, "module:function, called with the config where model.path does not exist; it must make it."
    )


@dataclass(kw_only=True)
class HeldOutConfig(Freezable):
    size: int = option(0, "Rows split off the source by the seed and never trained on; 0 evaluates nothing.", minimum=0)
    path: str | None = option(None, "A file of its own with held-out rows.")
    split: str | None = option(None, "A split of the data set of its own with held-out rows (datasets).")
    every_steps: int = option(0, "Evaluate every so many steps; 0: at the start and the end only.", minimum=0)
    correct_at: float = option(1.0, "A rollout whose reward is at least this counts as correct in the accuracy.")
    correct_by: str | None = option(None, "The reward that this looks at, by name; null: the sum.")


@dataclass(kw_only=True)
class DataConfig(Freezable):
    source: str = option(MISSING, "Where rows come from.", choices=("jsonl", "parquet", "datasets", "reasoning_gym"))
    path: str | None = option(None, "File (jsonl, parquet), or folder or hub id (datasets).")
    name: str | None = option(None, "Configuration of the data set (datasets).")
    split: str = option("train", "Split of the data set (datasets).")
    task: str | None = option(None, "Name of the task (reasoning_gym).")
    task_args: dict[str, Any] = option({}, "Arguments of the task (reasoning_gym), such as size and seed.")
    prompt_column: str = option("prompt", "Column with the prompt: a text or chat messages.")
    transform: str | None = option(None, "module:function that returns (map_fn, {'remove_columns': [...]}).")
    transform_args: dict[str, Any] = option({}, "What the transform finds in its cfg beside the whole data config.")
    chat: bool = option(True, "Render text prompts through the chat template, as one user turn.")
    system_prompt: str | None = option(None, "A system turn before every chat prompt that has none.")
    chat_template_kwargs: dict[str, Any] = option({}, "Further arguments of the chat template.")
    tools: list[Any] = option([], "Tool schemas for the chat template.")
    completion_column: str = option("completion", "Column with the answer, for plain SFT rows.")
    messages_column: str = option("messages", "Column with the conversation, for chat SFT rows.")
    text_column: str | None = option(None, "Column with raw text, of which every token is trained (SFT, ebft_strided).")
    max_prompt_tokens: int = option(1024, "Longer prompts are skipped and counted.", minimum=1)
    shuffle: bool = option(True, "Permute the rows anew in each epoch, by the seed.")
    held_out: HeldOutConfig = field(default_factory=HeldOutConfig)


@dataclass(kw_only=True)
class AdvantageConfig(Freezable):
    name: str = option(
        "grpo",
        "How rewards become advantages.",
        choices=("grpo", "rloo", "group_norm", "reinforce", "reinforce_baseline"),
    )
    scale: str = option("group", "Standard deviation that divides them (grpo).", choices=("group", "batch", "none"))
    eps: float = option(1e-4, "Added to the standard deviation.", minimum=0)


@dataclass(kw_only=True)
class LossConfig(Freezable):
    name: str = option("clip", "The policy-gradient surrogate.", choices=("clip", "cispo", "reinforce"))
    level: str = option(
        "token",
        "The ratio of each token, the length-normalised product over the sequence (GSPO), or the plain product (RLOO).",
        choices=("token", "sequence", "sequence_product"),
    )
    clip_low: float = option(0.2, "The ratio is clipped below 1 minus this.", minimum=0)
    clip_high: float = option(
        0.2, "The ratio is clipped above 1 plus this; for cispo its bound is 1 plus this.", minimum=0
    )
    clip_delta: float | None = option(None, "Upper bound of the ratio for negative advantages.", above=1)
    aggregate: str = option(
        "token",
        "Mean over the step's tokens, over its sequences' means, or over a constant.",
        choices=("token", "sequence", "constant"),
    )
    beta: float = option(0.0, "Weight of the KL to the reference (k3).", minimum=0)
    entropy_coef: float = option(0.0, "Weight of the entropy bonus.", minimum=0)
    mask_truncated: bool = option(False, "Rollouts cut off at the length limit do not count in the loss.")


@dataclass(kw_only=True)
class CorrectionConfig(Freezable):
    mode: str = option(
        "token_truncate",
        "What becomes of w, the learner's probability over the sampler's, of a token or a whole sequence.",
        choices=("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"),
    )
    cap: float = option(2.0, "Bounds w to [1/cap, cap] (truncate), or drops what is outside (mask).", minimum=1)
    off_policy_threshold: float | None = option(
        None,
        "Drop sequences of negative advantage whose mean log-prob fell by more than this since sampling.",
        minimum=0,
    )
    bias_corrected_kl: bool = option(False, "Weigh the KL to the reference in the same way.")


@dataclass(kw_only=True)
class ReferenceConfig(Freezable):
    sync_steps: int = option(0, "Move the frozen copy of full training every so many steps; 0: never.", minimum=0)
    mixup: float = option(0.6, "Share of the new weights in each such move.", above=0, maximum=1)


@dataclass(kw_only=True)
class ServeConfig(Freezable):
    replicas: int = option(
        0, "Replicas of a Ray Serve deployment that score in place of processes of the run's own; 0: none.", minimum=0
    )
    max_replicas: int | None = option(None, "Replicas under load; null: no more than replicas.", minimum=1)
    batch_groups: int = option(8, "Groups that a replica scores at one time.", minimum=1)
    batch_wait_s: float = option(0.02, "Seconds that a group waits for others to be scored with.", minimum=0)
    health_check_s: float = option(10.0, "Seconds between looks at a replica.", above=0)


@dataclass(kw_only=True)
class FeatureConfig(Freezable):
    layers: list[float] = option([0.25, 0.5, 0.75], "Depths whose hidden states are features, as shares of the layers.")
    normalize_layers: bool = option(True, "Bring the features of each depth to length 1.")
    pooling: str = option(
        "last_token",
        "How the features of tokens become those of a sequence, or of a block.",
        choices=("last_token", "mean_pooling", "completion_mean", "concat"),
    )
    whitening: str = option(
        "sample",
        "Decorrelate the features of a prompt's completions: between samples, between features, or not.",
        choices=("sample", "feature", "none"),
    )
    weights: str = option(
        "own",
        "Who computes the rewards of ebft.reward: replicas with a frozen copy of the initial model, or the learner's "
        "ranks, between their steps, with the adapter off.",
        choices=("own", "learner"),
    )
    micro_batch_tokens: int = option(16384, "Tokens of one forward pass, filling included.", minimum=1)
    num_cpus: float = option(1.0, "CPUs that Ray reserves for each actor (weights=own).", minimum=0)
    num_gpus: float = option(0.0, "GPUs that Ray reserves for each actor (weights=own).", minimum=0)
    timeout_s: float = option(120.0, "Seconds that scoring one group may take.", above=0)
    serve: ServeConfig = field(default_factory=lambda: ServeConfig(replicas=1))
    alignment_coef: float = option(1.0, "Weight of the match with the ground truth.", minimum=0)
    diversity_coef: float = option(1.0, "Weight of the likeness to the other completions.", minimum=0)


@dataclass(kw_only=True)
class StridedConfig(Freezable):
    stride: int = option(8, "Document tokens from one block to the next.", minimum=1)
    context_length: int = option(8, "Document tokens that the first block sees.", minimum=1)
    generate_tokens: int = option(8, "Tokens that a block generates.", minimum=1)
    temperature: float = option(0.6, "Divides the logits that they are drawn from.", above=0)
    min_completion_prefix: int = option(0, "Tokens of a row's completion before its first block.", minimum=0)


@dataclass(kw_only=True)
class EbftConfig(Freezable):
    reward: bool = option(False, "Reward the engines' completions by their features (kind=rl).")
    truth_column: str = option("ground_truth", "Column with the ground truth, a text or messages.")
    adaptive_max_tokens: bool = option(True, "Bound completions by the length of the ground truth, too.")
    gt_length_multiplier: float = option(1.5, "Times that length, and 64 at least.", above=0)
    features: FeatureConfig = field(default_factory=FeatureConfig)
    strided: StridedConfig = field(default_factory=StridedConfig)
    rl_coef: float = option(1.0, "Weight of the policy gradient.", minimum=0)
    ce_coef: float = option(0.0, "Weight of the cross-entropy on the ground truth.", minimum=0)


@dataclass(kw_only=True)
class AlgorithmConfig(Freezable):
    kind: str = option(
        "rl",
        "Reinforcement learning; supervised fine-tuning; or EBFT on blocks of raw text, without engines.",
        choices=("rl", "sft", "ebft_strided"),
    )
    num_steps: int = option(100, "Steps to train.", minimum=1)
    stop_loss: float | None = option(None, "SFT ends once the mean loss of its last ten steps is below this.", above=0)
    groups_per_step: int = option(8, "Prompts of a step; for SFT, rows of a step.", minimum=1)
    group_size: int = option(8, "Rollouts of a prompt.", minimum=1)
    num_epochs_per_step: int = option(1, "Passes over the step's rollouts.", minimum=1)
    num_minibatches: int = option(1, "Optimizer updates of each pass.", minimum=1)
    combine: str = option(
        "sum_then_normalize",
        "Weighted sum of the rewards first, or their normalisation first (GDPO).",
        choices=("sum_then_normalize", "normalize_then_sum"),
    )
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    ebft: EbftConfig = field(default_factory=EbftConfig)


@dataclass(kw_only=True)
class SamplingConfig(Freezable):
    temperature: float = option(1.0, "Divides the logits, here and in the learner.", above=0)
    top_p: float = option(1.0, "Nucleus sampling.", above=0, maximum=1)
    top_k: int = option(0, "Sample from the k likeliest; 0: from all.", minimum=0)
    min_p: float = option(0.0, "Drop tokens below this share of the likeliest one's probability.", minimum=0, maximum=1)
    repetition_penalty: float = option(1.0, "Above 1 discourages repetition.", above=0)
    max_tokens: int = option(256, "Longest completion.", minimum=1)
    stop: list[str] = option([], "Strings that end a completion.")
    stop_token_ids: list[int] = option([], "Further token ids that end a completion.")
    guided_regex: str | None = option(None, "Completions must match this (vllm).")
    guided_json: Any = option(None, "Completions must be JSON of this schema (vllm).")
    extra: dict[str, Any] = option({}, "Further sampling arguments of the engine, by name.")


@dataclass(kw_only=True)
class RolloutConfig(Freezable):
    engine: str = option("auto", "auto takes vllm where it can be imported.", choices=("auto", "vllm", "hf"))
    num_engines: int = option(1, "Rollout actors.", minimum=1)
    num_cpus: float = option(1.0, "CPUs that Ray reserves for an engine.", minimum=0)
    num_gpus: float = option(0.0, "GPUs that Ray reserves for an engine.", minimum=0)
    resources: dict[str, float] = option({}, "Custom Ray resources of an engine, for example to pin it to nodes.")
    num_threads: int | None = option(None, "CPU threads of an engine; null: its whole CPUs.", minimum=1)
    tensor_parallel_size: int = option(1, "GPUs that share one vLLM engine.", minimum=1)
    max_model_len: int | None = option(None, "Longest prompt and completion; null: their limits' sum.", minimum=1)
    engine_args: dict[str, Any] = option({}, "Further arguments of the engine, by name.")
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


@dataclass(kw_only=True)
class RewardConfig(Freezable):
    path: str = option(MISSING, "package.module:name, or file.py:name, of a function or RewardActor.")
    weight: float = option(1.0, "Factor in the sum.")
    timeout_s: float = option(60.0, "Seconds that scoring one group may take.", above=0)
    num_processes: int | None = option(
        None, "Processes of its own; null: functions share scoring.num_processes, others have 1.", minimum=1
    )
    num_cpus: float = option(1.0, "CPUs that Ray reserves for each process of its own.", minimum=0)
    num_gpus: float = option(0.0, "GPUs that Ray reserves for each process of its own.", minimum=0)
    isolation: str = option(
        "process",
        "sandbox: each call in a fresh process without network, for code that models wrote.",
        choices=("process", "sandbox"),
    )
    memory_gb: float | None = option(
        None,
        "GiB that a process of its own, or a sandboxed call, may take; null: scoring.memory_gb for functions without "
        "a GPU, else no limit.",
        above=0,
    )
    fail: str = option(
        "skip_group",
        "What a failure does: drop the group, count as 0, or stop the run.",
        choices=("skip_group", "zero", "raise"),
    )
    kwargs: dict[str, Any] = option({}, "Keyword arguments for the function, or for the class.")
    serve: ServeConfig = field(default_factory=ServeConfig)

    @property
    def is_served(self) -> bool:
        return self.serve.replicas > 0


@dataclass(kw_only=True)
class ScoringConfig(Freezable):
    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    num_processes: int = option(1, "Processes that the reward functions share.", minimum=1)
    num_cpus: float = option(0.5, "CPUs that Ray reserves for each of them.", minimum=0)
    on_rollouts_scored: str | None = option(
        None, "package.module:name, or file.py:name, of a function that is given scored groups, in its own process."
    )
    memory_gb: float | None = option(
        4.0, "GiB that a process of functions may take beyond what it has at its start; null: no limit.", above=0
    )


@dataclass(kw_only=True)
class ReplayConfig(Freezable):
    max_staleness: int = option(
        0, "Versions that a rollout may lag behind the step it trains; 0: synchronous.", minimum=0
    )
    streaming: bool = option(True, "Score each group as soon as it is generated; false: a whole step's at once.")
    skip_zero_advantage: bool = option(True, "Leave out rollouts that have no gradient, as their advantage is 0.")
    refill_attempts: int = option(
        0, "Times that another prompt replaces a group whose rewards are all the same (DAPO); 0: never.", minimum=0
    )
    reuse_groups: int = option(
        0, "Newest groups with differing rewards that are kept, to stand beside later ones without; 0: none.", minimum=0
    )
    reroll_after: float | None = option(
        None, "Prompts of which no rollout earned anything come back after this share of the run.", above=0, maximum=1
    )
    reroll_below: float = option(0.0, "Rewards up to this are nothing earned.")
    rerolls_per_step: int = option(1, "The most prompts that come back in a step.", minimum=1)


@dataclass(kw_only=True)
class LedgerConfig(Freezable):
    folder: str | None = option(
        None, "Folder on the replay actor's own disk, where output lies on a network file system; null: output."
    )
    keep_steps: int = option(
        10, "Steps behind the newest checkpoint whose groups can still be read, with their tokens.", minimum=0
    )


@dataclass(kw_only=True)
class OptimizerConfig(Freezable):
    name: str = option(
        "adamw",
        "AdamW with moments in float32, in 8 bit, or in 8 bit and paged out to the CPU where a GPU is full.",
        choices=("adamw", "adamw_8bit", "paged_adamw_8bit"),
    )
    lr: float = option(1e-6, "Peak learning rate.", minimum=0)
    betas: list[float] = option([0.9, 0.999], "Decay of the moments.")
    eps: float = option(1e-8, "Added to the denominator.", above=0)
    weight_decay: float = option(0.0, "Decoupled weight decay.", minimum=0)


@dataclass(kw_only=True)
class ScheduleConfig(Freezable):
    name: str = option("constant", "Shape after the warm-up.", choices=("constant", "linear", "cosine"))
    warmup_steps: int = option(0, "Steps of linear warm-up.", minimum=0)
    min_ratio: float = option(0.0, "Floor as a share of the peak.", minimum=0, maximum=1)


@dataclass(kw_only=True)
class FsdpConfig(Freezable):
    wrap: Any = option(
        "blocks", "What is gathered at one time: blocks (the model's layers), size, none, or the names of classes."
    )
    min_num_params: int = option(
        100_000_000, "wrap=size: modules with at least so many parameters, whose children have fewer.", minimum=1
    )
    reshard_after_forward: bool = option(True, "Free a block's gathered parameters after its forward pass.")
    cpu_offload: bool = option(False, "Keep parameters, gradients and optimizer state on the CPU.")


@dataclass(kw_only=True)
class Zero3Config(Freezable):
    offload_optimizer: bool = option(False, "Keep the optimizer's state on the CPU, and update there.")
    offload_parameters: bool = option(False, "Keep the parameters on the CPU while no module needs them.")


@dataclass(kw_only=True)
class LearnerConfig(Freezable):
    strategy: str = option(
        "single",
        "How the policy is spread over the ranks: not at all, by torch, or by DeepSpeed.",
        choices=("single", "fsdp2", "zero3"),
    )
    num_ranks: int = option(1, "Learner processes.", minimum=1)
    num_cpus: float = option(1.0, "CPUs that Ray reserves for a rank.", minimum=0)
    num_gpus: float = option(0.0, "GPUs that Ray reserves for a rank.", minimum=0, maximum=1)
    resources: dict[str, float] = option({}, "Custom Ray resources of a rank.")
    num_threads: int | None = option(None, "CPU threads of a rank; null: its whole CPUs.", minimum=1)
    max_tokens_per_microbatch: int = option(8192, "Packed tokens of one forward pass.", minimum=1)
    logprob_chunk_tokens: int = option(1024, "Tokens whose logits exist at one time.", minimum=1)
    max_grad_norm: float | None = option(1.0, "Gradients are clipped to this global norm.", above=0)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    fsdp: FsdpConfig = field(default_factory=FsdpConfig)
    zero3: Zero3Config = field(default_factory=Zero3Config)
    max_bad_steps: int = option(
        3, "Steps in a row with a loss or gradient that is not finite, before the run stops.", minimum=1
    )
    collective_timeout_s: float = option(
        1800.0, "Seconds that ranks wait for each other, before the group begins again.", above=0
    )
    max_failures: int = option(
        3, "Deaths of a rank without a new step in between, before the run stops; each restarts the group.", minimum=0
    )


def reentrant_checkpointing(model: ModelConfig, learner: LearnerConfig) -> bool:
    """Whether gradient checkpointing takes torch's reentrant form."""
    if model.reentrant_checkpointing is not None:
        return model.reentrant_checkpointing
    return learner.strategy == "zero3" or model.attention == "flex_attention"


def serves_adapter(model: ModelConfig) -> bool:
    """Whether engines serve the adapter beside the model of ``model.path``; else they are given whole models."""
    adapter = model.adapter
    merges = needs_merging(model) if adapter.merge is None else adapter.merge
    return adapter.kind != "none" and not merges


def needs_merging(model: ModelConfig) -> bool:
    """Whether the adapter is more than vLLM serves, A and B of linear layers over the base as its files have it."""
    adapter = model.adapter
    return bool(adapter.use_dora or adapter.modules_to_save or adapter.target_parameters or mends_weights(model))


def mends_weights(model: ModelConfig) -> bool:
    """Whether the base is not what its files have."""
    return any(not rule.dry_run for rule in model.normalize_weight_scales.values())


@dataclass(kw_only=True)
class WeightsConfig(Freezable):
    transport: str = option(
        "object_store",
        "How weights reach the engines: through Ray's object store; whole models also by vLLM's transfer between GPUs.",
        choices=("object_store", "nccl"),
    )
    on_update: str = option(
        "wait",
        "Running sequences finish on the version they began with, or go on with the new one (vllm).",
        choices=("wait", "inflight"),
    )
    bucket_bytes: int = option(256 * 2**20, "Largest bucket of full weights.", minimum=2**10)
    timeout_s: float = option(120.0, "Seconds an engine may take to load a version.", above=0)


@dataclass(kw_only=True)
class CheckpointConfig(Freezable):
    every_steps: int = option(50, "Steps between checkpoints; 0: only at the end.", minimum=0)
    keep: int = option(2, "Newest checkpoints that stay.", minimum=1)


@dataclass(kw_only=True)
class TrackingConfig(Freezable):
    progress: str = option(
        "auto", "Live display in a terminal, plain lines, or none.", choices=("auto", "live", "plain", "none")
    )
    tensorboard: bool = option(True, "Write TensorBoard event files.")
    ray_metrics: bool = option(True, "Export the metrics to Ray's dashboard and Prometheus.")
    wandb: bool = option(False, "Log to Weights & Biases.")
    wandb_mode: str = option("online", "offline needs no account.", choices=("online", "offline"))
    wandb_project: str = option("rlpipe", "Project in Weights & Biases.")
    log_completions: int = option(2, "Groups whose texts are kept of every step, in completions.jsonl.", minimum=0)


@dataclass(kw_only=True)
class ClusterConfig(Freezable):
    address: str | None = option(None, "Ray cluster to join; null: RAY_ADDRESS, or a local one is started.")
    num_cpus: int | None = option(None, "CPUs of a local cluster; null: enough for the config's actors.", minimum=1)
    log_to_driver: bool = option(False, "Print what the actors print, here too.")
    schedule_timeout_s: float = option(30.0, "Seconds after which an actor that can't be placed is reported.", above=0)
    start_timeout_s: float = option(600.0, "Seconds an actor may take to load its model.", above=0)
    step_timeout_s: float = option(3600.0, "Seconds a step may take.", above=0)
    call_timeout_s: float = option(120.0, "Seconds that a replay or weights actor may take to answer.", above=0)
    suspect_after_s: float = option(
        30.0, "Seconds of silence after which an engine gets no more prompts; it answers every few seconds.", above=0
    )
    dead_after_s: float = option(120.0, "Seconds of silence after which an engine is replaced.", above=0)
    max_engine_failures: int = option(
        3, "Deaths of an engine without a finished group in between, before the run stops.", minimum=0
    )
    max_outage_s: float = option(
        600.0, "Seconds without any engine that serves, before the run checkpoints and stops.", above=0
    )


@dataclass(kw_only=True)
class Config(Freezable):
    name: str = option("run", "Name of the run, on the dashboard and in the trackers.")
    output: str = option("outputs/${name}", "Folder of the run.")
    seed: int = option(0, "Seed of everything that is drawn.", minimum=0)
    resume: str = option("auto", "auto goes on from the newest checkpoint in output; never; or a checkpoint's path.")
    resume_changes: str = option(
        "refuse",
        "What happens where a resumed run has other options that change training.",
        choices=("refuse", "allow"),
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

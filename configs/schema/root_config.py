"""Every option of a run: the tree of its sections, and the sections that are too small for a file."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.health_config import HealthLimits
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.option import MAX_PROCESSES, MAX_SECONDS, MAX_STEPS, MAX_WEIGHT, NAME, Freezable, option
from rlpipe.configs.schema.rollout_config import EnvironmentConfig, RolloutConfig, ScoringConfig


@dataclass(kw_only=True)
class ReplayConfig(Freezable):
    """Options of the replay buffer: staleness, and groups without signal."""

    max_staleness: int = option(
        0, "Versions that a rollout may lag behind the step it trains; 0: synchronous.", minimum=0, maximum=MAX_STEPS
    )
    streaming: bool = option(True, "Score each group as soon as it is generated; false: all groups of a step at once.")
    skip_zero_advantage: bool = option(True, "Skip rollouts whose advantage is 0, which have no gradient.")
    refill_attempts: int = option(
        0,
        "How many times another prompt may replace a group whose rewards are all the same (DAPO); 0: never.",
        minimum=0,
        maximum=1_000_000,
    )
    reuse_groups: int = option(
        0,
        "Recent groups with differing rewards to keep, to replace later groups with equal rewards; 0: none.",
        minimum=0,
        maximum=1_000_000,
    )
    reroll_after: float | None = option(
        None,
        "From this share of the run on, prompts whose rollouts all had no reward are sampled again.",
        above=0,
        maximum=1,
    )
    reroll_below: float = option(0.0, "Rewards up to this count as no reward.", minimum=-MAX_WEIGHT, maximum=MAX_WEIGHT)
    rerolls_per_step: int = option(
        1, "Maximum number of prompts that are sampled again per step.", minimum=1, maximum=1_000_000
    )


@dataclass(kw_only=True)
class LedgerConfig(Freezable):
    """Options of the ledger, which records a run's groups."""

    folder: str | None = option(
        None, "Folder on the replay actor's own disk, if output is on a network file system; null: output."
    )
    keep_steps: int = option(
        10, "Number of steps before the newest checkpoint whose tokens are kept.", minimum=0, maximum=MAX_STEPS
    )


@dataclass(kw_only=True)
class WeightsConfig(Freezable):
    """Options of the transfer of weights to the engines."""

    transport: str = option(
        "object_store",
        "How weights reach the engines: through Ray's object store; whole models also by vLLM's transfer between GPUs.",
        choices=("object_store", "nccl"),
    )
    serve: str = option(
        "auto",
        "Engines apply the adapter at run time, or merge each version into their weights; auto: merged if it can't be "
        "applied, or if merging is faster on a CPU.",
        choices=("auto", "adapter", "merged"),
    )
    on_update: str = option(
        "wait",
        "Running sequences finish on the version they began with, or continue with the new one (vllm).",
        choices=("wait", "inflight"),
    )
    every_steps: int = option(
        1,
        "Engines get every n-th version and the last; needs a replay.max_staleness of at least n - 1.",
        minimum=1,
        maximum=MAX_STEPS,
    )
    bucket_bytes: int = option(256 * 2**20, "Maximum size of a bucket of full weights.", minimum=2**10, maximum=2**40)
    timeout_s: float = option(120.0, "Seconds an engine may take to load a version.", above=0, maximum=MAX_SECONDS)

    def publishes(self, version: int, num_steps: int) -> bool:
        """Return whether engines get a version: every n-th one, and the last."""
        return version % self.every_steps == 0 or version == num_steps


@dataclass(kw_only=True)
class CheckpointConfig(Freezable):
    """Options of the checkpoints."""

    every_steps: int = option(50, "Steps between checkpoints; 0: only at the end.", minimum=0, maximum=MAX_STEPS)
    keep: int = option(2, "Number of newest checkpoints to keep.", minimum=1, maximum=1_000_000)


@dataclass(kw_only=True)
class TrackingConfig(Freezable):
    """Options of the trackers and the terminal's display."""

    progress: str = option(
        "auto", "Live display in a terminal, plain lines, or none.", choices=("auto", "live", "plain", "none")
    )
    tensorboard: bool = option(True, "Write TensorBoard event files.")
    ray_metrics: bool = option(True, "Export the metrics to Ray's dashboard and Prometheus.")
    wandb: bool = option(False, "Log to Weights & Biases.")
    wandb_mode: str = option("online", "offline needs no account.", choices=("online", "offline"))
    mlflow: bool = option(False, "Log to MLflow, at MLFLOW_TRACKING_URI or in the output folder.")
    trackio: bool = option(False, "Log to Trackio.")
    project: str = option("rlpipe", "Project in Weights & Biases and Trackio, and experiment in MLflow.")
    log_completions: int = option(
        8,
        "Number of groups per step whose texts are written to completions.jsonl; 0: none, and none of held-out "
        "prompts to evaluations.jsonl either.",
        minimum=0,
        maximum=1_000_000,
    )


@dataclass(kw_only=True)
class ClusterConfig(Freezable):
    """Options of the Ray cluster, and time limits of its actors."""

    address: str | None = option(None, "Ray cluster to join; null: the one at RAY_ADDRESS, or a new local one.")
    num_cpus: int | None = option(
        None,
        "CPUs of a local cluster; null: the machine's, or what the run reserves if that is more.",
        minimum=1,
        maximum=MAX_PROCESSES,
    )
    preload: bool = option(
        True, "Fork the processes of a local cluster from preloaded ones, for a faster start (Linux)."
    )
    dashboard: bool = option(True, "Start Ray's dashboard with a local cluster.")
    log_to_driver: bool = option(False, "Also print the actors' output in this terminal.")
    schedule_timeout_s: float = option(
        30.0, "Seconds to wait for hosts and free resources before the run ends.", above=0, maximum=MAX_SECONDS
    )
    start_timeout_s: float = option(600.0, "Seconds an actor may take to load its model.", above=0, maximum=MAX_SECONDS)
    step_timeout_s: float = option(
        3600.0, "Seconds that a step may take before the run ends.", above=0, maximum=MAX_SECONDS
    )
    call_timeout_s: float = option(
        120.0, "Seconds that a replay or weights actor may take to answer.", above=0, maximum=MAX_SECONDS
    )
    suspect_after_s: float = option(
        30.0, "Seconds without a heartbeat after which an engine gets no more prompts.", above=0, maximum=MAX_SECONDS
    )
    dead_after_s: float = option(
        120.0, "Seconds without a heartbeat after which an engine is replaced.", above=0, maximum=MAX_SECONDS
    )
    max_engine_failures: int = option(
        3,
        "Deaths of an engine without a finished group in between, after which the run continues without it.",
        minimum=0,
        maximum=MAX_STEPS,
    )
    max_outage_s: float = option(
        600.0, "Seconds without a serving engine before the run checkpoints and stops.", above=0, maximum=MAX_SECONDS
    )


@dataclass(kw_only=True)
class Config(Freezable):
    """A run's whole config, with one field for each section."""

    name: str = option("run", "Name of the run, on the dashboard and in the trackers.", text=NAME)
    output: str = option("outputs/${name}", "Folder of the run.")
    seed: int = option(0, "Seed of all random choices.", minimum=0, maximum=2**32 - 1)
    resume: str = option("auto", "auto: continue from the newest checkpoint in output; never; or a checkpoint's path.")
    resume_changes: str = option(
        "refuse", "What to do if a resumed run differs in options that change training.", choices=("refuse", "allow")
    )
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    scoring: ScoringConfig = field(default_factory=ScoringConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    ledger: LedgerConfig = field(default_factory=LedgerConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    health: dict[str, HealthLimits] = field(default_factory=dict)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)

    @property
    def engine_dtype(self) -> str:
        """Type that the engines compute in."""
        return self.rollout.dtype or self.model.dtype

    @property
    def resume_command(self) -> str:
        """The command that continues the run from its newest checkpoint, in words."""
        return "the same command" if self.resume == "auto" else "the same command with resume=auto"


def longest_conversation(config: Config) -> int:
    """Return the limit on the tokens of a prompt and its completion, or of an episode."""
    return config.rollout.max_model_len or config.data.max_prompt_tokens + config.rollout.sampling.max_tokens


def max_sampled_tokens(config: Config) -> int:
    """Return the limit on the tokens that the policy samples for a completion, or in all turns of an episode."""
    turns = config.environment.max_turns if config.environment.is_used else 1
    return min(longest_conversation(config) - config.data.max_prompt_tokens, turns * config.rollout.sampling.max_tokens)

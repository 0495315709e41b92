"""Options of rollout (how completions are sampled), of scoring (how they are rewarded) and of episodes."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from rlpipe.configs.schema.option import (
    CHARACTERS,
    DTYPES,
    MAX_GIB,
    MAX_PROCESSES,
    MAX_SECONDS,
    MAX_TOKENS,
    MAX_WEIGHT,
    MISSING,
    Freezable,
    option,
)


@dataclass(kw_only=True)
class SamplingConfig(Freezable):
    """Options of the distribution that completions are sampled from."""

    temperature: float = option(
        1.0,
        "Sampling temperature, which divides the logits in the engine and in the learner; vllm takes no lower one.",
        minimum=0.01,
        maximum=100,
    )
    top_p: float = option(1.0, "Nucleus sampling.", above=0, maximum=1)
    top_k: int = option(0, "Sample from the k most likely tokens; 0: from all.", minimum=0, maximum=2**31 - 1)
    min_p: float = option(
        0.0, "Drop tokens whose probability is below this share of the most likely token's.", minimum=0, maximum=1
    )
    repetition_penalty: float = option(1.0, "Above 1 discourages repetition.", above=0, maximum=100)
    max_tokens: int = option(256, "Maximum number of tokens of a completion.", minimum=1, maximum=MAX_TOKENS)
    stop: list[str] = option([], "Strings that end a completion.", text=CHARACTERS)
    stop_token_ids: list[int] = option([], "Further token ids that end a completion.", minimum=0, maximum=2**31 - 1)
    guided_regex: str | None = option(None, "Completions must match this (vllm).", text=CHARACTERS)
    guided_json: Any = option(None, "Completions must be JSON of this schema (vllm).", text=CHARACTERS)
    extra: dict[str, Any] = option({}, "Further sampling arguments of the engine, by name.")


@dataclass(kw_only=True)
class RolloutConfig(Freezable):
    """Options of the rollout engines."""

    engine: str = option("auto", "auto: vllm if it can be imported, else hf.", choices=("auto", "vllm", "hf"))
    num_engines: int = option(1, "Number of rollout engines.", minimum=1, maximum=MAX_PROCESSES)
    num_cpus: float = option(1.0, "CPUs that Ray reserves for an engine.", minimum=0, maximum=MAX_PROCESSES)
    num_gpus: float = option(0.0, "GPUs that Ray reserves for an engine.", minimum=0, maximum=MAX_PROCESSES)
    resources: dict[str, float] = option(
        {}, "Custom Ray resources of an engine, for example to pin it to nodes.", minimum=0, maximum=MAX_WEIGHT
    )
    num_threads: int | None = option(
        None, "CPU threads of an engine; null: its whole CPUs.", minimum=1, maximum=MAX_PROCESSES
    )
    dtype: str | None = option(
        None,
        "Type of the engines' weights and activations, if it is another than model.dtype; needs an "
        "algorithm.correction.mode other than none.",
        choices=DTYPES,
    )
    tensor_parallel_size: int = option(1, "GPUs that share one vLLM engine.", minimum=1, maximum=MAX_PROCESSES)
    max_model_len: int | None = option(
        None,
        "Maximum length of prompt plus completion; null: the sum of their limits.",
        minimum=1,
        maximum=2 * MAX_TOKENS,
    )
    engine_args: dict[str, Any] = option({}, "Further arguments of the engine, by name.")
    sampling: SamplingConfig = field(default_factory=SamplingConfig)


ENGINE_ARGUMENTS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "revision": "model.revision",
    "tokenizer_revision": "model.revision",
    "dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "mm_processor_kwargs": "model.processor_kwargs",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "pipeline_parallel_size": "rollout.tensor_parallel_size",
    "data_parallel_size": "rollout.num_engines",
    "max_model_len": "rollout.max_model_len",
    "enable_lora": "model.adapter.kind",
    "max_loras": "weights.on_update",
    "max_lora_rank": "model.adapter.r",
    "lora_target_modules": "model.adapter.target_modules",
    "weight_transfer_config": "weights.transport",
    "logprobs_mode": "",
    "worker_extension_cls": "",
}
"""Engine arguments that rlpipe sets, each with the option that it is set from, or an empty string."""
SAMPLING_ARGUMENTS = {
    **{entry.name: f"rollout.sampling.{entry.name}" for entry in fields(SamplingConfig) if entry.name != "extra"},
    "n": "algorithm.group_size",
    "seed": "seed",
    "structured_outputs": "rollout.sampling.guided_regex or guided_json",
    "logprobs": "",
    "prompt_logprobs": "",
    "logprob_token_ids": "",
    "flat_logprobs": "",
    "output_kind": "",
    "detokenize": "",
}
"""Sampling arguments that rlpipe sets, each with the option that it is set from, or an empty string."""


@dataclass(kw_only=True)
class ServeConfig(Freezable):
    """Options of a Ray Serve deployment that scores groups."""

    replicas: int = option(
        0,
        "Replicas of a Ray Serve deployment that score instead of the run's own processes; 0: none.",
        minimum=0,
        maximum=MAX_PROCESSES,
    )
    max_replicas: int | None = option(
        None, "Maximum number of replicas under load; null: replicas.", minimum=1, maximum=MAX_PROCESSES
    )
    batch_groups: int = option(8, "Maximum number of groups that a replica scores together.", minimum=1, maximum=10_000)
    batch_wait_s: float = option(
        0.02, "Seconds that a replica waits for more groups to score together.", minimum=0, maximum=3600
    )
    health_check_s: float = option(10.0, "Seconds between health checks of a replica.", above=0, maximum=86_400)


@dataclass(kw_only=True)
class RewardConfig(Freezable):
    """Options of one reward, and of the processes that compute it."""

    path: str = option(MISSING, "package.module:name, or file.py:name, of a function or RewardActor.")
    weight: float = option(1.0, "Weight of the reward in the sum.", minimum=-MAX_WEIGHT, maximum=MAX_WEIGHT)
    timeout_s: float = option(60.0, "Maximum seconds to score one group.", above=0, maximum=MAX_SECONDS)
    num_processes: int | None = option(
        None,
        "Processes for this reward alone; null: functions share scoring.num_processes, others have 1.",
        minimum=1,
        maximum=MAX_PROCESSES,
    )
    num_cpus: float = option(
        1.0, "CPUs that Ray reserves for each of the reward's own processes.", minimum=0, maximum=MAX_PROCESSES
    )
    num_gpus: float = option(
        0.0, "GPUs that Ray reserves for each of the reward's own processes.", minimum=0, maximum=MAX_PROCESSES
    )
    isolation: str = option(
        "process",
        "sandbox: each call in a fresh process without network, for code that models wrote.",
        choices=("process", "sandbox"),
    )
    memory_gb: float | None = option(
        None,
        "GiB that each of its own processes, or a sandboxed call, may use; null: scoring.memory_gb for functions "
        "without a GPU, else no limit.",
        above=0,
        maximum=MAX_GIB,
    )
    fail: str = option(
        "skip_group",
        "If the reward fails: drop the group, count it as 0, or stop the run.",
        choices=("skip_group", "zero", "raise"),
    )
    kwargs: dict[str, Any] = option({}, "Keyword arguments for the function, or for the class.")
    serve: ServeConfig = field(default_factory=ServeConfig)

    @property
    def is_served(self) -> bool:
        return self.serve.replicas > 0


@dataclass(kw_only=True)
class ScoringConfig(Freezable):
    """Options of scoring: the rewards, and the processes that they share."""

    rewards: dict[str, RewardConfig] = field(default_factory=dict)
    num_processes: int = option(1, "Processes that the reward functions share.", minimum=1, maximum=MAX_PROCESSES)
    num_cpus: float = option(
        0.5, "CPUs that Ray reserves for each of these processes.", minimum=0, maximum=MAX_PROCESSES
    )
    on_rollouts_scored: str | None = option(
        None,
        "package.module:name, or file.py:name, of a function that is called with scored groups, in its own process.",
    )
    memory_gb: float | None = option(
        4.0,
        "GiB that a process of reward functions may use beyond what it has at its start; null: no limit.",
        above=0,
        maximum=MAX_GIB,
    )


@dataclass(kw_only=True)
class EnvironmentConfig(Freezable):
    """Options of episodes: their environment, tools or agent."""

    path: str | None = option(
        None,
        "package.module:name, or file.py:name, of an Environment class; null: episodes begin with the row's prompt.",
    )
    kwargs: dict[str, Any] = option({}, "Keyword arguments for the class.")
    tools: list[Any] = option(
        [],
        "Tools that the policy may call: functions as package.module:name or file.py:name, and MCP servers as {mcp: "
        "{command: [program, argument, ...], env: {NAME: value}}}.",
    )
    agent: Any = option(
        None,
        "A program that calls a chat completions endpoint: file.py:name of a function, {command: [program, "
        "argument, ...]}, {nemo_gym: URL of the head server, name: AGENT}, or {verifiers: tcp://HOST:PORT}.",
    )
    host: str = option("127.0.0.1", "Address of the endpoint that agents call.")
    port: int | None = option(
        None, "Port of the endpoint that agents call; null: any free one.", minimum=1, maximum=65_535
    )
    weight: float = option(
        1.0, "Weight of the environment's reward in the sum.", minimum=-MAX_WEIGHT, maximum=MAX_WEIGHT
    )
    max_turns: int = option(8, "Maximum number of the policy's turns in an episode.", minimum=1, maximum=100_000)
    timeout_s: float = option(120.0, "Maximum seconds of an episode.", above=0, maximum=MAX_SECONDS)
    tool_timeout_s: float = option(10.0, "Maximum seconds of a tool call.", above=0, maximum=MAX_SECONDS)
    isolation: str = option(
        "process",
        "Where an environment, tools, or a function as an agent run: in threads of the process that plays (thread), "
        "each episode and each call of a tool in a process of its own (process), or in one without network (sandbox).",
        choices=("thread", "process", "sandbox"),
    )
    memory_gb: float | None = option(
        None, "GiB that an episode's own process, or that of a call, may use; null: no limit.", above=0, maximum=MAX_GIB
    )
    history: str = option(
        "keep",
        "Earlier turns in the policy's context: as it sampled them (keep), or as the chat template renders them again, "
        "such as without their thoughts (template).",
        choices=("keep", "template"),
    )
    parser: str = option(
        "auto",
        "How tool calls are read: hermes, json, a parser of vLLM, file.py:name of a function or class, or auto, by the "
        "chat template.",
    )
    on_error: str = option(
        "drop_episode",
        "If an environment or agent raises: drop the episode or its group, count it as 0, or stop the run.",
        choices=("drop_episode", "drop_group", "zero", "raise"),
    )
    num_processes: int = option(1, "Processes that play episodes.", minimum=1, maximum=MAX_PROCESSES)
    num_cpus: float = option(
        0.5, "CPUs that Ray reserves for each of these processes.", minimum=0, maximum=MAX_PROCESSES
    )
    concurrency: int = option(
        64, "Episodes that a process plays at the same time; others wait.", minimum=1, maximum=100_000
    )

    @property
    def is_used(self) -> bool:
        """Whether the run plays episodes."""
        return self.takes_rows or bool(self.tools)

    @property
    def takes_rows(self) -> bool:
        """Whether rows go to an environment or agent as they are, which may give a reward."""
        return self.path is not None or self.agent is not None

"""Options of the rollout engines and their sampling."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlpipe.configs.schema.option import Freezable, option


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

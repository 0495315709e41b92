"""The kind of weights that engines are sent, and the options that contradict it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rlpipe.configs.schema.model_config import ModelConfig, needs_merging, rescales_weights, serves_adapter
from rlpipe.configs.schema.root_config import Config, ReplayConfig, WeightsConfig

RENDEZVOUS_S = 300
"""Limit of vLLM's processes on waiting for each other, in seconds (torch's store, whose limit vLLM does not set)."""


def published_kind(model: ModelConfig, weights: WeightsConfig) -> Literal["lora", "merged", "full"]:
    """Return the ``WeightsKind`` of the versions that engines are sent."""
    if weights.serve == "merged":
        return "merged"
    return "lora" if serves_adapter(model) else "full"


def base_reader(config: Config) -> str | None:
    """Return the first reward that samples from the engines' base model (``engine=base``), or None."""
    rewards = config.scoring.rewards.items()
    return next((name for name, reward in rewards if reward.kwargs.get("engine") == "base"), None)


def check_serve(config: Config) -> Iterator[str]:
    """Yield why engines can't serve the adapter as ``weights.serve`` says."""
    model, serve = config.model, config.weights.serve
    prefix = f"weights.serve: {serve}"
    if serve == "auto":
        return
    if model.adapter.kind == "none":
        yield f"{prefix} is about adapters, and model.adapter.kind=none has none; set auto"
    elif model.adapter.merge:
        yield f"{prefix} sends adapters, and model.adapter.merge=true whole models; set serve=auto or merge=null"
    elif serve == "merged":
        yield from (f"{prefix} {problem}" for problem in unmergeable(config))
    elif needs_merging(model):
        yield f"{prefix} needs A and B of linear layers over an unchanged base, and this adapter has more; set auto"


def unmergeable(config: Config) -> Iterator[str]:
    """Yield why engines can't merge the adapter into their base, as the ends of sentences, with the fix."""
    if config.model.adapter.kind == "qlora":
        yield "computes every version from the base's files, which are not in NF4; set auto, or model.adapter.kind=lora"
    if rescales_weights(config.model):
        yield (
            "computes every version from the base's files, and model.normalize_weight_scales changes the base; set "
            "auto, or leave the rules out"
        )
    if config.weights.transport == "nccl":
        yield "sends adapters, and weights.transport=nccl whole models; set auto, or transport=object_store"
    if (name := base_reader(config)) is not None:
        yield f"leaves engines without the base, which scoring.rewards.{name} samples from (engine=base); set adapter"


def check_quantization(config: Config) -> Iterator[str]:
    if config.rollout.engine_args.get("quantization") and published_kind(config.model, config.weights) != "lora":
        yield (
            "rollout.engine_args.quantization: engines receive unquantized whole models, which quantized engines can't "
            "load; leave it out, or train an adapter that engines can serve"
        )


def check_transport(config: Config) -> Iterator[str]:
    if config.weights.transport != "nccl":
        return
    if serves_adapter(config.model):
        yield (
            "weights.transport: nccl sends whole models, and an adapter is small; set object_store, "
            "model.adapter.merge=true, or model=full"
        )
    if config.rollout.engine == "hf":
        yield "weights.transport: nccl needs vLLM; set rollout.engine=vllm, or object_store"
    if (config.learner.num_gpus > 0) != (config.rollout.num_gpus > 0):
        yield "weights.transport: nccl needs GPUs on both sides, or on none; set object_store, or num_gpus of both"
    if any(0 < num_gpus < 1 for num_gpus in (config.learner.num_gpus, config.rollout.num_gpus)):
        yield "weights.transport: NCCL refuses two processes on one GPU; set object_store, or num_gpus=1"
    if config.rollout.engine != "hf" and config.rollout.num_gpus > 0 and config.weights.timeout_s > RENDEZVOUS_S:
        yield (
            f"weights.timeout_s: before they send by NCCL, vLLM's processes wait for each other {RENDEZVOUS_S} s at "
            f"most; set {RENDEZVOUS_S} or less, or weights.transport=object_store"
        )


def check_updates(weights: WeightsConfig, replay: ReplayConfig) -> Iterator[str]:
    if weights.on_update == "inflight" and replay.max_staleness == 0:
        yield (
            "weights.on_update: inflight has no effect with replay.max_staleness=0, where no rollout is in flight "
            "during an update; set replay.max_staleness=1 or more, or wait"
        )
    if weights.every_steps > replay.max_staleness + 1:
        yield (
            f"weights.every_steps: {weights.every_steps} steps between two versions need rollouts that are "
            f"{weights.every_steps - 1} versions old; set replay.max_staleness={weights.every_steps - 1} or more"
        )

"""The choice of what engines serve: an adapter on top of the base, weights with it merged, or whole models."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig, needs_merging, rescales_weights
from rlpipe.configs.schema.root_config import Config, WeightsConfig
from rlpipe.configs.serving import base_reader, published_kind
from rlpipe.errors import ConfigError, ModelError
from rlpipe.models.model_files import is_quantized_model, read_num_experts, read_widths
from rlpipe.rollout.engine import MAX_RANK

ADAPTER_NS = 0.08
"""CPU time of an adapter's products per token, rank, and row or column of a weight (two cores with AVX-512)."""
FOLDING_NS = 18.0
"""CPU time per element of computing, checking, loading and packing a merged version, in the engine and the learner."""
MEAN_LENGTH = 0.5
"""Assumed mean length of completions, as a share of the longest."""


@dataclass(kw_only=True, frozen=True, slots=True)
class Serving:
    """The way in which engines serve versions, and why."""

    kind: Literal["lora", "merged", "full"]
    reason: str

    def __str__(self) -> str:
        """Describe the choice in a line for the user."""
        return f"{_TEXTS[self.kind]}: {self.reason}"


_TEXTS = {
    "lora": "engines apply the adapter at run time (weights.serve=adapter)",
    "merged": "engines merge each version's adapter into their weights (weights.serve=merged)",
    "full": "engines are sent whole models",
}


def settle_serving(config: Config, engine: Literal["vllm", "hf"]) -> tuple[Config, Serving]:
    """Return the config with ``weights.serve=auto`` replaced, unless engines are sent whole models, and the choice."""
    chosen = choose_serving(config, engine)
    serve = {"lora": "adapter", "merged": "merged", "full": config.weights.serve}[chosen.kind]
    return replace(config, weights=replace(config.weights, serve=serve)), chosen


def choose_serving(config: Config, engine: Literal["vllm", "hf"]) -> Serving:
    """Choose what this kind of engines serves; ``model.path`` is read for the model's widths and experts."""
    adapter, weights = config.model.adapter, config.weights
    if weights.serve != "auto":
        return Serving(kind=published_kind(config.model, weights), reason="as the config says")
    if (reason := _why_full_models(config)) is not None:
        return Serving(kind="full", reason=reason)
    reason = _why_merged(config.model, engine)
    if reason is not None:
        _check_mergeable(config, reason)
        return Serving(kind="merged", reason=reason)
    if (name := base_reader(config)) is not None:
        return Serving(kind="lora", reason=f"scoring.rewards.{name} samples from the base")
    if weights.on_update == "wait" and config.replay.max_staleness > 0:
        return Serving(kind="lora", reason="running sequences keep their version while others begin with the next")
    if _has_quantized_base(config):
        return Serving(kind="lora", reason="the base is quantized in the engines")
    if config.rollout.num_gpus > 0:
        return Serving(kind="lora", reason="the default on GPUs")
    tokens, least = _tokens_per_version(config), _least_tokens(config.model.path, adapter)
    few = f"about {tokens:,.0f} tokens per version and engine"
    if tokens > least:
        return Serving(kind="merged", reason=f"{few}, and merging pays from {least:,.0f}")
    return Serving(kind="lora", reason=f"{few}, and merging only pays from {least:,.0f}")


def _why_full_models(config: Config) -> str | None:
    """Return why engines need whole models, or None if an adapter is enough."""
    model = config.model
    if model.adapter.kind == "none":
        return "all weights are trained"
    if model.adapter.merge:
        return "model.adapter.merge=true"
    if config.weights.transport == "nccl":
        return "weights.transport=nccl"
    if rescales_weights(model):
        return "model.normalize_weight_scales changes the base"
    if needs_merging(model) and model.adapter.kind == "qlora":
        return f"{_feature(model.adapter)} over a base in NF4 can only be merged by the learner"
    if needs_merging(model) and not _is_safetensors(model.path):
        return f"{_feature(model.adapter)} can only be merged into a base in safetensors"
    return None


def serve_alone(model: ModelConfig, weights: WeightsConfig, engine: Literal["vllm", "hf"]) -> WeightsConfig:
    """Return how engines without a learner serve the model's adapter, with ``weights.serve=auto`` replaced.

    Raises ``ModelError`` if they can neither apply the adapter on top of the base nor merge it.
    """
    if model.adapter.path is None or weights.serve == "merged" or (reason := _why_merged(model, engine)) is None:
        return weights
    if weights.serve == "adapter":
        raise ModelError(f"{model.adapter.path}: {reason}; set weights.serve=auto")
    if is_quantized_model(model.path):
        raise ModelError(f"{model.adapter.path}: {reason}, and a quantized base takes no merge: use an unquantized one")
    if model.adapter.kind == "qlora" or not _is_safetensors(model.path):
        base = "in NF4" if model.adapter.kind == "qlora" else "that is not in safetensors"
        raise ModelError(
            f"{model.adapter.path}: {reason}, and engines can't merge into a base {base}: merge it first (rlpipe merge)"
        )
    return replace(weights, serve="merged")


def _check_mergeable(config: Config, reason: str) -> None:
    """Raise ``ConfigError`` if engines that have to merge the adapter, for ``reason``, can't."""
    why = f"engines have to merge the adapter, because {reason}"
    if (name := base_reader(config)) is not None:
        raise ConfigError(
            f"scoring.rewards.{name}: {why}, and then lack the base that engine=base samples from; leave it out, or "
            "use another adapter"
        )
    if _has_quantized_base(config):
        raise ConfigError(
            f"model.path: {why}, and the base is quantized; use an unquantized one, without "
            "rollout.engine_args.quantization, or another adapter"
        )


def _has_quantized_base(config: Config) -> bool:
    """Return whether engines hold the base in a type into which no adapter can be merged."""
    is_quantized = config.model.adapter.kind == "qlora" or bool(config.rollout.engine_args.get("quantization"))
    return is_quantized or is_quantized_model(config.model.path)


def _why_merged(model: ModelConfig, engine: Literal["vllm", "hf"]) -> str | None:
    """Return why engines can't apply the adapter on top of the base, or None if they can."""
    adapter = model.adapter
    if needs_merging(model):
        return f"they can't apply {_feature(adapter)} on top of the base"
    if adapter.kind != "lora":
        return None
    if engine == "vllm" and adapter.r > MAX_RANK:
        return f"vllm applies ranks of up to {MAX_RANK} on top of a base, and model.adapter.r={adapter.r}"
    if adapter.target_modules == "all-linear" and (num_experts := read_num_experts(model.path)) > 1:
        return f"all-linear includes the router and {num_experts} experts"
    return None


def _feature(adapter: AdapterConfig) -> str:
    return next(name for name in ("use_dora", "modules_to_save", "target_parameters") if getattr(adapter, name))


def _is_safetensors(path: str) -> bool:
    """Return whether a model's files are safetensors, as those on the hub are assumed to be."""
    folder = Path(path).expanduser()
    return not folder.is_dir() or any(folder.glob("*.safetensors"))


def _tokens_per_version(config: Config) -> float:
    algorithm, rollout = config.algorithm, config.rollout
    sequences = config.weights.every_steps * algorithm.groups_per_step * algorithm.group_size / rollout.num_engines
    return MEAN_LENGTH * sequences * rollout.sampling.max_tokens


def _least_tokens(path: str, adapter: AdapterConfig) -> float:
    """Return the tokens per version from which merging costs less than an adapter, by the widths of a layer.

    Attention has four square matrices, and the MLP three.
    """
    hidden, inner = read_widths(path)
    elements = hidden * (4 * hidden + 3 * inner)
    rows_and_columns = 4 * 2 * hidden + 3 * (hidden + inner)
    return FOLDING_NS * elements / (ADAPTER_NS * adapter.r * rows_and_columns)

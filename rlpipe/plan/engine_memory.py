"""Memory of a rollout engine: what it is set up with, and where its bytes go.

Sources: grouped-query attention, arXiv:2305.13245; multi-head latent attention, arXiv:2405.04434; gated delta
networks, arXiv:2412.06464; Mamba, arXiv:2312.00752; Mamba 2, arXiv:2405.21060.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from transformers import PreTrainedConfig

from rlpipe.configs.schema.root_config import Config, longest_conversation, max_sampled_tokens
from rlpipe.errors import ConfigError
from rlpipe.hardware.device import Device
from rlpipe.plan.model_shape import ModelShape, layer_configs
from rlpipe.rollout.engine import default_sequences, num_slots, slot_rank
from rlpipe.rollout.serving_choice import Serving, choose_serving

VLLM_UTILIZATION = 0.92
"""vLLM 0.32's share of a GPU if ``gpu_memory_utilization`` is not set."""
VLLM_BATCHED_TOKENS = 2048
"""vLLM's default ``max_num_batched_tokens`` on a GPU, for engines inside other programs."""
HF_UTILIZATION = 0.95
"""Share of the memory with transformers; torch's allocator loses some of the rest to fragmentation."""
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
QUANTIZED_BYTES = {"bitsandbytes": 0.5 + 4 / 64, "fp8": 1.0, "mxfp4": 0.5 + 1 / 32}
"""Bytes per element including its scales: float32 per 64 elements; per row, not counted; 8 bit per 32 elements."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineSetup:
    """The setup of one engine, and the work of a step that all engines share."""

    kind: Literal["vllm", "hf"]
    num_engines: int
    num_devices: int
    """GPUs per engine (tensor-parallel size)."""
    engines_per_device: int
    utilization: float
    """Share of a device's memory that one engine may take."""
    cpu_kv_bytes: int | None
    """vLLM's bytes for keys and values on a CPU; None on a GPU, where it takes what is left."""
    dtype: str
    quantization: str | None
    kv_element_bytes: float
    max_sequences: int
    batched_tokens: int
    """Tokens of one prefill pass."""
    prompt_tokens: int
    completion_tokens: int
    """Longest allowed completion, or tokens of all turns; ``prompt_tokens`` is the longest allowed prompt."""
    num_turns: int
    """Turns of the policy in an episode, at most; otherwise 1."""
    observed_tokens: int
    """Tokens after the prompt of the longest episode that the policy does not sample."""
    max_model_len: int
    """Longest allowed sequence; multi-turn conversations have more tokens than one prompt and one completion."""
    serving: Serving
    """Kind of weights that the engines serve, and the reason."""
    num_slots: int
    """Number of adapter slots; 0 if engines have the adapter in their weights."""
    slot_rank: int
    bucket_bytes: int
    groups_per_step: int
    group_size: int

    @property
    def packs_weights(self) -> bool:
        """Whether the engine holds its weights twice: plain, to be replaced, and packed for the CPU's products."""
        return self.cpu_kv_bytes is not None and self.serving.kind != "lora"

    @property
    def num_tokens(self) -> int:
        """Tokens of a prompt and a completion, or of an episode, of full length."""
        return self.prompt_tokens + self.completion_tokens + self.observed_tokens

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a full-length sequence, over the time in which it is sampled."""
        return self.prompt_tokens + (self.completion_tokens + self.observed_tokens) / 2

    @property
    def prefill_tokens(self) -> float:
        """Tokens that an engine prefills in a step: a group's prompt once, and of later turns what is not cached."""
        work = self.groups_per_engine * self.group_size
        later_tokens = self.observed_tokens if self.kind == "vllm" else (self.num_turns - 1) * self.mean_tokens
        return self.groups_per_engine * self.prompt_tokens + work * later_tokens

    @property
    def groups_per_engine(self) -> int:
        """Groups of a step on the engine with the most."""
        return -(-self.groups_per_step // self.num_engines)


def read_engine_setup(config: Config, described: PreTrainedConfig, device: Device) -> EngineSetup:
    """Read the setup of the config's engines.

    Raises ``ConfigError`` if the config has no engines, if they do not run on such a device, or if one of
    ``rollout.engine_args`` is not supported by the plan.
    """
    rollout, on_gpu = config.rollout, config.rollout.num_gpus > 0
    check_device(config, device)
    kind: Literal["vllm", "hf"] = "hf" if rollout.engine == "hf" else "vllm"
    prompt = config.data.max_prompt_tokens
    length, sampled = longest_conversation(config), max_sampled_tokens(config)
    sequences = _max_sequences(config, kind)
    serving = choose_serving(config, kind)
    has_slots = kind == "vllm" and serving.kind == "lora"
    return EngineSetup(
        kind=kind,
        num_engines=rollout.num_engines,
        num_devices=rollout.tensor_parallel_size,
        engines_per_device=min(rollout.num_engines, int(1 / rollout.num_gpus + 1e-9) or 1) if on_gpu else 1,
        utilization=_utilization(config, kind, on_gpu),
        cpu_kv_bytes=_cpu_kv_bytes() if kind == "vllm" and not on_gpu else None,
        dtype=config.engine_dtype,
        quantization=_quantization(config, described),
        kv_element_bytes=_kv_element_bytes(config),
        max_sequences=sequences,
        batched_tokens=_batched_tokens(config, kind, on_gpu, length, sequences),
        prompt_tokens=prompt,
        completion_tokens=sampled,
        num_turns=config.environment.max_turns if config.environment.is_used else 1,
        observed_tokens=length - prompt - sampled if config.environment.is_used else 0,
        max_model_len=length,
        serving=serving,
        num_slots=num_slots(config.weights) if has_slots else 0,
        slot_rank=slot_rank(config.model.adapter.r) if has_slots else 0,
        bucket_bytes=config.weights.bucket_bytes if serving.kind == "full" else 0,
        groups_per_step=config.algorithm.groups_per_step,
        group_size=config.algorithm.completions_per_prompt,
    )


def check_device(config: Config, device: Device) -> None:
    """Raise ``ConfigError`` if the config has no engines, or if they do not run on such a device."""
    if config.algorithm.kind != "rl":
        raise ConfigError(f"algorithm.kind={config.algorithm.kind} has no engines")
    num_gpus = config.rollout.num_gpus
    if device.kind == "cuda" and num_gpus == 0:
        raise ConfigError(
            f"rollout.num_gpus=0: engines run on the CPU, not on {device.name}; set 1, or give the --device of a CPU"
        )
    if device.kind == "cpu" and num_gpus > 0:
        raise ConfigError(f"rollout.num_gpus={num_gpus:g}: {device.name} has no GPU; give the GPU's --device, or set 0")


def _max_sequences(config: Config, kind: str) -> int:
    name = "max_batch_size" if kind == "hf" else "max_num_seqs"
    return int(_number(config, name, default_sequences(config.rollout), at_most=1e6))


def _work(config: Config) -> int:
    """Return the sequences of a step on the engine with the most."""
    return -(-config.algorithm.groups_per_step // config.rollout.num_engines) * config.algorithm.completions_per_prompt


def _batched_tokens(config: Config, kind: str, on_gpu: bool, length: int, sequences: int) -> int:
    if kind == "hf":  # the prompts of a whole batch; in an episode, all before its last turn
        return min(sequences, _work(config)) * (length if config.environment.is_used else config.data.max_prompt_tokens)
    default = VLLM_BATCHED_TOKENS if on_gpu else max(4096, length)
    return int(_number(config, "max_num_batched_tokens", default, at_most=1e7))


def _utilization(config: Config, kind: str, on_gpu: bool) -> float:
    if kind == "hf" or not on_gpu:
        return HF_UTILIZATION
    return _number(config, "gpu_memory_utilization", VLLM_UTILIZATION, at_most=1)


def _cpu_kv_bytes() -> int:
    """Return the bytes for keys and values, as ``rlpipe.rollout.vllm.vllm_options`` sets them."""
    text = os.environ.get("VLLM_CPU_KVCACHE_SPACE", "1")
    try:
        return int(float(text) * 2**30)
    except ValueError:
        raise ConfigError(f"VLLM_CPU_KVCACHE_SPACE={text} is not a number of GiB") from None


def _quantization(config: Config, described: PreTrainedConfig) -> str | None:
    """Return the quantization of the weights, from the engine's arguments or the model's own config."""
    settings: Any = getattr(described, "quantization_config", None) or {}
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    name = config.rollout.engine_args.get("quantization") or method
    if name is not None and str(name) not in QUANTIZED_BYTES:
        supported = ", ".join(QUANTIZED_BYTES)
        raise ConfigError(f"a plan does not know the size of {name} weights; it supports {supported}, and model.dtype")
    return None if name is None else str(name)


def _kv_element_bytes(config: Config) -> float:
    name = str(config.rollout.engine_args.get("kv_cache_dtype", "auto"))
    if name == "auto":
        return ELEMENT_BYTES[config.engine_dtype]
    if name.startswith("fp8"):
        return 1
    if name in ELEMENT_BYTES:
        return ELEMENT_BYTES[name]
    raise ConfigError(
        f"rollout.engine_args.kv_cache_dtype={name}: a plan supports auto, fp8, {', '.join(ELEMENT_BYTES)}"
    )


def _number(config: Config, name: str, default: float, *, at_most: float) -> float:
    """Return a number from ``rollout.engine_args``, or the default; raise ``ConfigError`` if it is out of range."""
    value = config.rollout.engine_args.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= at_most:
        raise ConfigError(f"rollout.engine_args.{name}={value!r} is not a number above 0, and up to {at_most:g}")
    return value


BLOCK_TOKENS = 16
"""Tokens per block, the unit in which vLLM allocates the cache."""
STATE_BYTES = 4
"""Bytes per element of a linear layer's state, which is kept in float32."""


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionLayers:
    """Attention layers of one kind."""

    count: int
    token_bytes: int
    """Bytes per token in one layer."""
    query_width: int
    """Number of query heads times their size."""
    window: int | None = None
    """Number of last tokens that the layers keep; None: all."""
    is_shared: bool = False
    """Whether the layers read the keys and values of earlier ones, and hold none."""

    def kept(self, num_tokens: float) -> float:
        return num_tokens if self.window is None else min(num_tokens, self.window)


@dataclass(kw_only=True, slots=True, frozen=True)
class KvCache:
    """The cache on one device; with tensor parallelism each device has its part of the heads."""

    layers: Sequence[AttentionLayers]
    state_bytes: int = 0
    """Bytes of the state of linear attention or Mamba per sequence, independent of its length."""

    @property
    def token_bytes(self) -> int:
        """Bytes of a token that all layers keep."""
        return sum(layers.count * layers.token_bytes for layers in self._held)

    @property
    def _held(self) -> Iterator[AttentionLayers]:
        return (layers for layers in self.layers if not layers.is_shared)

    def read_bytes(self, num_tokens: float) -> float:
        """Return the bytes that the next token of a sequence of ``num_tokens`` reads."""
        return self._bytes(self.layers, num_tokens)

    def held_bytes(self, num_tokens: float) -> int:
        """Return the bytes that a sequence of ``num_tokens`` holds, in whole blocks."""
        return int(self._bytes(self._held, -(-num_tokens // BLOCK_TOKENS) * BLOCK_TOKENS))

    def _bytes(self, layers: Iterable[AttentionLayers], num_tokens: float) -> float:
        return self.state_bytes + sum(kind.count * kind.token_bytes * kind.kept(num_tokens) for kind in layers)

    def attention_flops(self, num_tokens: float) -> float:
        """Return the FLOPs of a token's products with the keys and values of ``num_tokens`` earlier tokens."""
        return sum(4 * layers.count * layers.query_width * layers.kept(num_tokens) for layers in self.layers)


LINEAR_KINDS = {"linear_attention", "mamba"}
"""Kinds of layers that keep a state of fixed size, if their config describes it."""
STATE_KINDS = LINEAR_KINDS | {"hybrid"}
"""Kinds of layers that keep such a state; hybrid ones keep keys and values as well."""
MLP_KINDS = {"mlp", "moe"}
"""Kinds of layers without attention."""


def read_kv_cache(described: PreTrainedConfig, *, element_bytes: float, num_devices: int = 1) -> KvCache:
    """Read the cache's layout from a model's config; unknown layers count as full attention, which keeps most."""
    text: Any = described.get_text_config()
    kinds, state = _layer_types(text), _state_bytes(text, element_bytes)
    first_shared = len(kinds) - (getattr(text, "num_kv_shared_layers", None) or 0)
    without_keys = MLP_KINDS | LINEAR_KINDS if state else MLP_KINDS
    counts = Counter(
        AttentionLayers(
            count=1,
            token_bytes=_token_bytes(layer, element_bytes, num_devices),
            query_width=-(-layer.num_attention_heads * _head_size(layer) // num_devices),
            window=_window(layer, kind),
            is_shared=index >= first_shared,
        )
        for index, (kind, layer) in enumerate(zip(kinds, layer_configs(text), strict=False))
        if kind not in without_keys
    )
    return KvCache(
        layers=[replace(layer, count=count) for layer, count in counts.items()],
        state_bytes=sum(kind in STATE_KINDS for kind in kinds) * state // num_devices,
    )


def _layer_types(text: Any) -> list[str]:
    layer_types = getattr(text, "layer_types", None)
    if layer_types is not None:
        return list(layer_types)
    # Models without a list of kinds have one: Mistral's has a window, if any.
    windowed = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    return ["sliding_attention" if windowed else "full_attention"] * text.num_hidden_layers


def _window(text: Any, layer_type: str) -> int | None:
    if layer_type == "sliding_attention":
        return getattr(text, "sliding_window", None)
    if layer_type == "chunked_attention":
        return getattr(text, "attention_chunk_size", None)
    return None


def _token_bytes(text: Any, element_bytes: float, num_devices: int) -> int:
    latent = getattr(text, "kv_lora_rank", None)
    if latent is not None:  # all heads read it, so each device has the whole
        return int((latent + text.qk_rope_head_dim) * element_bytes)
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return int(2 * max(1, heads // num_devices) * _head_size(text) * element_bytes)


def _head_size(text: Any) -> int:
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def _state_bytes(text: Any, element_bytes: float) -> int:
    """Return the bytes per layer and sequence, over all devices: the state, and the convolution's last inputs.

    0 if the config has neither the sizes of a gated delta network nor those of Mamba.
    """
    if hasattr(text, "linear_num_value_heads"):
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        state, convolved, kernel = values * text.linear_key_head_dim, 2 * keys + values, text.linear_conv_kernel_dim
    elif (size := _first(text, "ssm_state_size", "mamba_d_state")) is not None:
        head_size = _first(text, "mamba_head_dim", "mamba_d_head", "mamba_headdim")
        if head_size is None:  # Mamba 1, which convolves its inputs alone
            channels, groups = _first(text, "mamba_expand", "expand") * text.hidden_size, 0
        else:
            channels = _first(text, "mamba_num_heads", "mamba_n_heads", "n_mamba_heads") * head_size
            groups = _first(text, "n_groups", "mamba_n_groups", "mamba_ngroups")
        state, convolved = channels * size, channels + 2 * groups * size
        kernel = _first(text, "conv_kernel", "mamba_d_conv")
    else:
        return 0
    return int(state * STATE_BYTES + convolved * (kernel - 1) * element_bytes)


def _first(text: Any, *names: str) -> Any:
    """Return the first of the options that the config has; families name Mamba's sizes differently."""
    return next((value for name in names if (value := getattr(text, name, None)) is not None), None)


OUTSIDE_TORCH_BYTES = 3 * 2**29
"""Bytes on a GPU outside torch's memory: CUDA's context, library workspaces, and vLLM's recorded graphs.

An assumption: vLLM's own profiles of 8B models show 0.2 to 1.8 GiB beside torch's memory.
"""
COLLECTIVE_BYTES = 2**30
"""Bytes of NCCL's buffers on each GPU that shares an engine; an assumption."""
LOGITS_BYTES = {"vllm": 3 * 4, "hf": 2 * 4 + 3 * 8}
"""Bytes per element of the logits.

vLLM has it in float32 as logit, as log-prob and sorted; transformers' engine has it in float32 as logit and log-prob,
and in float64 as log-prob, as probability and as cumulative sum.
"""
HOST_BYTES = {"cuda": 6 * 2**30, "cpu": 2 * 2**30}
"""Host bytes of an engine's process, by kind of device: Python, torch, vLLM and CUDA's libraries; an assumption."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineMemory:
    """Bytes on each device of one engine."""

    budget_bytes: int
    """Bytes that the engine may take."""
    weights_bytes: int
    adapter_bytes: int
    """Adapter weights in all slots."""
    reserve_bytes: int
    """Activations, logits, and memory outside torch."""
    kv_bytes: int
    """Bytes left for keys and values; below 0 if the rest alone is too much."""
    longest_bytes: int
    """Keys and values of a sequence of the greatest allowed length; vLLM does not start without room for it."""
    sequences_full: int
    """Sequences of full length that fit at the same time."""
    sequences_mean: int
    """Sequences that fit when each is halfway through its completion."""
    host_bytes: int
    """Bytes of the engine's process on the host."""


def engine_memory(setup: EngineSetup, shape: ModelShape, kv_cache: KvCache, device: Device) -> EngineMemory:
    """Return the memory of an engine, divided up as vLLM does.

    Weights and the peak of a trial pass are subtracted from ``gpu_memory_utilization`` of the device; the rest is for
    keys and values.
    """
    num_sharing = setup.engines_per_device if setup.kind == "hf" else 1
    budget = int(device.memory_bytes * setup.utilization / num_sharing)
    copies = 2 if setup.packs_weights else 1
    weights, adapter = copies * weights_bytes(setup, shape), adapter_bytes(setup, shape)
    reserve = reserve_bytes(setup, shape, device)
    remaining = budget - weights - adapter - reserve
    kv_bytes = remaining if setup.cpu_kv_bytes is None else min(remaining, setup.cpu_kv_bytes)
    host = HOST_BYTES[device.kind] + adapter + setup.bucket_bytes
    held_bytes = (
        min(kv_bytes, _batch(setup) * kv_cache.held_bytes(setup.num_tokens)) if setup.kind == "hf" else kv_bytes
    )
    return EngineMemory(
        budget_bytes=budget,
        weights_bytes=weights,
        adapter_bytes=adapter,
        reserve_bytes=reserve,
        kv_bytes=kv_bytes,
        longest_bytes=kv_cache.held_bytes(setup.max_model_len),
        sequences_full=max(0, kv_bytes // kv_cache.held_bytes(setup.num_tokens)),
        sequences_mean=max(0, kv_bytes // kv_cache.held_bytes(setup.mean_tokens)),
        host_bytes=host if device.kind == "cuda" else host + weights + reserve + max(0, held_bytes),
    )


def _batch(setup: EngineSetup) -> int:
    """Return the number of sequences in the cache of transformers' engine; vLLM allocates its cache at the start."""
    return min(setup.max_sequences, setup.groups_per_engine * setup.group_size)


def weights_bytes(setup: EngineSetup, shape: ModelShape) -> int:
    """Return the bytes of the base model on each device."""
    element = ELEMENT_BYTES[setup.dtype]
    quantized = shape.num_quantizable if setup.quantization is not None else 0
    per_element = QUANTIZED_BYTES[setup.quantization] if setup.quantization is not None else element
    return int(((shape.num_parameters - quantized) * element + quantized * per_element) / setup.num_devices)


def adapter_bytes(setup: EngineSetup, shape: ModelShape) -> int:
    """Return the bytes of all adapter slots; A and B count as whole on every device, though one of them is sharded."""
    return setup.num_slots * setup.slot_rank * shape.adapter_width * ELEMENT_BYTES[setup.dtype]


def reserve_bytes(setup: EngineSetup, shape: ModelShape, device: Device) -> int:
    """Return the bytes in addition to weights and KV cache.

    At its widest point a layer holds the residual, its normed copy, both inputs of the gate and their product.
    """
    per_token = (2 * shape.hidden_size + 3 * shape.intermediate_size / setup.num_devices) * ELEMENT_BYTES[setup.dtype]
    logits = setup.max_sequences * shape.vocab_size * LOGITS_BYTES[setup.kind]
    outside = OUTSIDE_TORCH_BYTES if device.kind == "cuda" else 0
    collective = COLLECTIVE_BYTES if setup.num_devices > 1 else 0
    return int(setup.batched_tokens * per_token + logits + outside + collective)

"""The settings of a config's rollout engines that a plan reads, with the engine's own defaults."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, Literal

from transformers import PreTrainedConfig

from rlpipe.configs.schema.model_config import serves_adapter
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError
from rlpipe.hardware.device import Device
from rlpipe.rollout.engine import default_sequences
from rlpipe.rollout.vllm.adapter_slots import num_slots, slot_rank

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
    """Longest allowed completion; ``prompt_tokens`` is the longest allowed prompt."""
    max_model_len: int
    """Longest allowed sequence; multi-turn conversations have more tokens than one prompt and one completion."""
    num_slots: int
    """Number of adapter slots; 0 if engines receive whole models."""
    slot_rank: int
    bucket_bytes: int
    groups_per_step: int
    group_size: int

    @property
    def num_tokens(self) -> int:
        """Tokens of a prompt and a completion of full length."""
        return self.prompt_tokens + self.completion_tokens

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a full-length sequence, over the time in which it is sampled."""
        return self.prompt_tokens + self.completion_tokens / 2

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
    length = rollout.max_model_len or prompt + rollout.sampling.max_tokens
    sequences = _max_sequences(config, kind)
    has_slots = kind == "vllm" and serves_adapter(config.model)
    return EngineSetup(
        kind=kind,
        num_engines=rollout.num_engines,
        num_devices=rollout.tensor_parallel_size,
        engines_per_device=min(rollout.num_engines, int(1 / rollout.num_gpus + 1e-9) or 1) if on_gpu else 1,
        utilization=_utilization(config, kind, on_gpu),
        cpu_kv_bytes=_cpu_kv_bytes() if kind == "vllm" and not on_gpu else None,
        dtype=config.model.dtype,
        quantization=_quantization(config, described),
        kv_element_bytes=_kv_element_bytes(config),
        max_sequences=sequences,
        batched_tokens=_batched_tokens(config, kind, on_gpu, length, sequences),
        prompt_tokens=prompt,
        completion_tokens=rollout.sampling.max_tokens,
        max_model_len=length,
        num_slots=num_slots(config.weights) if has_slots else 0,
        slot_rank=slot_rank(config.model.adapter.r) if has_slots else 0,
        bucket_bytes=0 if serves_adapter(config.model) else config.weights.bucket_bytes,
        groups_per_step=config.algorithm.groups_per_step,
        group_size=config.algorithm.group_size,
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
    return -(-config.algorithm.groups_per_step // config.rollout.num_engines) * config.algorithm.group_size


def _batched_tokens(config: Config, kind: str, on_gpu: bool, length: int, sequences: int) -> int:
    if kind == "hf":  # the prompts of a whole batch
        return min(sequences, _work(config)) * config.data.max_prompt_tokens
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
        raise ConfigError(f"VLLM_CPU_KVCACHE_SPACE={text} is no number of GiB") from None


def _quantization(config: Config, described: PreTrainedConfig) -> str | None:
    """Return the quantization of the weights, from the engine's arguments or the model's own config."""
    own: Any = getattr(described, "quantization_config", None) or {}
    method = own.get("quant_method") if isinstance(own, dict) else getattr(own, "quant_method", None)
    name = config.rollout.engine_args.get("quantization") or method
    if name is not None and str(name) not in QUANTIZED_BYTES:
        known = ", ".join(QUANTIZED_BYTES)
        raise ConfigError(f"a plan does not know the size of weights in {name}; it knows {known}, and model.dtype")
    return None if name is None else str(name)


def _kv_element_bytes(config: Config) -> float:
    name = str(config.rollout.engine_args.get("kv_cache_dtype", "auto"))
    if name == "auto":
        return ELEMENT_BYTES[config.model.dtype]
    if name.startswith("fp8"):
        return 1
    if name in ELEMENT_BYTES:
        return ELEMENT_BYTES[name]
    raise ConfigError(f"rollout.engine_args.kv_cache_dtype={name}: a plan knows auto, fp8, {', '.join(ELEMENT_BYTES)}")


def _number(config: Config, name: str, default: float, *, at_most: float) -> float:
    """Return a number from ``rollout.engine_args``, or the default; raise ``ConfigError`` if it is out of range."""
    value = config.rollout.engine_args.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= at_most:
        raise ConfigError(f"rollout.engine_args.{name}={value!r} is not a number above 0, and up to {at_most:g}")
    return value

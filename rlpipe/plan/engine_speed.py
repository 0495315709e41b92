"""The speed of a rollout engine, by the roofline: a pass takes the longer of its arithmetic and its memory reads.

Source: Williams et al. 2009, "Roofline"; for decoding, Pope et al., arXiv:2211.05102.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.hardware.device import Device
from rlpipe.plan.engine_memory import weights_bytes
from rlpipe.plan.engine_setup import ELEMENT_BYTES, EngineSetup
from rlpipe.plan.kv_cache import KvCache
from rlpipe.plan.shape import ModelShape

VLLM_PASS_S = 0.002
"""Seconds per pass for scheduling, sampling and launch with recorded graphs, beyond the GPU's work; an assumption."""
HF_LAYER_S = 0.0008
"""Seconds per layer with transformers, which launches every kernel from Python; an assumption."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Pass:
    """Seconds of one forward pass, by part."""

    weights_s: float
    """Reading the weights."""
    kv_s: float
    """Reading keys and values."""
    compute_s: float
    exchange_s: float
    """Exchange between the devices that share the engine."""
    overhead_s: float

    @property
    def seconds(self) -> float:
        return max(self.weights_s + self.kv_s, self.compute_s) + self.exchange_s + self.overhead_s

    @property
    def bottleneck(self) -> str:
        parts = {
            "reading weights": self.weights_s,
            "reading keys and values": self.kv_s,
            "arithmetic": self.compute_s if self.compute_s > self.weights_s + self.kv_s else 0.0,
            "exchange between GPUs": self.exchange_s,
            "overhead of each pass": self.overhead_s,
        }
        return max(parts, key=lambda name: parts[name])


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineSpeed:
    """Speed of sampling a step's groups, with all prompts and completions at full length."""

    running: int
    """Sequences that run at one time."""
    limit: str
    """The limit on the number of running sequences."""
    decode: Pass
    prefill_s: float
    decode_s: float
    prefill_tokens_per_s: float
    """Prefill tokens per second of one engine."""
    decode_tokens_per_s: float
    """Decoded tokens per second of one engine."""

    @property
    def seconds(self) -> float:
        """Seconds until the last group of a step is sampled."""
        return self.prefill_s + self.decode_s


def engine_speed(setup: EngineSetup, shape: ModelShape, kv_cache: KvCache, device: Device, *, room: int) -> EngineSpeed:
    """Estimate an engine's speed; ``room`` is the number of sequences that the memory holds, at least 1.

    The prompt of a group is prefilled once, and its keys and values are shared by the group's completions.
    """
    work = setup.groups_per_engine * setup.group_size
    running = min(work, room, setup.max_sequences)
    decode = forward_pass(
        setup, shape, kv_cache, device, num_sequences=running, num_tokens=running, context=setup.mean_tokens
    )
    decode_s = decode.seconds * setup.completion_tokens * work / running
    prompt_tokens = setup.groups_per_engine * setup.prompt_tokens
    batch = min(setup.batched_tokens, prompt_tokens)
    prefill = forward_pass(
        setup,
        shape,
        kv_cache,
        device,
        num_sequences=batch / setup.prompt_tokens,
        num_tokens=batch,
        context=setup.prompt_tokens / 2,
    )
    return EngineSpeed(
        running=running,
        limit=_limit(setup, running, work, room),
        decode=decode,
        prefill_s=prefill.seconds * prompt_tokens / batch,
        decode_s=decode_s,
        prefill_tokens_per_s=batch / prefill.seconds,
        decode_tokens_per_s=running / decode.seconds,
    )


def forward_pass(
    setup: EngineSetup,
    shape: ModelShape,
    kv_cache: KvCache,
    device: Device,
    *,
    num_sequences: float,
    num_tokens: float,
    context: float,
) -> Pass:
    """Return the time of a pass over ``num_tokens`` new tokens, each attending to ``context`` tokens on average.

    Engines that share a device run in turns.
    """
    turns = setup.engines_per_device
    used = shape.num_used(num_tokens) / shape.num_parameters
    per_token = 2 * shape.num_active / setup.num_devices + kv_cache.attention_flops(context)
    element = ELEMENT_BYTES[setup.dtype]
    hidden_bytes = num_tokens * shape.hidden_size * element if setup.num_devices > 1 else 0.0
    sum_s = device.exchange.all_reduce.time(2 * hidden_bytes * (1 - 1 / setup.num_devices))
    overhead = VLLM_PASS_S if setup.kind == "vllm" else HF_LAYER_S * shape.num_layers
    return Pass(
        weights_s=turns * used * weights_bytes(setup, shape) / device.memory_bandwidth,
        kv_s=turns * num_sequences * kv_cache.read_bytes(context) / device.memory_bandwidth,
        compute_s=turns * num_tokens * per_token / device.flops(setup.dtype),
        # After attention and MLP of each layer the parts are all-reduced around the ring, so each byte is sent twice.
        exchange_s=2 * shape.num_layers * sum_s,
        overhead_s=overhead,
    )


def _limit(setup: EngineSetup, running: int, work: int, room: int) -> str:
    if running == work:
        return "all of a step's"
    if running == setup.max_sequences:
        name = "max_num_seqs" if setup.kind == "vllm" else "max_batch_size"
        return f"rollout.engine_args.{name}"
    assert running == room
    return "memory for keys and values"

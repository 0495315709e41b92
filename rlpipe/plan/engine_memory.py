"""Where the memory of a rollout engine goes, and how many sequences it has room for."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.hardware.device import Device
from rlpipe.plan.engine_setup import ELEMENT_BYTES, QUANTIZED_BYTES, EngineSetup
from rlpipe.plan.kv_cache import KvCache
from rlpipe.plan.shape import ModelShape

BESIDE_TORCH_BYTES = 3 * 2**29
"""Of a GPU: CUDA's context, the workspaces of its libraries, and vLLM's recorded graphs. An assumption: vLLM's own
profiles of 8B models show 0.2 to 1.8 GiB beside torch's memory."""
COLLECTIVE_BYTES = 2**30
"""NCCL's buffers on each GPU that shares an engine; an assumption."""
LOGITS_BYTES = {"vllm": 3 * 4, "hf": 2 * 4 + 3 * 8}
"""Of an element of the logits: vLLM has it in float32 as logit, as log-prob and sorted; transformers' engine has it in
float32 as logit and log-prob, and in float64 as log-prob, as probability and summed up."""
HOST_BYTES = {"cuda": 6 * 2**30, "cpu": 2 * 2**30}
"""Of an engine's process, by the kind of its device: Python, torch, vLLM and the libraries of CUDA; an assumption."""


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineMemory:
    """Bytes on each device of one engine."""

    budget_bytes: int
    """What it may take."""
    weights_bytes: int
    adapter_bytes: int
    """All slots."""
    reserve_bytes: int
    """Activations, logits, and what is beside torch's memory."""
    kv_bytes: int
    """What is left for keys and values; below 0 where the rest alone is too much."""
    longest_bytes: int
    """A sequence as long as it may be; vLLM does not start without room for it."""
    sequences_full: int
    """That fit at one time, at full length."""
    sequences_mean: int
    """That fit, each half through its completion."""
    host_bytes: int
    """Of the engine's process on the host."""


def engine_memory(setup: EngineSetup, shape: ModelShape, kv_cache: KvCache, device: Device) -> EngineMemory:
    """As vLLM gives memory away: weights, and the peak of a trial pass, are taken off ``gpu_memory_utilization`` of the
    device, and the rest is for keys and values."""
    share = setup.engines_per_device if setup.kind == "hf" else 1
    budget = int(device.memory_bytes * setup.utilization / share)
    weights, adapter = weights_bytes(setup, shape), adapter_bytes(setup, shape)
    reserve = reserve_bytes(setup, shape, device)
    left = budget - weights - adapter - reserve
    kv_bytes = left if setup.cpu_kv_bytes is None else min(left, setup.cpu_kv_bytes)
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
    """Sequences for which transformers' engine holds keys and values; vLLM takes the memory for them at its start."""
    return min(setup.max_sequences, setup.groups_per_engine * setup.group_size)


def weights_bytes(setup: EngineSetup, shape: ModelShape) -> int:
    """Of each device's part of the base model."""
    element = ELEMENT_BYTES[setup.dtype]
    quantized = shape.num_quantizable if setup.quantization is not None else 0
    per_element = QUANTIZED_BYTES[setup.quantization] if setup.quantization is not None else element
    return int(((shape.num_parameters - quantized) * element + quantized * per_element) / setup.num_devices)


def adapter_bytes(setup: EngineSetup, shape: ModelShape) -> int:
    """Of all slots; with several devices each holds the whole of A or B, which here is counted as both."""
    return setup.num_slots * setup.slot_rank * shape.adapter_width * ELEMENT_BYTES[setup.dtype]


def reserve_bytes(setup: EngineSetup, shape: ModelShape, device: Device) -> int:
    """What is there beside weights, and keys and values.

    A layer's widest moment has the residual, its normed copy, both inputs of the gate and their product.
    """
    per_token = (2 * shape.hidden_size + 3 * shape.intermediate_size / setup.num_devices) * ELEMENT_BYTES[setup.dtype]
    logits = setup.max_sequences * shape.vocab_size * LOGITS_BYTES[setup.kind]
    beside = BESIDE_TORCH_BYTES if device.kind == "cuda" else 0
    collective = COLLECTIVE_BYTES if setup.num_devices > 1 else 0
    return int(setup.batched_tokens * per_token + logits + beside + collective)

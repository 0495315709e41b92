"""The memory of a rollout engine, and how many sequences it has room for."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.hardware.device import Device
from rlpipe.plan.engine_setup import ELEMENT_BYTES, QUANTIZED_BYTES, EngineSetup
from rlpipe.plan.kv_cache import KvCache
from rlpipe.plan.shape import ModelShape

BESIDE_TORCH_BYTES = 3 * 2**29
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
    """Sequences of full length that fit at one time."""
    sequences_mean: int
    """Sequences that fit when each is halfway through its completion."""
    host_bytes: int
    """Bytes of the engine's process on the host."""


def engine_memory(setup: EngineSetup, shape: ModelShape, kv_cache: KvCache, device: Device) -> EngineMemory:
    """Return the memory of an engine, divided up as vLLM does.

    Weights and the peak of a trial pass are subtracted from ``gpu_memory_utilization`` of the device; the rest is for
    keys and values.
    """
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
    """Return the bytes beside weights, and keys and values.

    At its widest point a layer holds the residual, its normed copy, both inputs of the gate and their product.
    """
    per_token = (2 * shape.hidden_size + 3 * shape.intermediate_size / setup.num_devices) * ELEMENT_BYTES[setup.dtype]
    logits = setup.max_sequences * shape.vocab_size * LOGITS_BYTES[setup.kind]
    beside = BESIDE_TORCH_BYTES if device.kind == "cuda" else 0
    collective = COLLECTIVE_BYTES if setup.num_devices > 1 else 0
    return int(setup.batched_tokens * per_token + logits + beside + collective)

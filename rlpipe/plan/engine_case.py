"""An engine's setup on a device: its memory, its speed, and why it may not fit."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedConfig

from rlpipe.common.formatting import gib
from rlpipe.hardware.device import Device
from rlpipe.plan.engine_memory import EngineMemory, engine_memory
from rlpipe.plan.engine_setup import EngineSetup
from rlpipe.plan.engine_speed import EngineSpeed, engine_speed
from rlpipe.plan.kv_cache import KvCache, read_kv_cache
from rlpipe.plan.shape import ModelShape


@dataclass(kw_only=True, slots=True, frozen=True)
class EngineCase:
    """A setup on a device; proposed changes are tried on modified copies."""

    setup: EngineSetup
    shape: ModelShape
    described: PreTrainedConfig
    device: Device

    @property
    def kv_cache(self) -> KvCache:
        setup = self.setup
        return read_kv_cache(self.described, element_bytes=setup.kv_element_bytes, num_devices=setup.num_devices)

    @property
    def memory(self) -> EngineMemory:
        return engine_memory(self.setup, self.shape, self.kv_cache, self.device)

    @property
    def speed(self) -> EngineSpeed:
        memory = self.memory
        # transformers keeps the whole batch until its last token; vLLM refills the slot of each sequence that ends.
        room = memory.sequences_full if self.setup.kind == "hf" else memory.sequences_mean
        return engine_speed(self.setup, self.shape, self.kv_cache, self.device, room=room)

    @property
    def problem(self) -> str | None:
        return describe_problem(self.setup, self.memory, self.device)


def describe_problem(setup: EngineSetup, memory: EngineMemory, device: Device) -> str | None:
    """Return why the engine does not fit, or None if it does."""
    needed = memory.weights_bytes + memory.adapter_bytes + memory.reserve_bytes
    if setup.kind == "vllm" and setup.engines_per_device * setup.utilization > 1:
        return f"{setup.engines_per_device} engines on a GPU, each of which takes {setup.utilization:.0%} of its memory"
    if memory.kv_bytes <= 0:
        return f"without any sequence it needs {gib(needed)}, and may take {gib(memory.budget_bytes)} of {device.name}"
    if memory.longest_bytes > memory.kv_bytes:
        return f"one sequence of {setup.max_model_len:,} tokens needs {gib(memory.longest_bytes)}, and " + (
            f"{gib(memory.kv_bytes)} are left for keys and values"
        )
    batch = min(setup.max_sequences, setup.groups_per_engine * setup.group_size)
    if setup.kind == "hf" and memory.sequences_full < batch:
        return f"a batch has {batch:,} sequences, and the memory holds {memory.sequences_full:,} at full length"
    return None

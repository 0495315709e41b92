"""The memory that a learner rank may take, on its device and on its host."""

from __future__ import annotations

from dataclasses import dataclass

from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError
from rlpipe.hardware.device import Device
from rlpipe.learner.strategies.chunk_options import GIB
from rlpipe.offload.api import SHARE_USED
from rlpipe.offload.planner.profile import Capacity
from rlpipe.offload.planner.rates import DEVICES_PER_MACHINE
from rlpipe.plan.engine_setup import EngineSetup

BESIDE_TORCH_BYTES = 2**30
"""Bytes on a GPU outside torch's memory: CUDA's context, library workspaces, NCCL's buffers; an assumption."""
HOST_BYTES = 5 * 2**30
"""Host bytes of a rank's process: Python, torch, and CUDA's libraries; an assumption."""
CPU_HOST_BYTES = 2 * 2**30
"""Host bytes of a rank's process without CUDA; an assumption."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Room:
    """Bytes that a rank may take; a tenth of the free memory is reserved for what a plan does not model."""

    device_bytes: int
    host_bytes: int
    """Its share of the machine's memory, including the process itself."""
    engines: int
    """Engines on the rank's GPU."""
    engine_bytes: int
    """Bytes of the GPU that these engines take."""
    capacity: Capacity
    """Memory that chunked offload may take: the config's limits, or otherwise derived from the same bytes."""


def read_room(config: Config, device: Device, setup: EngineSetup | None) -> Room:
    """Return the memory that a rank may take; ``setup`` is the engines' setup, if there are any.

    Raises ``ConfigError`` if ranks do not run on such a device.
    """
    check_device(config, device)
    learner, num_ranks = config.learner, config.learner.num_ranks
    engines = 0 if setup is None else engines_beside(config)
    taken = 0 if setup is None else int(engines * _engine_share(setup) * device.memory_bytes)
    host = int(SHARE_USED * device.host_memory_bytes) // min(num_ranks, DEVICES_PER_MACHINE)
    if device.kind == "cpu":
        on_device = host = host // 2 if learner.offload != "none" else host
    else:
        on_device = int(SHARE_USED * max(0, device.memory_bytes - taken - BESIDE_TORCH_BYTES))
    own = learner.chunked
    chunked = Capacity(
        device_bytes=on_device if own.device_memory_gib is None else int(own.device_memory_gib * GIB),
        host_bytes=max(0, host - HOST_BYTES) if own.host_memory_gib is None else int(own.host_memory_gib * GIB),
    )
    return Room(device_bytes=on_device, host_bytes=host, engines=engines, engine_bytes=taken, capacity=chunked)


def check_device(config: Config, device: Device) -> None:
    """Raise ``ConfigError`` if the learner of the config does not run on such a device."""
    num_gpus = config.learner.num_gpus
    if device.kind == "cuda" and num_gpus == 0:
        raise ConfigError(
            f"learner.num_gpus=0: the learner runs on the CPU, not on {device.name}; set 1, or learner=single_gpu, or "
            "give the --device of a CPU"
        )
    if device.kind == "cpu" and num_gpus > 0:
        raise ConfigError(f"learner.num_gpus={num_gpus:g}: {device.name} has no GPU; give the GPU's --device, or set 0")


def engines_beside(config: Config) -> int:
    """Return the number of engines that fit on a rank's GPU, if both ask for parts of GPUs."""
    part, own = config.rollout.num_gpus, config.learner.num_gpus
    if config.algorithm.kind != "rl" or not 0 < part < 1 or not 0 < own < 1:
        return 0
    return min(config.rollout.num_engines, int((1 - own) / part + 1e-9))


def _engine_share(setup: EngineSetup) -> float:
    """Return the share of a GPU that each engine on it takes."""
    return setup.utilization if setup.kind == "vllm" else setup.utilization / setup.engines_per_device

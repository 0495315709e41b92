"""How much memory a rank of the learner may take, on its device and on its host."""

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
"""Of a GPU: CUDA's context, the workspaces of its libraries, NCCL's buffers; an assumption."""
HOST_BYTES = 5 * 2**30
"""Of a rank's process: Python, torch, and the libraries of CUDA; an assumption."""
CPU_HOST_BYTES = 2 * 2**30
"""The same without CUDA; an assumption."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Room:
    """Bytes of a rank. A tenth of what is free is left to what no plan sees, such as the allocator's gaps."""

    device_bytes: int
    host_bytes: int
    """Its part of the machine's memory; includes what the process itself takes."""
    engines: int
    """On the rank's GPU."""
    engine_bytes: int
    """What these take of it."""
    capacity: Capacity
    """What chunked offload may take, as the config says, or of the same."""


def read_room(config: Config, device: Device, setup: EngineSetup | None) -> Room:
    """``setup`` is that of the engines, if there are any. Raises ``ConfigError`` where ranks run elsewhere than on such
    a device."""
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
    """Raises ``ConfigError`` if the learner of the config runs elsewhere than on such a device."""
    num_gpus = config.learner.num_gpus
    if device.kind == "cuda" and num_gpus == 0:
        raise ConfigError(
            f"learner.num_gpus=0: the learner runs on the CPU, not on {device.name}; set 1, or learner=single_gpu, or "
            "give the --device of a CPU"
        )
    if device.kind == "cpu" and num_gpus > 0:
        raise ConfigError(f"learner.num_gpus={num_gpus:g}: {device.name} has no GPU; give the GPU's --device, or set 0")


def engines_beside(config: Config) -> int:
    """Engines that find a place on a rank's GPU, where all ask for parts of GPUs."""
    part, own = config.rollout.num_gpus, config.learner.num_gpus
    if config.algorithm.kind != "rl" or not 0 < part < 1 or not 0 < own < 1:
        return 0
    return min(config.rollout.num_engines, int((1 - own) / part + 1e-9))


def _engine_share(setup: EngineSetup) -> float:
    """Of a GPU, for each engine on it."""
    return setup.utilization if setup.kind == "vllm" else setup.utilization / setup.engines_per_device

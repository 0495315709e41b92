"""Who else may be placed on the GPU of a rollout engine, and how much of its memory is left for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device import Device
from rlpipe.plan.engine_setup import EngineSetup


@dataclass(kw_only=True, slots=True, frozen=True)
class Sharing:
    """Of a GPU of which each engine asks for a part."""

    num_gpus: float
    """That an engine asks for."""
    engines: int
    """On one GPU, where Ray fills it up."""
    others: tuple[str, ...]
    """What else asks for a part of a GPU that is free beside one engine."""
    left_bytes: int
    """Beside all engines of the GPU; below 0 where they want more than there is."""


def read_sharing(config: Config, setup: EngineSetup, device: Device) -> Sharing | None:
    """None where engines have GPUs of their own, or none. Ray counts the parts, not the memory."""
    part = config.rollout.num_gpus
    if not 0 < part < 1:
        return None
    taken = setup.utilization * (setup.engines_per_device if setup.kind == "vllm" else 1)
    return Sharing(
        num_gpus=part,
        engines=setup.engines_per_device,
        others=tuple(name for name, other in _askers(config) if 0 < other <= 1 - part + 1e-9),
        left_bytes=int(device.memory_bytes * (1 - taken)),
    )


def _askers(config: Config) -> Iterator[tuple[str, float]]:
    """The parts that engines are not, with the GPUs that one process of each asks for."""
    yield "the learner's ranks", config.learner.num_gpus
    for name, reward in config.scoring.rewards.items():
        yield f"the reward {name}", reward.num_gpus
    features = config.algorithm.ebft.features
    if config.algorithm.ebft.reward and features.weights == "own":
        yield "the feature network", features.num_gpus

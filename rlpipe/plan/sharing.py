"""The actors that may be placed on a rollout engine's GPU, and the memory that is left for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device import Device
from rlpipe.plan.engine_setup import EngineSetup


@dataclass(kw_only=True, slots=True, frozen=True)
class Sharing:
    """The sharing of a GPU by engines that each ask for a part of it."""

    num_gpus: float
    """Part of the GPU that an engine asks for."""
    engines: int
    """Engines on one GPU if Ray fills it up."""
    others: tuple[str, ...]
    """Other kinds of actors whose part of a GPU is free beside one engine."""
    left_bytes: int
    """Bytes left beside all engines of the GPU; below 0 if they want more than there is."""


def read_sharing(config: Config, setup: EngineSetup, device: Device) -> Sharing | None:
    """Return the sharing; None if engines have whole GPUs or none. Ray counts the parts of GPUs, not the memory."""
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
    """Yield the actors other than engines, with the GPUs that one process of each asks for."""
    yield "the learner's ranks", config.learner.num_gpus
    for name, reward in config.scoring.rewards.items():
        yield f"the reward {name}", reward.num_gpus
    features = config.algorithm.ebft.features
    if config.algorithm.ebft.reward and features.weights == "own":
        yield "the feature network", features.num_gpus

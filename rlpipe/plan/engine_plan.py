"""The plan of a config's rollout engines: memory, speed, and proposed changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedConfig

from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device import Device
from rlpipe.plan.engine_case import EngineCase
from rlpipe.plan.engine_changes import Change, accelerations, remedies
from rlpipe.plan.engine_memory import EngineMemory
from rlpipe.plan.engine_setup import EngineSetup, read_engine_setup
from rlpipe.plan.engine_speed import EngineSpeed
from rlpipe.plan.shape import read_shape
from rlpipe.plan.sharing import Sharing, read_sharing


@dataclass(kw_only=True, slots=True, frozen=True)
class EnginePlan:
    """The plan of one engine; all engines are alike."""

    setup: EngineSetup
    kv_token_bytes: int
    """Bytes of keys and values per token, on each of its devices."""
    memory: EngineMemory
    sharing: Sharing | None
    problem: str | None
    """Why the engine does not fit; None if it does."""
    speed: EngineSpeed | None
    """Speed; None if the engine does not fit."""
    changes: Sequence[Change]
    """Changes with which it fits if it does not; otherwise changes that make it faster."""

    @property
    def fits(self) -> bool:
        return self.problem is None


def plan_engine(config: Config, described: PreTrainedConfig, device: Device) -> EnginePlan:
    """Plan one rollout engine of the config; ``described`` is transformers' config of its model.

    Raises ``ConfigError`` if the config has no engines, if they do not run on such a device, or if an engine argument
    is not supported by the plan, and ``ModelError`` if the model can't be outlined.
    """
    setup = read_engine_setup(config, described, device)
    case = EngineCase(setup=setup, shape=read_shape(described, config.model), described=described, device=device)
    problem = case.problem
    speed = case.speed if problem is None else None
    return EnginePlan(
        setup=setup,
        kv_token_bytes=case.kv_cache.token_bytes,
        memory=case.memory,
        sharing=read_sharing(config, setup, device),
        problem=problem,
        speed=speed,
        changes=remedies(case) if speed is None else accelerations(case, speed),
    )

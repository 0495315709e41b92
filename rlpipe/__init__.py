"""Reinforcement learning of language models on Ray; public names are imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlpipe.configs.compose import load_config as load_config
    from rlpipe.configs.schema.root_config import Config as Config
    from rlpipe.episodes.adapters import from_gymnasium as from_gymnasium
    from rlpipe.episodes.adapters import from_openenv as from_openenv
    from rlpipe.episodes.adapters import from_trl as from_trl
    from rlpipe.episodes.tools import Environment as Environment
    from rlpipe.episodes.tools import Step as Step
    from rlpipe.episodes.tools import tool as tool
    from rlpipe.errors import ConfigError as ConfigError
    from rlpipe.errors import DataError as DataError
    from rlpipe.errors import EngineFailed as EngineFailed
    from rlpipe.errors import EnvironmentFailed as EnvironmentFailed
    from rlpipe.errors import InputError as InputError
    from rlpipe.errors import LearnerFailed as LearnerFailed
    from rlpipe.errors import ModelError as ModelError
    from rlpipe.errors import RewardFailed as RewardFailed
    from rlpipe.errors import RewardImportError as RewardImportError
    from rlpipe.errors import RlpipeError as RlpipeError
    from rlpipe.errors import RunError as RunError
    from rlpipe.errors import WaitTimeout as WaitTimeout
    from rlpipe.errors import WeightsMismatch as WeightsMismatch
    from rlpipe.run.pipeline import evaluate as evaluate
    from rlpipe.run.python_api import Summary as Summary
    from rlpipe.run.python_api import train as train
    from rlpipe.scoring.rewards import RewardActor as RewardActor
    from rlpipe.types import Rollout as Rollout
    from rlpipe.types import RolloutGroup as RolloutGroup

ERRORS = (
    "RlpipeError",
    "InputError",
    "ConfigError",
    "DataError",
    "ModelError",
    "RewardImportError",
    "RunError",
    "WaitTimeout",
    "WeightsMismatch",
    "EngineFailed",
    "RewardFailed",
    "EnvironmentFailed",
    "LearnerFailed",
)
HOMES = {
    "train": "rlpipe.run.python_api",
    "Summary": "rlpipe.run.python_api",
    "evaluate": "rlpipe.run.pipeline",
    "load_config": "rlpipe.configs.compose",
    "Config": "rlpipe.configs.schema.root_config",
    "RewardActor": "rlpipe.scoring.rewards",
    **dict.fromkeys(("from_gymnasium", "from_trl"), "rlpipe.episodes.adapters"),
    "from_openenv": "rlpipe.episodes.adapters",
    **dict.fromkeys(("Environment", "tool"), "rlpipe.episodes.tools"),
    "Step": "rlpipe.episodes.tools",
    "Rollout": "rlpipe.types",
    "RolloutGroup": "rlpipe.types",
    **dict.fromkeys(ERRORS, "rlpipe.errors"),
}
"""Modules that define the public names."""

__all__ = [*HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("importlib.metadata").version("rlpipe")
    if name not in HOMES:
        raise AttributeError(f"module 'rlpipe' has no attribute {name!r}")
    return getattr(import_module(HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])

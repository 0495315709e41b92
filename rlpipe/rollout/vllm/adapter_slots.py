"""Rank and number of the adapter slots that vLLM allocates at startup; imports neither torch nor vllm."""

from __future__ import annotations

from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.errors import ConfigError

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_RUNNING_VERSIONS = 3
"""Most versions served at one time, when each sequence stays on the version it began with."""


def slot_rank(rank: int) -> int:
    """Return the smallest slot rank of vLLM that fits the adapter; raise ``ConfigError`` if there is none."""
    fitting = [size for size in _RANKS if size >= rank]
    if not fitting:
        raise ConfigError(f"model.adapter.r={rank} is more than vllm serves; at most {_RANKS[-1]}")
    return fitting[0]


def num_slots(weights: WeightsConfig) -> int:
    """Return how many adapters are served side by side."""
    return 1 if weights.on_update == "inflight" else _RUNNING_VERSIONS

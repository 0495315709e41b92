"""Set-up of a simulation: the sizes of the parts, taken from a run's config, and the times that they need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rlpipe.configs.schema.model_config import serves_adapter
from rlpipe.configs.schema.rollout_config import RolloutConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError
from rlpipe.rollout.engine import default_sequences
from rlpipe.scoring.pools import SHARED_POOL, resolve_pools
from rlpipe.simulation.distributions import Distribution


@dataclass(kw_only=True, frozen=True)
class Times:
    """Seconds that each part takes."""

    generate: Distribution
    """Seconds of a group that is alone on its engine."""
    score: Mapping[str, Distribution]
    """Seconds of a group in one process, by pool."""
    train: Distribution
    """Seconds of a step on the set-up's ranks."""
    sync: Distribution
    """Seconds from a version's publication until every engine serves it."""


@dataclass(kw_only=True, frozen=True)
class Setup:
    """Sizes and times of a run's parts, as the simulation knows them."""

    num_engines: int
    groups_per_engine: int
    """Groups that an engine samples at one time; further ones wait in the engine."""
    slowdown: float
    """Ratio of a group's seconds on a full engine to those alone; in between, it is linear in the number of groups."""
    holds: bool
    """Whether an engine starts no group while a version waits to be loaded, and loads it once none runs."""
    pools: Mapping[str, int]
    """Processes of each scoring pool."""
    num_ranks: int
    groups_per_step: int
    group_size: int
    max_tokens: int
    max_staleness: int
    num_steps: int
    times: Times


def read_setup(config: Config, times: Times, *, groups_per_engine: int | None, slowdown: float) -> Setup:
    """Return the set-up of a config; ``groups_per_engine`` overrides the value that follows from the config."""
    if config.algorithm.kind != "rl":
        raise ConfigError(f"algorithm.kind: {config.algorithm.kind} has no engines, so there is nothing to simulate")
    return Setup(
        num_engines=config.rollout.num_engines,
        groups_per_engine=groups_per_engine or groups_at_once(config.rollout, config.algorithm.group_size),
        slowdown=slowdown,
        holds=holds_groups(config),
        pools=pool_sizes(config),
        num_ranks=config.learner.num_ranks,
        groups_per_step=config.algorithm.groups_per_step,
        group_size=config.algorithm.group_size,
        max_tokens=config.rollout.sampling.max_tokens,
        max_staleness=config.replay.max_staleness,
        num_steps=config.algorithm.num_steps,
        times=times,
    )


def groups_at_once(rollout: RolloutConfig, group_size: int) -> int:
    """Return the groups that an engine samples at one time; vLLM begins one if a single sequence slot is free."""
    default = default_sequences(rollout)
    if rollout.engine == "hf":
        return max(1, int(rollout.engine_args.get("max_batch_size", default)) // group_size)
    return -(-int(rollout.engine_args.get("max_num_seqs", default)) // group_size)


def holds_groups(config: Config) -> bool:
    """Return whether full weights are loaded in place, once no sequence runs that began with the old weights."""
    return not serves_adapter(config.model) and config.weights.on_update == "wait"


def pool_sizes(config: Config) -> dict[str, int]:
    """Return the processes of each scoring pool; rewards that are only passed in Python count as one shared pool."""
    sizes = {name: pool.max_size for name, pool in resolve_pools(config).items()}
    return sizes or {SHARED_POOL: config.scoring.num_processes}

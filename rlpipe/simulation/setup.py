"""What is simulated: the sizes of the parts, taken from a run's config, and the times that they need."""

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
    """The seconds that each part takes."""

    generate: Distribution
    """A group that is alone on its engine."""
    score: Mapping[str, Distribution]
    """A group, in one process of each pool."""
    train: Distribution
    """A step, on the set-up's ranks."""
    sync: Distribution
    """From a version's publication until every engine serves it."""


@dataclass(kw_only=True, frozen=True)
class Setup:
    """The parts of a run as the simulation knows them."""

    num_engines: int
    groups_per_engine: int
    """Groups that an engine samples at one time; further ones wait in the engine."""
    slowdown: float
    """How much longer a group takes on a full engine than alone; in between it grows linearly with the groups."""
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
    """The set-up of a config; ``groups_per_engine`` where it is not to follow from the config."""
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
    """Groups that an engine samples at one time; vLLM begins one as long as a sequence is free."""
    default = default_sequences(rollout)
    if rollout.engine == "hf":
        return max(1, int(rollout.engine_args.get("max_batch_size", default)) // group_size)
    return -(-int(rollout.engine_args.get("max_num_seqs", default)) // group_size)


def holds_groups(config: Config) -> bool:
    """Whether full weights are loaded in place, once no sequence runs that began with the old ones."""
    return not serves_adapter(config.model) and config.weights.on_update == "wait"


def pool_sizes(config: Config) -> dict[str, int]:
    """Processes of each scoring pool. Rewards that are only handed over in Python share one, as others do."""
    sizes = {name: pool.max_size for name, pool in resolve_pools(config).items()}
    return sizes or {SHARED_POOL: config.scoring.num_processes}

"""Scoring pools of a run: which rewards share one, how many processes it has, and how groups are spread over it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from rlpipe.configs.schema.algorithm_config import FeatureConfig
from rlpipe.configs.schema.rollout_config import RewardConfig, ServeConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.types import ALIGNMENT, DIVERSITY

SHARED_POOL = "scorer"
MAX_GROUPS_PER_CALL = 32
"""Most groups of one call, so that a slow reward still spreads over the pool."""

FEATURE_PATH = "rlpipe.scoring.feature_scorer:make_feature_scorer"
"""Path of EBFT's rewards, which are scored together."""

REWARD_MODELS = "rlpipe.scoring.reward_model:"
"""Prefix of the paths of rewards that load a model."""
REWARD_CLASSES = (REWARD_MODELS, "rlpipe.scoring.judge:")
"""Prefixes of the paths of rewards that are known to be classes, which have processes of their own."""

Group = TypeVar("Group")


@dataclass(kw_only=True, slots=True, frozen=True)
class RewardPool:
    """Rewards that are computed by the same processes, or by the same replicas of Ray Serve."""

    name: str
    members: Mapping[str, RewardConfig]
    size: int
    """Processes, or replicas without load."""
    max_size: int
    """Processes, or replicas under load."""
    num_cpus: float
    """CPUs of one process."""
    num_gpus: float
    """GPUs of one process."""
    is_served: bool


def resolve_pools(config: Config, rewards: Mapping[str, RewardConfig] | None = None) -> dict[str, RewardPool]:
    """Return the pools of a run by name, deployments of Ray Serve first; the learner's ranks are not a pool.

    ``rewards`` are those of a prepared run. By default they are inferred from the config: rewards are not imported, and
    those passed in Python are not known.
    """
    rewards = expected_rewards(config) if rewards is None else rewards
    return {
        **{name: _served_pool(name, members) for name, members in split_served(rewards).items()},
        **{name: _process_pool(config, name, members) for name, members in split_rewards(rewards).items()},
    }


def expected_rewards(config: Config) -> dict[str, RewardConfig]:
    """Return the rewards of a config as preparing the run will complete them, inferred from their paths alone."""
    rewards = dict(config.scoring.rewards)
    for name, reward in rewards.items():
        needs_processes = reward.num_gpus > 0 or reward.path.startswith(REWARD_CLASSES)
        if needs_processes and not reward.is_served:
            rewards[name] = replace(reward, num_processes=reward.num_processes or 1)
    if config.algorithm.kind == "rl" and config.algorithm.ebft.reward:
        rewards |= feature_configs(config.algorithm.ebft.features)
    return rewards


def _served_pool(name: str, members: Mapping[str, RewardConfig]) -> RewardPool:
    reward = next(iter(members.values()))
    return RewardPool(
        name=name,
        members=members,
        size=reward.serve.replicas,
        max_size=reward.serve.max_replicas or reward.serve.replicas,
        num_cpus=reward.num_cpus,
        num_gpus=reward.num_gpus,
        is_served=True,
    )


def _process_pool(config: Config, name: str, members: Mapping[str, RewardConfig]) -> RewardPool:
    reward, is_shared = next(iter(members.values())), name == SHARED_POOL
    size = reward.num_processes or config.scoring.num_processes
    return RewardPool(
        name=name,
        members=members,
        size=size,
        max_size=size,
        num_cpus=config.scoring.num_cpus if is_shared else reward.num_cpus,
        num_gpus=0.0 if is_shared else reward.num_gpus,
        is_served=False,
    )


def feature_configs(features: FeatureConfig) -> dict[str, RewardConfig]:
    """Return EBFT's rewards, whose weighted sum is 2 c_a alignment - 2 c_d diversity."""
    weights = {ALIGNMENT: 2 * features.alignment_coef, DIVERSITY: -2 * features.diversity_coef}
    return {
        name: RewardConfig(
            path=FEATURE_PATH,
            weight=weight,
            timeout_s=features.timeout_s,
            num_cpus=features.num_cpus,
            num_gpus=features.num_gpus,
            serve=features.serve if features.weights == "own" else ServeConfig(),
        )
        for name, weight in weights.items()
    }


def split_served(rewards: Mapping[str, RewardConfig]) -> dict[str, dict[str, RewardConfig]]:
    """Return the rewards of each deployment of Ray Serve, by its name."""
    served = {name: reward for name, reward in rewards.items() if reward.is_served}
    features = {name: reward for name, reward in served.items() if reward.path == FEATURE_PATH}
    separate = {name: {name: reward} for name, reward in served.items() if name not in features}
    return separate | ({"features": features} if features else {})


def split_learner(rewards: Mapping[str, RewardConfig]) -> dict[str, RewardConfig]:
    """Return the rewards that the learner's ranks compute."""
    return {name: reward for name, reward in rewards.items() if reward.path == FEATURE_PATH and not reward.is_served}


def split_rewards(rewards: Mapping[str, RewardConfig]) -> dict[str, dict[str, RewardConfig]]:
    """Return the rewards of each pool of processes, by its name; those without processes of their own share one."""
    elsewhere = {*split_learner(rewards), *(name for name, reward in rewards.items() if reward.is_served)}
    local = {name: reward for name, reward in rewards.items() if name not in elsewhere}
    shared = {name: reward for name, reward in local.items() if reward.num_processes is None}
    pools = {SHARED_POOL: shared} if shared else {}
    separate = {name: reward for name, reward in local.items() if reward.num_processes is not None}
    return pools | {f"reward-{name}": {name: reward} for name, reward in separate.items()}


def split_calls(groups: Sequence[Group], size: int) -> list[Sequence[Group]]:
    """Split groups that finished together into the calls with which a pool of ``size`` processes scores them."""
    share = min(max(1, -(-len(groups) // size)), MAX_GROUPS_PER_CALL)
    return [groups[start : start + share] for start in range(0, len(groups), share)]

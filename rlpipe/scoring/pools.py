"""Which rewards share a pool of scoring processes, how many it has, and how groups are spread over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from rlpipe.configs.schema.ebft_config import FeatureConfig
from rlpipe.configs.schema.scoring_config import RewardConfig, ScoringConfig, ServeConfig
from rlpipe.types import ALIGNMENT, DIVERSITY

SHARED_POOL = "scorer"
MAX_GROUPS_PER_CALL = 32
"""Groups of one call, so that a slow reward still spreads over the pool."""

FEATURE_PATH = "rlpipe.scoring.feature_scorer:make_feature_scorer"
"""Of EBFT's rewards, which one deployment scores."""

Group = TypeVar("Group")


def feature_configs(features: FeatureConfig) -> dict[str, RewardConfig]:
    """EBFT's rewards: 2 c_a alignment - 2 c_d diversity."""
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
    """The rewards of each deployment of Ray Serve."""
    served = {name: reward for name, reward in rewards.items() if reward.is_served}
    features = {name: reward for name, reward in served.items() if reward.path == FEATURE_PATH}
    own = {name: {name: reward} for name, reward in served.items() if name not in features}
    return own | ({"features": features} if features else {})


def split_learner(rewards: Mapping[str, RewardConfig]) -> dict[str, RewardConfig]:
    """The rewards that the learner's ranks compute."""
    return {name: reward for name, reward in rewards.items() if reward.path == FEATURE_PATH and not reward.is_served}


def split_rewards(rewards: Mapping[str, RewardConfig]) -> dict[str, dict[str, RewardConfig]]:
    """The rewards of each pool of processes; those without processes of their own share one."""
    elsewhere = {*split_learner(rewards), *(name for name, reward in rewards.items() if reward.is_served)}
    local = {name: reward for name, reward in rewards.items() if name not in elsewhere}
    shared = {name: reward for name, reward in local.items() if reward.num_processes is None}
    pools = {SHARED_POOL: shared} if shared else {}
    own = {name: reward for name, reward in local.items() if reward.num_processes is not None}
    return pools | {f"reward-{name}": {name: reward} for name, reward in own.items()}


def pool_size(scoring: ScoringConfig, members: Mapping[str, RewardConfig]) -> int:
    """Processes of the pool that scores ``members``."""
    own = next(iter(members.values())).num_processes
    return scoring.num_processes if own is None else own


def split_calls(groups: Sequence[Group], size: int) -> list[Sequence[Group]]:
    """Groups that were finished together, as the calls by which a pool of ``size`` processes scores them."""
    share = min(max(1, -(-len(groups) // size)), MAX_GROUPS_PER_CALL)
    return [groups[start : start + share] for start in range(0, len(groups), share)]

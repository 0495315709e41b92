"""Tests of scoring pools: every reward has one pool, whose processes share the groups in calls of limited size."""

import pytest

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, EbftConfig, FeatureConfig
from rlpipe.configs.schema.rollout_config import RewardConfig, ScoringConfig, ServeConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.scoring.pools import (
    MAX_GROUPS_PER_CALL,
    feature_configs,
    resolve_pools,
    split_calls,
    split_learner,
    split_rewards,
    split_served,
)


@pytest.mark.parametrize(
    ("num_groups", "size", "calls"),
    [(1, 4, [1]), (4, 4, [1, 1, 1, 1]), (6, 4, [2, 2, 2]), (5, 2, [3, 2]), (7, 1, [7]), (0, 3, [])],
)
def test_groups_are_spread_over_the_pool(num_groups: int, size: int, calls: list[int]) -> None:
    groups = list(range(num_groups))
    split = split_calls(groups, size)
    assert [len(call) for call in split] == calls
    assert [group for call in split for group in call] == groups


def test_a_call_has_a_bound() -> None:
    assert [len(call) for call in split_calls(range(100), 1)] == [MAX_GROUPS_PER_CALL] * 3 + [4]


@pytest.mark.parametrize(("weights", "served"), [("own", {"model", "features"}), ("learner", {"model"})])
def test_every_reward_is_scored_in_one_place(weights: str, served: set[str]) -> None:
    features = feature_configs(FeatureConfig(weights=weights))
    rewards = {
        "shared": RewardConfig(path="m:f"),
        "own": RewardConfig(path="m:g", num_processes=2),
        "model": RewardConfig(path="m:h", serve=ServeConfig(replicas=1)),
        **features,
    }
    assert split_served(rewards).keys() == served
    assert split_rewards(rewards).keys() == {"scorer", "reward-own"}
    pools = [*split_served(rewards).values(), *split_rewards(rewards).values(), split_learner(rewards)]
    assert sorted(name for pool in pools for name in pool) == sorted(rewards)
    assert split_learner(rewards).keys() == (features.keys() if weights == "learner" else set())


def test_a_config_has_the_pools_that_its_run_will_have() -> None:
    """Check a config's pools before rewards are imported: processes for classes and GPU rewards, and replicas."""
    rewards = {
        "right": RewardConfig(path="m:right"),
        "judge": RewardConfig(path="rlpipe.scoring.judge:ScoreJudge"),
        "large": RewardConfig(path="m:large", num_gpus=0.5),
        "model": RewardConfig(path="m:h", num_gpus=1, serve=ServeConfig(replicas=2, max_replicas=4)),
    }
    config = Config(
        scoring=ScoringConfig(rewards=rewards, num_processes=3, num_cpus=0.5),
        algorithm=AlgorithmConfig(ebft=EbftConfig(reward=True, features=FeatureConfig(serve=ServeConfig(replicas=1)))),
    )
    pools = resolve_pools(config)
    assert {name: (pool.size, pool.max_size, pool.is_served) for name, pool in pools.items()} == {
        "model": (2, 4, True),
        "features": (1, 1, True),
        "scorer": (3, 3, False),
        "reward-judge": (1, 1, False),
        "reward-large": (1, 1, False),
    }
    assert (pools["scorer"].num_cpus, pools["reward-large"].num_cpus, pools["model"].num_gpus) == (0.5, 1, 1)
    assert [*pools["features"].members] == [*feature_configs(config.algorithm.ebft.features)]

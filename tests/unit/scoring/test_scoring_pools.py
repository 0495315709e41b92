"""Every reward has one place where it is scored; groups that are finished together are spread over all processes there,
in calls that do not grow too large."""

import pytest

from rlpipe.configs.schema.ebft_config import FeatureConfig
from rlpipe.configs.schema.scoring_config import RewardConfig, ServeConfig
from rlpipe.scoring.pools import (
    MAX_GROUPS_PER_CALL,
    feature_configs,
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

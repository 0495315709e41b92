"""What a run asks of a cluster is checked before anything starts, and scoring pools are laid out by config."""

import pytest

from rlpipe.configs.schema.root_config import Config
from rlpipe.configs.schema.scoring_config import RewardConfig, ScoringConfig
from rlpipe.errors import ConfigError
from rlpipe.run.cluster import Need, check_fit, shares_gpus
from rlpipe.run.launch import memory_limit, pools_of
from rlpipe.scoring.pools import pool_size


def test_a_run_that_fits_passes() -> None:
    check_fit([Need(name="rollout-0", num_cpus=1.5), Need(name="learner-0", num_cpus=0.5)], {"CPU": 2.0})


def test_more_gpus_than_the_cluster_has_are_named() -> None:
    needs = [
        Need(name="rollout-0", num_gpus=2, remedy="lower rollout.num_gpus"),
        Need(name="learner-0", num_gpus=1),
    ]
    with pytest.raises(ConfigError, match=r"needs 3 GPU \(rollout-0 2, learner-0 1\).* has 1: lower rollout.num_gpus"):
        check_fit(needs, {"CPU": 8.0, "GPU": 1.0})


def test_custom_resources_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"needs 1 big_node .* has 0"):
        check_fit([Need(name="rollout-0", resources={"big_node": 1.0})], {"CPU": 8.0})


@pytest.mark.parametrize(("engine", "rank", "shared"), [(0.5, 0.5, True), (1.0, 1.0, False), (0.0, 0.0, False)])
def test_parts_of_gpus_may_be_of_the_same_one(engine: float, rank: float, shared: bool) -> None:
    config = Config()
    config.rollout.num_gpus, config.learner.num_gpus = engine, rank
    assert shares_gpus(config) is shared


def test_rewards_share_a_pool_unless_they_ask_for_processes() -> None:
    rewards = {
        "short": RewardConfig(path="m:short"),
        "right": RewardConfig(path="m:right"),
        "judge": RewardConfig(path="m:Judge", num_processes=3, num_gpus=0.5),
    }
    config = Config(scoring=ScoringConfig(rewards=rewards, num_processes=2))
    pools = pools_of(config, rewards)
    assert {name: sorted(members) for name, (members, _) in pools.items()} == {
        "scorer": ["right", "short"],
        "reward-judge": ["judge"],
    }
    assert [pool_size(config.scoring, members) for members, _ in pools.values()] == [2, 3]
    assert [str(memory_limit(config, members)) for members, _ in pools.values()] == ["scoring.memory_gb=4", "None"]
    judge = {"judge": RewardConfig(path="m:Judge", num_processes=3, memory_gb=9)}
    assert str(memory_limit(config, judge)) == "scoring.rewards.judge.memory_gb=9"
    assert pools["reward-judge"][1].num_gpus == 0.5

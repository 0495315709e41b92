"""Tests that a run's requests to a cluster are checked before anything starts, and scoring pools follow the config."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorAlreadyExistsError, AuthenticationError

from rlpipe.actors.ray_internals import JOIN_TIME
from rlpipe.configs.schema.rollout_config import RewardConfig, ScoringConfig
from rlpipe.configs.schema.root_config import ClusterConfig, Config
from rlpipe.errors import ConfigError
from rlpipe.run import cluster
from rlpipe.run.cluster import ResourceRequest, check_fit, connect, shares_gpus, start_actor, wait_fit
from rlpipe.run.workers import memory_limit, pool_needs
from rlpipe.scoring.pools import resolve_pools


def test_a_run_that_fits_passes() -> None:
    check_fit(
        [ResourceRequest(name="rollout-0", num_cpus=1.5), ResourceRequest(name="learner-0", num_cpus=0.5)], {"CPU": 2.0}
    )


def test_more_gpus_than_the_cluster_has_are_named() -> None:
    needs = [
        ResourceRequest(name="rollout-0", num_gpus=2, remedy="lower rollout.num_gpus"),
        ResourceRequest(name="learner-0", num_gpus=1),
    ]
    with pytest.raises(ConfigError, match=r"needs 3 GPU \(rollout-0 2, learner-0 1\).* has 1: lower rollout.num_gpus"):
        check_fit(needs, {"CPU": 8.0, "GPU": 1.0})


def test_custom_resources_are_checked_too() -> None:
    with pytest.raises(ConfigError, match=r"needs 1 big_node .* has 0"):
        check_fit([ResourceRequest(name="rollout-0", resources={"big_node": 1.0})], {"CPU": 8.0})


@pytest.mark.parametrize("address", ["http://127.0.0.1:8265", "127.0.0.1", "ray://127.0.0.1:10001"])
def test_an_address_of_another_kind_is_refused_in_one_line(address: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^cluster\.address={re.escape(address)}\b.*; set HOST:6379.* or auto"
    ) as refused:
        connect(ClusterConfig(address=address), [])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "error", [AuthenticationError("no token\nwas found"), RuntimeError("Version mismatch:\n    Ray: 2.9.0")]
)
def test_a_cluster_that_refuses_is_named_in_one_line(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: str, **options: Any) -> None:
        raise error

    monkeypatch.setattr(cluster.ray, "init", refuse)
    with pytest.raises(
        ConfigError, match=r"^cluster\.address=10\.0\.0\.1:6379: Ray can't .*token.*versions of"
    ) as refused:
        connect(ClusterConfig(address="10.0.0.1:6379"), [])
    assert "\n" not in str(refused.value)


def test_ray_tries_for_a_short_time_to_join_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = []

    def fail(address: str, **options: Any) -> None:
        attempts.append(os.environ[JOIN_TIME])
        raise ConnectionError("Failed to connect")

    monkeypatch.setattr(cluster.ray, "init", fail)
    for given in (None, "300"):
        if given is not None:
            monkeypatch.setenv(JOIN_TIME, given)
        with pytest.raises(ConfigError, match="no Ray cluster answers there"):
            connect(ClusterConfig(address="10.0.0.1:6379"), [])
        assert os.environ.get(JOIN_TIME) == given
    assert attempts == ["1", "300"]


def test_an_actors_name_that_another_run_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Taken:
        def options(self, **options: Any) -> Any:
            return self

        def remote(self, *args: Any) -> None:
            raise ActorAlreadyExistsError("The name dataset is already taken.")

    context = SimpleNamespace(namespace="shared")
    monkeypatch.setattr(cluster.ray, "remote", lambda **options: lambda actor_class: Taken())
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: context)
    with pytest.raises(ConfigError, match=r"named dataset in Ray's namespace shared: leave namespace out of ray.init"):
        start_actor(Taken, ResourceRequest(name="dataset"))


@pytest.fixture
def demand(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Record the placement groups that are made; all must have been removed at the end."""
    made: list[Any] = []
    removed: list[Any] = []

    def make(bundles: Any) -> Any:
        made.append(bundles)
        return bundles

    monkeypatch.setattr(cluster, "placement_group", make)
    monkeypatch.setattr(cluster, "remove_placement_group", removed.append)
    monkeypatch.setattr(cluster, "FIT_POLL_S", 0.01)
    yield made
    assert removed == made


def test_a_joined_cluster_may_grow(
    demand: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sizes = iter([{"CPU": 8.0}, {"CPU": 8.0}, {"CPU": 8.0, "GPU": 2.0}])
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: next(sizes))
    wait_fit([ResourceRequest(name="rollout-0", num_gpus=2), ResourceRequest(name="dataset")], 60)
    assert demand == [[{"GPU": 2}]]
    (line,) = caplog.messages
    assert re.search(r"needs 2 GPU .* has 0: .*; waiting up to cluster\.schedule_timeout_s=60 seconds", line)


def test_a_joined_cluster_that_stays_too_small_is_refused(demand: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 8.0})
    with pytest.raises(ConfigError, match=r"needs 2 GPU .* has 0: .*cluster\.schedule_timeout_s=0\.05"):
        wait_fit([ResourceRequest(name="rollout-0", num_gpus=2)], 0.05)
    assert len(demand) == 1


@pytest.mark.parametrize(("engine", "rank", "shared"), [(0.5, 0.5, True), (1.0, 1.0, False), (0.0, 0.0, False)])
def test_fractions_of_gpus_may_be_of_the_same_one(engine: float, rank: float, shared: bool) -> None:
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
    pools = resolve_pools(config, rewards)
    assert {name: sorted(pool.members) for name, pool in pools.items()} == {
        "scorer": ["right", "short"],
        "reward-judge": ["judge"],
    }
    assert [pool.size for pool in pools.values()] == [2, 3]
    assert [str(memory_limit(config, pool.members)) for pool in pools.values()] == ["scoring.memory_gb=4", "None"]
    judge = {"judge": RewardConfig(path="m:Judge", num_processes=3, memory_gb=9)}
    assert str(memory_limit(config, judge)) == "scoring.rewards.judge.memory_gb=9"
    needs = pool_needs(pools.values(), served=False)
    assert [need.name for need in needs] == ["scorer-0", "scorer-1", *(f"reward-judge-{index}" for index in range(3))]
    assert [need.num_gpus for need in needs] == [0, 0, 0.5, 0.5, 0.5]
    assert not pool_needs(pools.values(), served=True)

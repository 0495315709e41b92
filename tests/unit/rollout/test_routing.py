"""Tests that engines change state by their answers and by time, and groups go to the least busy one."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.rollout.routing import EngineState, Fleet, Router
from rlpipe.types import GroupRequest, Prompt


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def fleet(clock: Clock) -> Fleet:
    """Return a fleet in which engine a serves version 0, and b is only started."""
    fleet = Fleet(["a", "b"], suspect_after_s=10, dead_after_s=30, clock=clock)
    fleet.published(0)
    fleet.started("a")
    fleet.loaded("a", 0)
    fleet.started("b")
    return fleet


def test_an_engine_serves_once_it_has_loaded_the_newest_version(fleet: Fleet) -> None:
    assert (fleet.serving, fleet.state("b")) == (["a"], EngineState.STALE)
    fleet.published(3)
    fleet.loaded("b", 2)
    assert (fleet.serving, fleet.state("b")) == (["a"], EngineState.STALE)
    fleet.loaded("b", 3)
    assert fleet.serving == ["a", "b"]


def test_a_serving_engine_continues_while_it_loads_the_next_version(fleet: Fleet) -> None:
    fleet.published(1)
    assert fleet.serving == ["a"]


def test_a_version_may_go_back_where_the_learner_began_again(fleet: Fleet) -> None:
    fleet.published(9)
    fleet.published(4)
    fleet.loaded("b", 4)
    assert fleet.serving == ["a", "b"]


def test_a_silent_engine_is_suspected_and_then_given_up(fleet: Fleet, clock: Clock) -> None:
    clock.now = 9
    assert (fleet.check(), fleet.serving) == ([], ["a"])
    clock.now = 10
    assert (fleet.check(), fleet.serving, fleet.state("a")) == ([], [], EngineState.SUSPECT)
    clock.now = 30
    assert (fleet.check(), fleet.state("a")) == (["a"], EngineState.DEAD)
    assert fleet.check() == [], "it is given up once"
    assert "has not answered for 30 seconds (cluster.dead_after_s)" in fleet.describe()["a"]


def test_a_suspect_that_answers_serves_again(fleet: Fleet, clock: Clock) -> None:
    clock.now = 12
    fleet.check()
    fleet.answered("a")
    assert fleet.serving == ["a"]
    clock.now = 21
    fleet.check()
    assert fleet.serving == ["a"], "silence counts from the last answer"


def test_an_engine_that_starts_owes_no_answers(fleet: Fleet, clock: Clock) -> None:
    clock.now = 1000
    fleet.answered("a")
    assert fleet.check() == []
    assert fleet.state("b") is EngineState.STALE


def test_a_dead_engine_must_start_and_load_again(fleet: Fleet) -> None:
    fleet.died("a", "killed")
    assert (fleet.serving, fleet.state("a")) == ([], EngineState.DEAD)
    fleet.answered("a")
    assert fleet.state("a") is EngineState.DEAD, "a late answer does not bring it back"
    fleet.restarting("a")
    fleet.started("a")
    assert fleet.serving == []
    fleet.loaded("a", 0)
    assert fleet.serving == ["a"]


def test_late_news_of_a_load_does_not_bring_an_engine_back(fleet: Fleet) -> None:
    fleet.died("a", "killed")
    fleet.loaded("a", 0)
    assert fleet.state("a") is EngineState.DEAD
    fleet.restarting("a")
    fleet.loaded("a", 0)
    assert (fleet.state("a"), fleet.serving) == (EngineState.STARTING, [])


def test_deaths_are_counted_until_something_is_finished(fleet: Fleet) -> None:
    for _ in range(2):
        fleet.died("a", "killed")
        fleet.died("a", "said twice")
        fleet.restarting("a")
        fleet.started("a")
        fleet.loaded("a", 0)
        fleet.answered("a")
    assert fleet.failures_in_row("a") == 2
    fleet.answered("a", finished=True)
    assert fleet.failures_in_row("a") == 0


def test_an_outage_lasts_from_the_last_one_that_served(fleet: Fleet, clock: Clock) -> None:
    assert fleet.outage_s == 0
    clock.now = 5
    fleet.died("a", "killed")
    clock.now = 8
    assert fleet.outage_s == 3
    fleet.loaded("b", 0)
    assert fleet.outage_s == 0


def test_before_the_first_version_there_is_no_outage(clock: Clock) -> None:
    fleet = Fleet(["a"], suspect_after_s=10, dead_after_s=30, clock=clock)
    fleet.started("a")
    clock.now = 1000
    assert fleet.outage_s == 0


def test_only_the_dead_are_replaced(fleet: Fleet) -> None:
    with pytest.raises(AssertionError):
        fleet.restarting("a")


def request(group_id: int, max_tokens: int) -> GroupRequest:
    prompt = Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(0, np.int32), prompt="", task={})
    return GroupRequest(group_id=group_id, prompt=prompt, group_size=1, max_tokens=max_tokens, temperature=1.0, seed=0)


def ids(shares: dict[str, list[GroupRequest]]) -> dict[str, list[int]]:
    return {engine: [r.group_id for r in requests] for engine, requests in shares.items()}


def test_groups_go_to_the_engine_with_the_least_outstanding_tokens() -> None:
    router = Router(["a", "b"])
    assert ids(router.assign([request(0, 100), request(1, 10), request(2, 20), request(3, 30)])) == {
        "a": [0],
        "b": [1, 2, 3],
    }
    assert router.outstanding == {"a": 100, "b": 60}
    router.finish(0)
    assert router.outstanding == {"a": 0, "b": 60}
    assert ids(router.assign([request(4, 50)])) == {"a": [4]}
    assert router.groups_of("b") == [1, 2, 3]


def test_a_group_is_taken_off_its_engine_once() -> None:
    router = Router(["a"])
    router.assign([request(0, 5)])
    assert router.finish(0)
    assert not router.finish(0)
    assert router.outstanding == {"a": 0}


def test_what_an_engine_worked_on_is_handed_back_when_it_leaves() -> None:
    router = Router(["a", "b"])
    router.assign([request(0, 5), request(1, 5), request(2, 5)])
    assert [lost.group_id for lost in router.remove("a")] == [0, 2]
    assert router.outstanding == {"b": 5}
    assert ids(router.assign([request(0, 5)])) == {"b": [0]}
    router.add("a")
    assert ids(router.assign([request(3, 1), request(4, 1)], among=["a"])) == {"a": [3, 4]}
    assert router.num_groups == 4


@given(st.integers(0, 2**32), st.integers(1, 5))
def test_every_request_goes_to_the_first_engine_of_those_with_the_least(seed: int, num_engines: int) -> None:
    random = Random(seed)
    names = [f"engine-{index}" for index in range(num_engines)]
    router, tokens, engine_of = Router(names), dict.fromkeys(names, 0), dict[int, tuple[str, int]]()
    for group_id in range(200):
        if engine_of and random.random() < 0.6:
            finished = random.choice(sorted(engine_of))
            engine, cost = engine_of.pop(finished)
            tokens[engine] -= cost
            router.finish(finished)
        cost = random.choice([0, 1, 1, 5])
        least = min(tokens, key=tokens.__getitem__)
        assert ids(router.assign([request(group_id, cost)])) == {least: [group_id]}
        engine_of[group_id] = (least, cost)
        tokens[least] += cost
        assert router.outstanding == tokens

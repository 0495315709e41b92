"""Tests that groups go to the engine with the fewest outstanding tokens."""

from random import Random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlpipe.rollout.routing import Router
from rlpipe.types import GroupRequest, Prompt


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

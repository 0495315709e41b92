"""A token depends on its request's seed and place alone, whatever else the engine samples at the same time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import pytest
from engine_cases import OpenVllm, drain, request, sample
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.rollout.engine import Engine
from rlpipe.types import GroupRequest, RolloutGroup

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.covering(0)]
NUM_GROUPS = 8
MAX_STEPS = 7
Tokens = dict[int, list[list[int]]]


def make_request(number: int) -> GroupRequest:
    """Return a request that differs from the others in all but the first block of its prompt."""
    return request(
        number,
        prompt_ids=[4, *range(30, 66), *[70 + number] * number, 5],
        group_size=1 + number % 3,
        temperature=(0.7, 1.0, 1.4)[number % 3],
        max_tokens=5 + 4 * (number % 4),
    )


def tokens_of(groups: Iterable[RolloutGroup]) -> Tokens:
    return {group.group_id: [rollout.token_ids.tolist() for rollout in group] for group in groups}


@pytest.fixture(scope="module", params=["lora", "none"])
def engine(request: pytest.FixtureRequest, open_vllm: OpenVllm) -> Engine:
    return open_vllm(request.param, engine_args={"block_size": 32})


@pytest.fixture(scope="module")
def alone(engine: Engine) -> Tokens:
    """Return the tokens of each group that is sampled by itself."""
    return tokens_of(group for number in range(NUM_GROUPS) for group in sample(engine, [make_request(number)]))


@settings(max_examples=20, deadline=None)
@given(
    order=st.permutations(range(NUM_GROUPS)),
    pauses=st.lists(st.integers(0, MAX_STEPS), min_size=NUM_GROUPS, max_size=NUM_GROUPS),
)
def test_tokens_do_not_depend_on_the_batch(
    engine: Engine, alone: Tokens, order: Sequence[int], pauses: Sequence[int]
) -> None:
    found: Tokens = {}
    for number, pause in zip(order, pauses, strict=True):
        engine.submit([make_request(number)])
        for _ in range(pause):
            if engine.has_work:
                found |= tokens_of(engine.step())
    found |= tokens_of(drain(engine))
    assert found == alone


def test_another_seed_makes_other_tokens(engine: Engine, alone: Tokens) -> None:
    """Check that what the property compares is random at all."""
    first = make_request(1)
    assert tokens_of(sample(engine, [replace(first, seed=first.seed + 1)]))[1] != alone[1]
    assert alone[1][0] != alone[1][1]

"""Tests of the graph of a conversation: what was drawn is trained once, and nothing else is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.episodes.graph import Branch, EpisodeGraph, Node
from rlpipe.types import NO_TURN, NO_VERSION

STEPS = st.lists(
    st.tuples(st.integers(0, 10**6), st.booleans(), st.integers(0, 4), st.booleans()), min_size=1, max_size=12
)
"""Growth of a tree: the node to continue, whether the policy draws, the number of tokens, and whether it is cut off."""


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def grow(steps: list[tuple[int, bool, int, bool]]) -> tuple[EpisodeGraph, list[int]]:
    """Return a tree whose tokens are all different, and those of them that were drawn; a token's version is its id."""
    graph, drawn, following = EpisodeGraph(), list[int](), 100
    graph.observe(None, [], ids(1, 2))
    for which, draws, count, is_cut in steps:
        parent = graph.nodes[which % len(graph.nodes)]
        token_ids = np.arange(following, following + count, dtype=np.int32)
        following += count
        if not draws:
            graph.observe(parent, [], token_ids)
            continue
        drawn += token_ids.tolist()
        own = graph.draw(parent, [], token_ids, logprobs=-token_ids / 7, policy_versions=token_ids)
        if is_cut:
            graph.observe(own, [], ids(following))
        following += 1
    return graph, drawn


@settings(max_examples=1000, deadline=None)
@given(STEPS)
def test_each_drawn_token_is_trained_once_and_no_other(steps: list[tuple[int, bool, int, bool]]) -> None:
    graph, drawn = grow(steps)
    branches = graph.branches()
    trained = [token for branch in branches for token in branch.token_ids[branch.loss_mask].tolist()]
    assert sorted(trained) == sorted(drawn)
    for branch in branches:
        mask = branch.loss_mask
        assert np.array_equal(branch.token_ids, branch.nodes[-1].token_path())
        assert np.array_equal(branch.policy_versions[mask], branch.token_ids[mask])
        np.testing.assert_allclose(branch.logprobs[mask], -branch.token_ids[mask] / 7, rtol=1e-6)
        assert (branch.policy_versions[~mask] == NO_VERSION).all()
        assert not branch.logprobs[~mask].any()
        assert (branch.turns[~mask] == NO_TURN).all()


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_turns_are_numbered_as_they_were_drawn(steps: list[tuple[int, bool, int, bool]]) -> None:
    graph = grow(steps)[0]
    assert [node.turn for node in graph.turns] == list(range(len(graph.turns)))
    for branch in graph.branches():
        turns = branch.turns[branch.loss_mask]
        assert (np.diff(turns) >= 0).all()


def make_rewritten() -> tuple[EpisodeGraph, Node]:
    """Return a conversation of two turns whose second is asked again after its history was rewritten."""
    graph = EpisodeGraph()
    asked = graph.observe(None, [], ids(1, 2, 3))
    first = graph.draw(asked, [], ids(4, 5), logprobs=np.array([-1.0, -2.0]), policy_versions=ids(0, 0))
    told = graph.observe(first, [], ids(6))
    graph.draw(told, [], ids(7), logprobs=np.array([-3.0]), policy_versions=ids(1))
    return graph, first


def shown(branch: Branch) -> list[tuple[int, bool]]:
    return list(zip(branch.token_ids.tolist(), branch.loss_mask.tolist(), strict=True))


def test_what_a_second_branch_shares_is_its_context() -> None:
    graph, first = make_rewritten()
    again = graph.observe(first, [], ids(8, 9))
    graph.draw(again, [], ids(10), logprobs=np.array([-4.0]), policy_versions=ids(1))
    one, two = graph.branches()
    assert shown(one) == [(1, False), (2, False), (3, False), (4, True), (5, True), (6, False), (7, True)]
    assert [own for own, counts in shown(two) if counts] == [10]
    assert two.token_ids.tolist() == [1, 2, 3, 4, 5, 8, 9, 10]
    assert two.policy_versions.tolist() == [*[NO_VERSION] * 7, 1]


def test_what_nobody_answered_is_not_part_of_a_sequence() -> None:
    graph, first = make_rewritten()
    graph.observe(graph.nodes[-1], [], ids(11, 12))
    graph.observe(first, [], ids(13))
    (branch,) = graph.branches()
    assert branch.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_conversations_may_begin_anew() -> None:
    graph, _ = make_rewritten()
    other = graph.observe(None, [], ids(20))
    graph.draw(other, [], ids(21), logprobs=np.array([-1.0]), policy_versions=ids(2))
    assert [branch.token_ids.tolist() for branch in graph.branches()] == [[1, 2, 3, 4, 5, 6, 7], [20, 21]]


def test_a_conversation_begins_with_what_the_policy_did_not_draw() -> None:
    with pytest.raises(ValueError, match="begins with tokens"):
        EpisodeGraph().observe(None, [], ids())
    with pytest.raises(ValueError, match="different lengths"):
        EpisodeGraph().draw(
            EpisodeGraph().observe(None, [], ids(1)), [], ids(2), logprobs=np.zeros(2), policy_versions=ids(0)
        )

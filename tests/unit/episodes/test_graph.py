"""Tests of the graph of a conversation: what was sampled is trained once, and what clients send back is recognised."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.episodes.graph import Branch, Branching, CanonicalMessage, Continuation, EpisodeGraph, Node, locate
from rlpipe.types import NO_TURN, NO_VERSION, ChatMessages

STEPS = st.lists(
    st.tuples(st.integers(0, 10**6), st.booleans(), st.integers(0, 4), st.booleans()), min_size=1, max_size=12
)
"""Growth of a tree: the node to continue, whether the policy samples, the number of tokens, whether it is cut off."""


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def grow(steps: list[tuple[int, bool, int, bool]]) -> tuple[EpisodeGraph, list[int]]:
    """Return a tree whose tokens are all different, and those that were sampled; a token's version is its id."""
    graph, sampled, following = EpisodeGraph(), list[int](), 100
    graph.observe(None, [], ids(1, 2))
    for which, samples, count, is_cut in steps:
        parent = graph.nodes[which % len(graph.nodes)]
        token_ids = np.arange(following, following + count, dtype=np.int32)
        following += count
        if not samples:
            graph.observe(parent, [], token_ids)
            continue
        sampled += token_ids.tolist()
        own = graph.add_sampled(parent, [], token_ids, logprobs=-token_ids / 7, policy_versions=token_ids)
        if is_cut:
            graph.observe(own, [], ids(following))
        following += 1
    return graph, sampled


def check_trained(steps: list[tuple[int, bool, int, bool]]) -> None:
    graph, sampled = grow(steps)
    branches = graph.branches()
    trained = [token for branch in branches for token in branch.token_ids[branch.loss_mask].tolist()]
    assert sorted(trained) == sorted(sampled)
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
def test_each_sampled_token_is_trained_once_and_no_other(steps: list[tuple[int, bool, int, bool]]) -> None:
    check_trained(steps)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(STEPS)
def test_each_sampled_token_of_a_thousand_graphs_is_trained_once(steps: list[tuple[int, bool, int, bool]]) -> None:
    check_trained(steps)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_turns_are_numbered_as_they_were_sampled(steps: list[tuple[int, bool, int, bool]]) -> None:
    graph = grow(steps)[0]
    assert [node.turn for node in graph.turns] == list(range(len(graph.turns)))
    for branch in graph.branches():
        turns = branch.turns[branch.loss_mask]
        assert (np.diff(turns) >= 0).all()


def make_rewritten() -> tuple[EpisodeGraph, Node]:
    """Return a conversation of two turns whose second is asked again after its history was rewritten."""
    graph = EpisodeGraph()
    asked = graph.observe(None, [], ids(1, 2, 3))
    first = graph.add_sampled(asked, [], ids(4, 5), logprobs=np.array([-1.0, -2.0]), policy_versions=ids(0, 0))
    told = graph.observe(first, [], ids(6))
    graph.add_sampled(told, [], ids(7), logprobs=np.array([-3.0]), policy_versions=ids(1))
    return graph, first


def shown(branch: Branch) -> list[tuple[int, bool]]:
    return list(zip(branch.token_ids.tolist(), branch.loss_mask.tolist(), strict=True))


def test_what_a_second_branch_shares_is_its_context() -> None:
    graph, first = make_rewritten()
    again = graph.observe(first, [], ids(8, 9))
    graph.add_sampled(again, [], ids(10), logprobs=np.array([-4.0]), policy_versions=ids(1))
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
    graph.add_sampled(other, [], ids(21), logprobs=np.array([-1.0]), policy_versions=ids(2))
    assert [branch.token_ids.tolist() for branch in graph.branches()] == [[1, 2, 3, 4, 5, 6, 7], [20, 21]]


def test_a_conversation_begins_with_what_the_policy_did_not_sample() -> None:
    with pytest.raises(ValueError, match="begins with tokens"):
        EpisodeGraph().observe(None, [], ids())
    with pytest.raises(ValueError, match="different lengths"):
        EpisodeGraph().add_sampled(
            EpisodeGraph().observe(None, [], ids(1)), [], ids(2), logprobs=np.zeros(2), policy_versions=ids(0)
        )


ONE = np.ones(1, np.int32)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def called(own: str = "a1", arguments: Any = None, content: str | None = "") -> dict[str, Any]:
    call = {"id": own, "type": "function", "function": {"name": "look", "arguments": arguments or {"at": "x", "n": 1}}}
    return {"role": "assistant", "content": content, "tool_calls": [call]}


def result(text: str, own: str = "a1") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": own, "content": text}


def graph_of(*conversation: dict[str, Any]) -> EpisodeGraph:
    """Return the graph of a conversation in which the assistant's messages were sampled."""
    graph, node, seen = EpisodeGraph(), None, list[dict[str, Any]]()
    for message in conversation:
        if message["role"] != "assistant":
            seen.append(message)
            continue
        if seen:
            node = graph.observe(node, seen, ONE)
        assert node is not None
        node = graph.add_sampled(node, [message], ONE, logprobs=np.zeros(1, np.float32), policy_versions=ONE)
        seen = []
    return graph


def found(graph: EpisodeGraph, messages: ChatMessages) -> Continuation:
    return locate(graph, messages)


def sampled(graph: EpisodeGraph, turn: int) -> Node:
    (node,) = [node for node in graph.nodes if node.turn == turn]
    return node


TALK = [{"role": "system", "content": "s"}, user("q"), called(), result("r"), said("answer", reasoning_content="why")]


@pytest.mark.parametrize(
    ("known", "sent"),
    [
        (called(), called(arguments='{"n":1,"at":"x"}')),
        (called(), called(arguments='{ "at" : "x",\n"n": 1 }', content=None)),
        (called(content="I look."), called(content=None)),
        (said("so", reasoning_content="why"), said("so")),
        (said("so", reasoning_content="why"), said("so", reasoning="why")),
        (said("so", reasoning_content="why"), said("so", thinking="why")),
        (said("so"), said("so", tool_calls=[], refusal=None, annotations=[])),
        (said("so"), {"role": "assistant", "content": [{"type": "text", "text": "so"}]}),
        (said("so", tool_calls=[]), said("so", tool_calls=None)),
    ],
)
def test_what_clients_change_says_the_same(known: dict[str, Any], sent: dict[str, Any]) -> None:
    assert CanonicalMessage.of(known).matches(CanonicalMessage.of(sent))


@pytest.mark.parametrize(
    ("known", "sent"),
    [
        (called(), called(own="a2")),
        (called(), called(arguments={"at": "y", "n": 1})),
        (called(), called(arguments={"at": "x", "n": "1"})),
        (called(), said("")),
        (said("so"), called(content="so")),
        (said("so"), said("so ")),
        (said("so", reasoning_content="why"), said("so", reasoning_content="because")),
        (said("so"), user("so")),
        (result("r"), result("r", "a2")),
        (called(content="I look."), called(content="I do not look.")),
    ],
)
def test_what_says_something_else_is_not_taken_for_it(known: dict[str, Any], sent: dict[str, Any]) -> None:
    assert not CanonicalMessage.of(known).matches(CanonicalMessage.of(sent))


def test_a_conversation_continues_after_its_last_turn() -> None:
    graph, new = graph_of(*TALK), [user("and?")]
    assert found(graph, [*TALK, *new]) == Continuation(node=sampled(graph, 1), new=new)
    assert found(graph, [*TALK[:3], result("other")]) == Continuation(node=sampled(graph, 0), new=[result("other")])
    again = found(graph, TALK[:4])
    assert (again.node, again.new) == (sampled(graph, 0), [result("r")]), "the last turn is asked for again"


@pytest.mark.parametrize(
    ("messages", "branching"),
    [
        ([*TALK[:2], said("I looked."), user("go on"), said("x"), user("y")], Branching.REWRITTEN),
        ([*TALK[:2], user("In short: r. And?")], Branching.COMPACTED),
        ([{"role": "system", "content": "You sum up."}, user("q")], Branching.SUBAGENT),
    ],
)
def test_a_conversation_that_continues_none_says_why(messages: ChatMessages, branching: Branching) -> None:
    assert found(graph_of(*TALK), messages) == Continuation(node=None, new=messages, branching=branching)


def test_the_first_conversation_is_no_branch() -> None:
    assert found(EpisodeGraph(), TALK[:2]).branching is Branching.FIRST


def distort(message: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """Return a message as some client sends it back."""
    sent = copy.deepcopy(message)
    for call in sent.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        spaced = rng.choice([None, (",", ":"), (" , ", " : ")])
        call["function"]["arguments"] = json.dumps(arguments, separators=spaced, ensure_ascii=rng.random() < 0.5)
    if sent.get("tool_calls"):
        sent["content"] = rng.choice([sent["content"], None])
    elif rng.random() < 0.3:
        sent["content"] = [{"type": "text", "text": sent["content"]}]
    if rng.random() < 0.5:
        sent.pop("reasoning_content", None)
    return sent | ({"name": None, "refusal": None} if rng.random() < 0.5 else {})


TEXTS = st.text(max_size=8)
TURNS = st.lists(
    st.tuples(st.booleans(), TEXTS, TEXTS, st.dictionaries(TEXTS, TEXTS, max_size=2)), min_size=1, max_size=5
)


@settings(max_examples=300, deadline=None)
@given(TURNS, st.integers(0, 10**6), st.data())
def test_whatever_is_sent_back_continues_where_it_was(
    turns: list[tuple[bool, str, str, dict[str, str]]], seed: int, data: st.DataObject
) -> None:
    talk = [user("begin")]
    for number, (calls, text, answer, arguments) in enumerate(turns):
        turn = called(f"id{number}", arguments or {"at": "x"}, text) if calls else said(text, reasoning_content=answer)
        talk += [turn, result(answer, f"id{number}") if calls else user(answer)]
    graph, rng = graph_of(*talk), random.Random(seed)
    for number in range(len(turns)):
        sent = [distort(message, rng) for message in talk[: 2 * number + 3]]
        assert found(graph, sent).node is sampled(graph, number)
    place = data.draw(st.integers(0, len(turns) - 1))
    changed = copy.deepcopy(talk)
    changed[2 * place + 1]["content"] = text_with(changed[2 * place + 1]["content"])
    if not changed[2 * place + 1].get("tool_calls"):
        assert found(graph, changed) == Continuation(node=None, new=changed, branching=Branching.REWRITTEN)


def text_with(text: str) -> str:
    return text + "!"

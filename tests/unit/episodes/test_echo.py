"""Tests that conversations which clients send back are recognised, and that nothing else is."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.episodes.graph import Branching, Continuation, EpisodeGraph, Node, is_same, locate
from rlpipe.types import ChatMessages

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
    """Return the graph of a conversation in which the assistant's messages were drawn."""
    graph, node, seen = EpisodeGraph(), None, list[dict[str, Any]]()
    for message in conversation:
        if message["role"] != "assistant":
            seen.append(message)
            continue
        if seen:
            node = graph.observe(node, seen, ONE)
        assert node is not None
        node = graph.draw(node, [message], ONE, logprobs=np.zeros(1, np.float32), policy_versions=ONE)
        seen = []
    return graph


def found(graph: EpisodeGraph, messages: ChatMessages) -> Continuation:
    return locate(graph, messages)


def drawn(graph: EpisodeGraph, turn: int) -> Node:
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
        (said("so"), said("so", tool_calls=[], refusal=None, annotations=[])),
        (said("so"), {"role": "assistant", "content": [{"type": "text", "text": "so"}]}),
        (said("so", tool_calls=[]), said("so", tool_calls=None)),
    ],
)
def test_what_clients_change_says_the_same(known: dict[str, Any], sent: dict[str, Any]) -> None:
    assert is_same(known, sent)


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
    assert not is_same(known, sent)


def test_a_conversation_goes_on_behind_its_last_turn() -> None:
    graph, new = graph_of(*TALK), [user("and?")]
    assert found(graph, [*TALK, *new]) == Continuation(node=drawn(graph, 1), new=new)
    assert found(graph, [*TALK[:3], result("other")]) == Continuation(node=drawn(graph, 0), new=[result("other")])
    again = found(graph, TALK[:4])
    assert (again.node, again.new) == (drawn(graph, 0), [result("r")]), "the last turn is asked for again"


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
def test_whatever_is_sent_back_goes_on_where_it_was(
    turns: list[tuple[bool, str, str, dict[str, str]]], seed: int, data: st.DataObject
) -> None:
    talk = [user("begin")]
    for number, (calls, text, answer, arguments) in enumerate(turns):
        turn = called(f"id{number}", arguments or {"at": "x"}, text) if calls else said(text, reasoning_content=answer)
        talk += [turn, result(answer, f"id{number}") if calls else user(answer)]
    graph, rng = graph_of(*talk), random.Random(seed)
    for number in range(len(turns)):
        sent = [distort(message, rng) for message in talk[: 2 * number + 3]]
        assert found(graph, sent).node is drawn(graph, number)
    place = data.draw(st.integers(0, len(turns) - 1))
    changed = copy.deepcopy(talk)
    changed[2 * place + 1]["content"] = text_with(changed[2 * place + 1]["content"])
    if not changed[2 * place + 1].get("tool_calls"):
        assert found(graph, changed) == Continuation(node=None, new=changed, branching=Branching.REWRITTEN)


def text_with(text: str) -> str:
    return text + "!"

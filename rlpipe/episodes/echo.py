"""Recognition of a conversation that a client sends back: which node it continues, and with what.

Clients send every message again, and change them on the way: arguments are serialised anew, reasoning is left out,
texts become lists of parts, old turns are rewritten or summed up.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rlpipe.episodes.graph import EpisodeGraph, Node
from rlpipe.types import NO_TURN, ChatMessages

Message = Mapping[str, Any]
REASONING_KEYS = ("reasoning_content", "reasoning")


class Branching(StrEnum):
    """Reason why a conversation does not continue a known one."""

    FIRST = "first"
    REWRITTEN = "rewritten"
    """An earlier message says something else."""
    COMPACTED = "compacted"
    """It begins as a known conversation does, and leaves out or sums up what followed."""
    SUBAGENT = "subagent"
    """It begins in another way than any known conversation."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Continuation:
    """The place in the graph that a conversation continues."""

    node: Node | None
    """The last turn of the policy that it holds; None if it has to begin anew."""
    new: ChatMessages
    """Messages after that turn, or all of them."""
    branching: Branching | None = None
    """Reason why it begins anew."""


def locate(graph: EpisodeGraph, messages: ChatMessages) -> Continuation:
    """Return what a conversation, which ends where the policy is asked, continues.

    That is the policy's turn with the longest way to it, if all messages up to it are equal, or sent back changed in
    ways that say the same (``is_same``), and no turn that the policy did not draw follows. Among equal ones it is the
    newest.
    """
    best: tuple[int, Node] | None = None
    shared = 0
    for node in graph.nodes:
        known = [message for own in node.path() for message in own.messages]
        num_equal = _num_equal(known, messages)
        shared = max(shared, num_equal)
        is_whole = num_equal == len(known) < len(messages)
        if node.turn != NO_TURN and is_whole and (best is None or num_equal >= best[0]):
            best = num_equal, node
    if best is not None and all(message["role"] != "assistant" for message in messages[best[0] :]):
        return Continuation(node=best[1], new=messages[best[0] :])
    return Continuation(node=None, new=messages, branching=_why(graph, messages, shared))


def _why(graph: EpisodeGraph, messages: ChatMessages, num_shared: int) -> Branching:
    if not graph.nodes:
        return Branching.FIRST
    openings = [node.messages for node in graph.nodes if node.parent is None]
    first = [message for message in messages if message["role"] != "assistant"][:1]
    if not num_shared and not any(_num_equal(opening, first) for opening in openings):
        return Branching.SUBAGENT
    longest = max(sum(len(own.messages) for own in node.path()) for node in graph.leaves)
    return Branching.COMPACTED if len(messages) < longest else Branching.REWRITTEN


def _num_equal(known: Sequence[Message], sent: Sequence[Message]) -> int:
    """Return the length of the common beginning of two conversations."""
    number = 0
    for own, other in zip(known, sent, strict=False):
        if not is_same(own, other):
            break
        number += 1
    return number


def is_same(known: Message, sent: Message) -> bool:
    """Return whether a message that was sent back says what the known one says.

    Calls must have the same ids, names and arguments; beside them the text may be missing. Without calls the text must
    be equal. Reasoning may be missing, but not differ.
    """
    if known.get("role") != sent.get("role"):
        return False
    own, other = _calls(known), _calls(sent)
    if own != other or (known.get("tool_call_id") or None) != (sent.get("tool_call_id") or None):
        return False
    text, sent_text = text_of(known), text_of(sent)
    is_text_same = text == sent_text or bool(own and not sent_text)
    reasoning, sent_reasoning = _reasoning(known), _reasoning(sent)
    return is_text_same and (not sent_reasoning or sent_reasoning == reasoning)


def _calls(message: Message) -> list[tuple[str, str, str]]:
    return [
        (str(call.get("id")), str(call["function"]["name"]), canonical(call["function"].get("arguments")))
        for call in message.get("tool_calls") or ()
    ]


def canonical(arguments: Any) -> str:
    """Return a call's arguments, an object or its JSON in any form, as JSON in one form; other texts as they are."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return str(arguments)
    return json.dumps(arguments or {}, sort_keys=True, ensure_ascii=False)


def text_of(message: Message) -> str:
    """Return a message's text, whether it is a string or a list of parts; other parts are represented by their JSON."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] if part.get("type") == "text" else canonical(part) for part in content)
    return content or ""


def _reasoning(message: Message) -> str:
    return next((str(message[key]).strip() for key in REASONING_KEYS if message.get(key)), "")

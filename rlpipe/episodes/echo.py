"""Recognition of a conversation that a client sends back: which node it continues, and with what.

Clients send every message again, and change them on the way: arguments are serialised anew, reasoning is left out,
texts become lists of parts, old turns are rewritten or summed up.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

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


class Said(NamedTuple):
    """A message in one form, whatever form it was written in."""

    role: str
    text: str
    calls: tuple[tuple[str, str, str], ...]
    """Ids, names and arguments of its calls."""
    result_of: str | None
    reasoning: str

    @classmethod
    def of(cls, message: Message) -> Said:
        calls = tuple(
            (str(call.get("id")), str(call["function"]["name"]), canonical(call["function"].get("arguments")))
            for call in message.get("tool_calls") or ()
        )
        result_of = message.get("tool_call_id") or None
        return cls(str(message.get("role")), text_of(message), calls, result_of, _reasoning(message))

    def is_sent_back_as(self, sent: Said) -> bool:
        """Return whether a message that was sent back says the same as this one.

        Calls must have the same ids, names and arguments; beside them the text may be missing. Without calls the text
        must be equal. Reasoning may be missing, but not differ.
        """
        if (self.role, self.calls, self.result_of) != (sent.role, sent.calls, sent.result_of):
            return False
        is_text_same = self.text == sent.text or bool(self.calls and not sent.text)
        return is_text_same and sent.reasoning in ("", self.reasoning)


Known = dict[int, list[Said]]
"""Messages of nodes, by the node's id in memory."""


def is_same(known: Message, sent: Message) -> bool:
    """Return whether a message that was sent back says what the known one says; see ``Said.is_sent_back_as``."""
    return Said.of(known).is_sent_back_as(Said.of(sent))


def locate(
    graph: EpisodeGraph,
    messages: ChatMessages,
    *,
    known: Known | None = None,
    begins: Callable[[Node], bool] = lambda node: True,
) -> Continuation:
    """Return what a conversation, which ends where the policy is asked, continues.

    That is the policy's turn with the longest way to it, if all messages up to it are equal, or sent back changed in
    ways that say the same, and no turn that the policy did not draw follows. Among equal ones it is the newest.
    ``known`` keeps the messages of nodes between calls; conversations count whose first node ``begins`` accepts.
    """
    known, sent = {} if known is None else known, [Said.of(message) for message in messages]
    following: dict[int | None, list[tuple[int, Node]]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        following[None if node.parent is None else id(node.parent)].append((number, node))
    best: tuple[int, int, Node] | None = None
    shared = 0
    reached = [(0, number, node) for number, node in following[None] if begins(node)]
    while reached:
        start, number, node = reached.pop()
        if id(node) not in known:
            known[id(node)] = [Said.of(message) for message in node.messages]
        own = known[id(node)]
        stop = start + _num_equal(own, sent[start:])
        shared = max(shared, stop)
        if stop < start + len(own) or stop == len(sent):
            continue
        if node.turn != NO_TURN and (best is None or (stop, number) > best[:2]):
            best = stop, number, node
        reached += [(stop, *child) for child in following[id(node)]]
    if best is not None and all(message["role"] != "assistant" for message in messages[best[0] :]):
        return Continuation(node=best[2], new=messages[best[0] :])
    return Continuation(node=None, new=messages, branching=_why(graph, sent, shared))


def _why(graph: EpisodeGraph, sent: Sequence[Said], num_shared: int) -> Branching:
    if not graph.nodes:
        return Branching.FIRST
    openings = [[Said.of(message) for message in node.messages] for node in graph.nodes if node.parent is None]
    first = [message for message in sent if message.role != "assistant"][:1]
    if not num_shared and not any(_num_equal(opening, first) for opening in openings):
        return Branching.SUBAGENT
    longest = max(sum(len(own.messages) for own in node.path()) for node in graph.leaves)
    return Branching.COMPACTED if len(sent) < longest else Branching.REWRITTEN


def _num_equal(known: Sequence[Said], sent: Sequence[Said]) -> int:
    """Return the length of the common beginning of two conversations."""
    number = 0
    for own, other in zip(known, sent, strict=False):
        if not own.is_sent_back_as(other):
            break
        number += 1
    return number


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

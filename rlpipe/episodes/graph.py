"""Graph of an episode's conversation in the tokens that engines saw, and recognition of a history that is sent back.

A conversation may part: a program that rewrites or shortens its history goes on beside what it said before. Clients
send every message again, and change them on the way: arguments are serialised anew, reasoning is left out, texts become
lists of parts, old turns are rewritten or summed up.

Shapes: T tokens that a node adds, N tokens of a branch.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

import numpy as np

from rlpipe.data.render.messages import REASONING_KEYS
from rlpipe.types import NO_TURN, NO_VERSION, BoolArray, ChatMessages, FloatArray, IntArray

Message = Mapping[str, Any]


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """Messages that a conversation got together, and the tokens that they add.

    Raises ``ValueError`` if the arrays have different lengths, or if the first node of a conversation has no tokens
    or sampled ones, which have no predecessor.
    """

    parent: Node | None
    messages: ChatMessages
    token_ids: IntArray  # [T]
    loss_mask: BoolArray  # [T], the tokens that the policy sampled
    logprobs: FloatArray  # [T], 0 where unmasked
    policy_versions: IntArray  # [T], ``NO_VERSION`` where unmasked
    turn: int = NO_TURN
    """Number of the policy's turn in the episode, from 0."""
    reward: float = 0.0
    """Reward of the turn."""
    is_whole: bool = True
    """Whether the message says all that was sampled; else no conversation goes on after these tokens."""

    def __post_init__(self) -> None:
        lengths = {len(array) for array in (self.token_ids, self.loss_mask, self.logprobs, self.policy_versions)}
        if len(lengths) != 1:
            raise ValueError(f"a node's arrays have different lengths: {sorted(lengths)}")
        if self.parent is None and (not len(self.token_ids) or self.loss_mask[0]):
            raise ValueError("a conversation begins with tokens that the policy did not sample")

    def path(self) -> list[Node]:
        """Return the nodes from the first one to this one."""
        nodes = [self]
        while (parent := nodes[-1].parent) is not None:
            nodes.append(parent)
        return nodes[::-1]

    def token_path(self) -> IntArray:
        """Return all tokens up to and including this node, as an engine gets them."""
        return np.concatenate([node.token_ids for node in self.path()])


@dataclass(kw_only=True, slots=True, frozen=True)
class Branch:
    """A training sequence of an episode; the arrays end with the last token that counts."""

    nodes: list[Node]
    token_ids: IntArray  # [N]
    loss_mask: BoolArray  # [N]
    logprobs: FloatArray  # [N]
    policy_versions: IntArray  # [N]
    turns: IntArray  # [N], ``NO_TURN`` where unmasked


@dataclass(slots=True)
class EpisodeGraph:
    """The nodes of an episode, in the order in which they were added; the first node's conversation may be one of many.

    For example, a program that asks a second policy from scratch begins another conversation.
    """

    nodes: list[Node] = field(default_factory=list)

    def observe(self, parent: Node | None, messages: ChatMessages, token_ids: IntArray) -> Node:
        """Add what the policy gets to see."""
        length = len(token_ids)
        return self._add(
            Node(
                parent=parent,
                messages=messages,
                token_ids=token_ids.astype(np.int32),
                loss_mask=np.zeros(length, np.bool_),
                logprobs=np.zeros(length, np.float32),
                policy_versions=np.full(length, NO_VERSION, np.int32),
            )
        )

    def add_sampled(
        self,
        parent: Node,
        message: ChatMessages,
        token_ids: IntArray,
        *,
        logprobs: FloatArray,
        policy_versions: IntArray,
    ) -> Node:
        """Add a turn that the policy sampled."""
        return self._add(
            Node(
                parent=parent,
                messages=message,
                token_ids=token_ids.astype(np.int32),
                loss_mask=np.ones(len(token_ids), np.bool_),
                logprobs=logprobs.astype(np.float32),
                policy_versions=policy_versions.astype(np.int32),
                turn=len(self.turns),
            )
        )

    def remove_turn(self, turn: Node) -> None:
        """Remove a turn that nothing continues, and what was observed for it; later turns move up."""
        assert turn in self.leaves, "nothing continues it"
        self.nodes = [node for node in self.nodes if node is not turn]
        observation = turn.parent
        if observation is not None and observation.turn == NO_TURN and observation in self.leaves:
            self.nodes = [node for node in self.nodes if node is not observation]
        for number, node in enumerate(self.turns):
            node.turn = number

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    @property
    def turns(self) -> list[Node]:
        """Nodes that the policy sampled, in this order."""
        return [node for node in self.nodes if node.turn != NO_TURN]

    @property
    def leaves(self) -> list[Node]:
        """Nodes that no other continues."""
        continued = {id(node.parent) for node in self.nodes}
        return [node for node in self.nodes if id(node) not in continued]

    def branches(self) -> list[Branch]:
        """Return the sequences to train on: a sampled token counts in the first one that holds it, and only there."""
        return list(self._branches())

    def _branches(self) -> Iterator[Branch]:
        counted: set[int] = set()
        for leaf in self.leaves:
            nodes = leaf.path()
            while nodes and (id(nodes[-1]) in counted or nodes[-1].turn == NO_TURN):
                nodes.pop()  # nothing is trained after the last turn that counts
            if nodes:
                yield _branch(nodes, counted)
                counted |= {id(node) for node in nodes}


def _branch(nodes: list[Node], counted: set[int]) -> Branch:
    is_new = [id(node) not in counted for node in nodes]
    lengths = [len(node.token_ids) for node in nodes]
    mask = np.concatenate([node.loss_mask & new for node, new in zip(nodes, is_new, strict=True)])
    turns = np.repeat([node.turn for node in nodes], lengths)
    return Branch(
        nodes=nodes,
        token_ids=np.concatenate([node.token_ids for node in nodes]),
        loss_mask=mask,
        logprobs=np.where(mask, np.concatenate([node.logprobs for node in nodes]), 0).astype(np.float32),
        policy_versions=np.where(mask, np.concatenate([node.policy_versions for node in nodes]), NO_VERSION).astype(
            np.int32
        ),
        turns=np.where(mask, turns, NO_TURN).astype(np.int32),
    )


class Branching(StrEnum):
    """Reason why a conversation does not continue a known one."""

    FIRST = "first"
    REWRITTEN = "rewritten"
    """An earlier message says something else."""
    COMPACTED = "compacted"
    """The conversation begins as a known one does, and leaves out or sums up what followed."""
    SUBAGENT = "subagent"
    """The conversation begins in another way than any known one."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Continuation:
    """The node of the graph that a conversation continues."""

    node: Node | None
    """The last turn of the policy in the conversation; None if the conversation has to begin anew."""
    new: ChatMessages
    """Messages after that turn, or all of them."""
    branching: Branching | None = None
    """Reason why the conversation begins anew."""


class CanonicalMessage(NamedTuple):
    """A message in canonical form, for comparison with messages that were written in other forms."""

    role: str
    text: str
    calls: tuple[tuple[str, str, str], ...]
    """Ids, names and arguments of its calls."""
    result_of: str | None
    reasoning: str

    @classmethod
    def of(cls, message: Message) -> CanonicalMessage:
        calls = tuple(
            (str(call.get("id")), str(call["function"]["name"]), canonical(call["function"].get("arguments")))
            for call in message.get("tool_calls") or ()
        )
        result_of = message.get("tool_call_id") or None
        return cls(str(message.get("role")), text_of(message), calls, result_of, _reasoning(message))

    def matches(self, sent: CanonicalMessage) -> bool:
        """Return whether a message that was sent back says the same as this one.

        Calls must have the same ids, names and arguments; beside them the text may be missing. Without calls the text
        must be equal. Reasoning may be missing, but not differ.
        """
        if (self.role, self.calls, self.result_of) != (sent.role, sent.calls, sent.result_of):
            return False
        is_text_same = self.text == sent.text or bool(self.calls and not sent.text)
        return is_text_same and sent.reasoning in ("", self.reasoning)


Known = dict[int, list[CanonicalMessage]]
"""Messages of nodes, by the node's id in memory."""


def locate(
    graph: EpisodeGraph,
    messages: ChatMessages,
    *,
    known: Known | None = None,
    begins: Callable[[Node], bool] = lambda node: True,
) -> Continuation:
    """Return what a conversation, which ends where the policy is asked, continues.

    That is the policy's turn with the longest way to it, if all messages up to it are equal, or sent back changed in
    ways that say the same, and no turn that the policy did not sample follows. Among equal ones it is the newest.
    ``known`` keeps the messages of nodes between calls; conversations count whose first node ``begins`` accepts.
    """
    known, sent = {} if known is None else known, [CanonicalMessage.of(message) for message in messages]
    following: dict[int | None, list[tuple[int, Node]]] = defaultdict(list)
    for number, node in enumerate(graph.nodes):
        following[None if node.parent is None else id(node.parent)].append((number, node))
    best: tuple[int, int, Node] | None = None
    shared = 0
    reached = [(0, number, node) for number, node in following[None] if begins(node)]
    while reached:
        start, number, node = reached.pop()
        if id(node) not in known:
            known[id(node)] = [CanonicalMessage.of(message) for message in node.messages]
        node_messages = known[id(node)]
        stop = start + _num_equal(node_messages, sent[start:])
        shared = max(shared, stop)
        if stop < start + len(node_messages) or stop == len(sent):
            continue
        if node.turn != NO_TURN and node.is_whole and (best is None or (stop, number) > best[:2]):
            best = stop, number, node
        reached += [(stop, *child) for child in following[id(node)]]
    if best is not None and all(message["role"] != "assistant" for message in messages[best[0] :]):
        return Continuation(node=best[2], new=messages[best[0] :])
    return Continuation(node=None, new=messages, branching=_branching_reason(graph, sent, shared))


def _branching_reason(graph: EpisodeGraph, sent: Sequence[CanonicalMessage], num_shared: int) -> Branching:
    if not graph.nodes:
        return Branching.FIRST
    openings = [
        [CanonicalMessage.of(message) for message in node.messages] for node in graph.nodes if node.parent is None
    ]
    first = [message for message in sent if message.role != "assistant"][:1]
    if not num_shared and not any(_num_equal(opening, first) for opening in openings):
        return Branching.SUBAGENT
    longest = max(sum(len(ancestor.messages) for ancestor in node.path()) for node in graph.leaves)
    return Branching.COMPACTED if len(sent) < longest else Branching.REWRITTEN


def _num_equal(stored: Sequence[CanonicalMessage], sent: Sequence[CanonicalMessage]) -> int:
    """Return the length of the common beginning of two conversations."""
    number = 0
    for stored_message, sent_message in zip(stored, sent, strict=False):
        if not stored_message.matches(sent_message):
            break
        number += 1
    return number


def canonical(arguments: Any) -> str:
    """Return a call's arguments, an object or its JSON in any form, as JSON in one form; other texts as they are."""
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    try:
        read = json.loads(text, parse_float=_number)
    except (ValueError, RecursionError):
        return text
    return json.dumps(read or {}, sort_keys=True, ensure_ascii=False)


def _number(text: str) -> int | float:
    """Return the number; JavaScript, which has one kind of numbers, writes 6.0 as 6."""
    number = float(text)
    return int(number) if number.is_integer() else number


def text_of(message: Message) -> str:
    """Return a message's text, whether it is a string or a list of parts; other parts are represented by their JSON."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part["text"] if part.get("type") == "text" else canonical(part) for part in content)
    return content or ""


def _reasoning(message: Message) -> str:
    return next((str(message[key]).strip() for key in REASONING_KEYS if message.get(key)), "")

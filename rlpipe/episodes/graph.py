"""Graph of an episode's conversation in the tokens that engines saw, and the sequences that are trained on it.

A conversation may part: a program that rewrites or shortens its history goes on beside what it said before.

Shapes: T tokens that a node adds, N tokens of a branch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from rlpipe.types import NO_TURN, NO_VERSION, BoolArray, ChatMessages, FloatArray, IntArray


@dataclass(kw_only=True, slots=True, eq=False)
class Node:
    """Messages that a conversation got at one time, and the tokens that they add.

    Raises ``ValueError`` if the arrays have different lengths, or if the first node of a conversation has no tokens
    or drawn ones, which have no predecessor.
    """

    parent: Node | None
    messages: ChatMessages
    token_ids: IntArray  # [T]
    loss_mask: BoolArray  # [T], the tokens that the policy drew
    logprobs: FloatArray  # [T], 0 where unmasked
    policy_versions: IntArray  # [T], ``NO_VERSION`` where unmasked
    turn: int = NO_TURN
    """Number of the policy's turn in the episode, from 0."""
    reward: float = 0.0
    """Reward of the turn."""

    def __post_init__(self) -> None:
        lengths = {len(array) for array in (self.token_ids, self.loss_mask, self.logprobs, self.policy_versions)}
        if len(lengths) != 1:
            raise ValueError(f"a node's arrays have different lengths: {sorted(lengths)}")
        if self.parent is None and (not len(self.token_ids) or self.loss_mask[0]):
            raise ValueError("a conversation begins with tokens that the policy did not draw")

    def path(self) -> list[Node]:
        """Return the nodes from the first one to this one."""
        found = [self]
        while (parent := found[-1].parent) is not None:
            found.append(parent)
        return found[::-1]

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

    def draw(
        self,
        parent: Node,
        message: ChatMessages,
        token_ids: IntArray,
        *,
        logprobs: FloatArray,
        policy_versions: IntArray,
    ) -> Node:
        """Add a turn that the policy drew."""
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
        asked = turn.parent
        if asked is not None and asked.turn == NO_TURN and asked in self.leaves:
            self.nodes = [node for node in self.nodes if node is not asked]
        for number, node in enumerate(self.turns):
            node.turn = number

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    @property
    def turns(self) -> list[Node]:
        """Nodes that the policy drew, in this order."""
        return [node for node in self.nodes if node.turn != NO_TURN]

    @property
    def leaves(self) -> list[Node]:
        """Nodes that no other continues."""
        continued = {id(node.parent) for node in self.nodes}
        return [node for node in self.nodes if id(node) not in continued]

    def branches(self) -> list[Branch]:
        """Return the sequences to train on: each drawn token counts in the first one that holds it, and in no other."""
        return list(self._branches())

    def _branches(self) -> Iterator[Branch]:
        counted: set[int] = set()
        for leaf in self.leaves:
            nodes = leaf.path()
            while nodes and (id(nodes[-1]) in counted or nodes[-1].turn == NO_TURN):
                nodes.pop()  # nothing is trained behind the last turn that counts
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

"""Test conversations that show what a chat template writes around messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.data.masks.boundaries import RoleBoundary, find_turns
from rlpipe.data.render.template import ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.types import ChatMessages

WORDS = ("Kestrel", "Juniper", "Marigold", "Obsidian", "Tamarind")
"""Contents of the messages, words that no template contains."""
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
DIALOGUE = (USER, ASSISTANT, USER, ASSISTANT)
CALL_IDS = ("q8Zk3Lw7P", "t5Rm1Xc9V")
"""Ids of tool calls, of nine letters and digits as Mistral's templates require."""


class UnexpectedText(Exception):
    """Raised if a template does not render each message once, in order."""


@dataclass(slots=True, frozen=True)
class Probe:
    """A renderer of test conversations whose messages are one word each."""

    template: ChatTemplate

    def gaps(self, *roles: str, generation: bool = False) -> list[str]:
        """Return the text before the first word, between words, and after the last one.

        Raises ``UnusableRow`` if the template refuses these roles, and ``UnexpectedText`` if it does not render each
        word once, in order.
        """
        return _split(self._text(roles, generation), len(roles))

    def result_gaps(self, num_results: int = 1) -> list[str]:
        """Return the gaps of a user message, tool results that the assistant has called for, and an answer.

        Raises as ``gaps`` does.
        """
        return _split(self._results(num_results), num_results + 2)

    def turns(self, boundaries: Sequence[RoleBoundary], *roles: str) -> list[tuple[str, str]]:
        """Return role and text of each turn that the boundaries find; raise ``UnusableRow`` as ``gaps`` does."""
        return self._turns(boundaries, self._text(roles, False))

    def result_turns(self, boundaries: Sequence[RoleBoundary]) -> list[tuple[str, str]]:
        """Return role and text of the turns found in the conversation of ``result_gaps`` with one result."""
        return self._turns(boundaries, self._results(1))

    def _turns(self, boundaries: Sequence[RoleBoundary], text: str) -> list[tuple[str, str]]:
        token_ids = self.template.token_ids(text)
        decode = self.template.tokenizer.decode
        return [
            (turn.boundary.role, str(decode(token_ids[turn.start : turn.end])).strip())
            for turn in find_turns(token_ids, boundaries)
        ]

    def _results(self, num_results: int) -> str:
        user, *results, answer = _plain(zip((USER, *[TOOL] * num_results, ASSISTANT), WORDS, strict=False))
        function = {"name": "look", "arguments": {"at": "here"}}
        ids = CALL_IDS[:num_results]
        calls: list[Any] = [{"id": call_id, "type": "function", "function": function} for call_id in ids]
        caller: dict[str, Any] = {"role": ASSISTANT, "content": "", "tool_calls": calls}
        answered = [result | {"tool_call_id": call_id} for result, call_id in zip(results, ids, strict=True)]
        return self.template.text([user, caller, *answered, answer])

    def _text(self, roles: Sequence[str], generation: bool) -> str:
        words = list(zip(roles, WORDS, strict=False))
        text, refused = "", None
        for messages in (_plain(words), _in_parts(words)):
            try:
                text = self.template.text(messages, add_generation_prompt=generation)
            except UnusableRow as problem:
                refused = refused or problem
                continue
            if all(word in text for _, word in words):
                return text
        if not text and refused is not None:
            raise refused
        return text


def _split(text: str, num_words: int) -> list[str]:
    gaps, rest = [], text
    for word in WORDS[:num_words]:
        gap, found, rest = rest.partition(word)
        if not found:
            raise UnexpectedText("it does not render each message of a conversation, in order")
        gaps.append(gap)
    if any(word in gap for word in WORDS for gap in (*gaps, rest)):
        raise UnexpectedText("it renders a message of a conversation more than once")
    return [*gaps, rest]


def _plain(words: Iterable[tuple[str, str]]) -> ChatMessages:
    return [{"role": role, "content": word} for role, word in words]


def _in_parts(words: Iterable[tuple[str, str]]) -> ChatMessages:
    """Return messages whose contents are lists of parts, as templates of models with images may need them."""
    return [{"role": role, "content": [{"type": "text", "text": word}]} for role, word in words]

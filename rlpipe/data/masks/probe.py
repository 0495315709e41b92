"""Conversations that a chat template is tried on, to see what it writes around their messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.data.masks.boundaries import RoleBoundary, find_turns
from rlpipe.data.rows import UnusableRow
from rlpipe.data.template import ChatTemplate
from rlpipe.types import ChatMessages

WORDS = ("Kestrel", "Juniper", "Marigold", "Obsidian", "Tamarind")
"""The contents of messages, which no template has in itself."""
SYSTEM, USER, ASSISTANT, TOOL = "system", "user", "assistant", "tool"
DIALOGUE = (USER, ASSISTANT, USER, ASSISTANT)
CALL_ID = "q8Zk3Lw7P"
"""Of nine letters and digits, as Mistral's templates ask for."""


class UnexpectedText(Exception):
    """A template rendered something else than each message once, in order."""


@dataclass(slots=True, frozen=True)
class Probe:
    """Renders messages of one word each."""

    template: ChatTemplate

    def gaps(self, *roles: str, generation: bool = False) -> list[str]:
        """What stands before the first word, between words, and behind the last one.

        Raises ``UnusableRow`` if the template refuses these roles, and ``UnexpectedText``.
        """
        return _split(self._text(roles, generation), len(roles))

    def result_gaps(self) -> list[str]:
        """As ``gaps`` of user, tool and assistant, where the assistant calls the tool before. Raises alike."""
        user, result, answer = _plain(zip((USER, TOOL, ASSISTANT), WORDS, strict=False))
        call = {"id": CALL_ID, "type": "function", "function": {"name": "look", "arguments": {"at": "here"}}}
        caller: dict[str, Any] = {"role": ASSISTANT, "content": "", "tool_calls": [call]}
        return _split(self.template.text([user, caller, result | {"tool_call_id": CALL_ID}, answer]), 3)

    def turns(self, boundaries: Sequence[RoleBoundary], *roles: str) -> list[tuple[str, str]]:
        """Role and text of each turn that the boundaries find. Raises ``UnusableRow``."""
        token_ids = self.template.token_ids(self._text(roles, False))
        decode = self.template.tokenizer.decode
        return [
            (turn.boundary.role, str(decode(token_ids[turn.start : turn.end])).strip())
            for turn in find_turns(token_ids, boundaries)
        ]

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
    """As templates of models that see images may want it."""
    return [{"role": role, "content": [{"type": "text", "text": word}]} for role, word in words]

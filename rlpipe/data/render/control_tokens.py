"""Control tokens that are spelled in texts: they are encoded as plain text, so that no text ends its own turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rlpipe.data.render.messages import REASONING_KEYS
from rlpipe.data.render.template import ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.types import ChatMessages, IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

STAND_INS = range(0xF0000, 0xFFFFE)
"""Private characters that stand for control tokens in texts."""
SLOW_TOKENIZER = "the tokenizer is not a fast one, and does not say which tokens stand for which text"
HIDING_KEYS = ("content", "name", "tool_calls", *REASONING_KEYS)
"""Fields of messages with texts in which control tokens are hidden."""


def special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Return the tokenizer's special tokens, which are no text, unlike markers such as those of calls."""
    return {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}


def conversation_ids(
    template: ChatTemplate, messages: ChatMessages, render: Callable[[ChatMessages], str], *, num_trusted: int = 0
) -> IntArray:
    """Return the tokens of what ``render`` makes of messages, with control tokens in their texts as plain text.

    The first ``num_trusted`` messages, such as those of a data set, stay as they are. Raises ``UnusableRow``.
    """
    texts = ControlTokens(template)
    text = render(texts.hidden(messages, num_trusted=num_trusted))
    if not texts.hide_any:
        return template.token_ids(text)
    encoded = template.encode_with_offsets(text)
    if encoded.offsets is None:
        raise UnusableRow(SLOW_TOKENIZER)
    return texts.shown(encoded.token_ids, encoded.offsets, text)


def scored_ids(
    template: ChatTemplate, messages: ChatMessages, render: Callable[[ChatMessages], str], *, num_trusted: int = 0
) -> IntArray:
    """Return the tokens as ``conversation_ids`` does, also with a tokenizer that can't hide control tokens.

    There, they stay what they are: else a completion could avoid its score by spelling one. Raises ``UnusableRow`` if
    the messages can't be rendered.
    """
    try:
        return conversation_ids(template, messages, render, num_trusted=num_trusted)
    except UnusableRow:
        return template.token_ids(render(messages))


@lru_cache(maxsize=8)
def _control_patterns(tokenizer: PreTrainedTokenizerBase) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
    """Return patterns of the tokenizer's control tokens, and of the special ones of these."""
    vocabulary, special = tokenizer.get_added_vocab(), special_ids(tokenizer)
    return _pattern_of(vocabulary), _pattern_of(name for name, number in vocabulary.items() if number in special)


def _pattern_of(names: Iterable[str]) -> re.Pattern[str] | None:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None


def _unused_characters(messages: ChatMessages) -> Iterator[str]:
    """Yield private characters that the messages do not contain; fonts with icons for terminals use some of them."""
    text = json.dumps(messages, ensure_ascii=False, default=str)
    yield from (character for character in map(chr, STAND_INS) if character not in text)


class ControlTokens:
    """Texts in which control tokens are hidden until they have been encoded.

    In the assistant's own texts only special tokens are: the marks of thoughts and calls are part of its language.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self._template = template
        self._controls, self._special = _control_patterns(template.tokenizer)
        self._hidden: dict[str, str] = {}
        self._stand_ins: Iterator[str] = iter(())

    @property
    def hide_any(self) -> bool:
        return bool(self._hidden)

    def hidden(self, messages: ChatMessages, *, num_trusted: int = 0) -> ChatMessages:
        """Return the messages with a private character in place of each control token in their texts.

        Texts of the system have none, and the first ``num_trusted`` messages stay as they are.
        """
        patterns = {"user": self._controls, "tool": self._controls, "assistant": self._special}
        self._stand_ins = _unused_characters(messages)
        hidden = (
            message | {key: self._hide(message[key], pattern) for key in HIDING_KEYS if key in message}
            if (pattern := patterns.get(message.get("role", ""))) is not None
            else message
            for message in messages[num_trusted:]
        )
        return [*messages[:num_trusted], *hidden]

    def _hide(self, value: Any, pattern: re.Pattern[str]) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: self._placeholder(match.group()), value)
        if isinstance(value, Mapping):
            return {self._hide(key, pattern): self._hide(entry, pattern) for key, entry in value.items()}
        return [self._hide(entry, pattern) for entry in value] if isinstance(value, list | tuple) else value

    def _placeholder(self, token: str) -> str:
        if token not in self._hidden:
            self._hidden[token] = next(self._stand_ins)
        return self._hidden[token]

    def shown(self, token_ids: IntArray, offsets: IntArray, text: str) -> IntArray:
        """Return the tokens with those of plain text in place of the private characters' tokens."""
        if not self._hidden:
            return token_ids
        plain_ids = {character: self._as_text(token) for token, character in self._hidden.items()}
        shown_ids: list[int] = []
        last = -1
        for token_id, (start, stop) in zip(token_ids.tolist(), offsets.tolist(), strict=True):
            positions = [index for index in range(start, stop) if text[index] in plain_ids]
            if not positions:
                shown_ids.append(token_id)
                continue
            if stop - start > 1:
                raise UnusableRow("the tokenizer joins a control token in a text with its neighbours")
            if positions[0] != last:  # a character may take several tokens
                shown_ids += plain_ids[text[positions[0]]]
            last = positions[0]
        return np.array(shown_ids, np.int32)

    def _as_text(self, token: str) -> list[int]:
        """Return the tokens of a control token's name, which is cut so that no part of it is a control token."""
        controls = set(self._template.tokenizer.get_added_vocab().values())
        for cuts in ([1], range(1, len(token))):
            pieces = [token[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(token)], strict=True)]
            ids = [token_id for piece in pieces for token_id in self._template.token_ids(piece).tolist()]
            if controls.isdisjoint(ids):
                return ids
        raise UnusableRow(f"the tokenizer has no plain tokens for the text {token!r}")

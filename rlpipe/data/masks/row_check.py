"""Check of one row's loss mask against the messages that its characters come from.

A conversation is rendered twice, the second time with the characters of its texts replaced by those that stand for
their message. Where the two renderings differ, the character comes from that message; all other characters are the chat
template's. So a loss mask can be checked on each row, whatever the template, the tokenizer and the texts are.

Shapes: C characters of the rendered text, T tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np

from rlpipe.data.masks.rules import TrainedParts
from rlpipe.data.render.messages import CALLS, REASONING_KEYS, with_arguments
from rlpipe.data.render.template import Span
from rlpipe.data.row import UnusableRow
from rlpipe.types import BoolArray, ChatMessages, IntArray

TEMPLATE = -1
"""The origin of characters that no message contains."""
FIRST = 0xF0000
"""The first of the private characters that stand for messages, of which there are enough for 65,000."""
LAST = 0xFFFF0
TAG = r"</?[^<>\s]{1,40}>|\[/?[^\[\]\s]{1,40}\]|/\w+"
"""Parts of texts that templates look for, such as ``<think>``, ``[THINK]`` and ``/no_think``."""
ALL_BUT_TAGS = re.compile(rf"({TAG})|[^\s<\[/]+|\S")
WORDS_BUT_TAGS = re.compile(rf"({TAG})|\w+")


@dataclass(slots=True, frozen=True)
class Origins:
    """The origins of a rendered text's characters."""

    messages: IntArray
    """Index of the message that each character comes from ``[C]``, or ``TEMPLATE``."""
    replaced: re.Pattern[str]
    """Pattern of the texts that were replaced; the rest has the origin ``TEMPLATE``, wherever it comes from."""

    def span(self, message: int) -> tuple[int, int] | None:
        """Return the first character of a message and the one after its last, or None if none is shown."""
        indices = np.flatnonzero(self.messages == message)
        return (int(indices[0]), int(indices[-1]) + 1) if len(indices) else None


def find_origins(render: Callable[[ChatMessages], str], messages: ChatMessages, text: str) -> Origins | None:
    """Return the origins of ``text``, the rendered ``messages``; None if the template's output depends on the texts.

    ``render`` returns the rendered text of other messages, or raises ``UnusableRow``.
    """
    if len(messages) > LAST - FIRST:
        return None
    original = _code_points(text)
    for replaced in (ALL_BUT_TAGS, WORDS_BUT_TAGS):
        try:
            marked = _code_points(render([_marked(message, index, replaced) for index, message in enumerate(messages)]))
        except UnusableRow:
            continue
        if len(marked) != len(original):
            continue
        origins = np.where(marked != original, marked - FIRST, TEMPLATE).astype(np.int32)
        if np.all((origins >= TEMPLATE) & (origins < len(messages))):
            return Origins(origins, replaced)
    return None


def _code_points(text: str) -> IntArray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int32)


def _marked(message: Mapping[str, Any], index: int, replaced: re.Pattern[str]) -> dict[str, Any]:
    """Return the message with its texts, its reasoning and the values of its calls' arguments replaced."""
    stand_in = chr(FIRST + index)
    replace = partial(replaced.sub, lambda match: match[0] if match[1] else stand_in * len(match[0]))
    marked = {**message, "content": _texts_replaced(message.get("content"), replace, keys=("text",))}
    marked |= {key: _texts_replaced(message[key], replace) for key in REASONING_KEYS if key in message}
    return with_arguments(marked, lambda value: _texts_replaced(value, replace) if isinstance(value, dict) else value)


def _texts_replaced(value: Any, replace: Callable[[str], str], *, keys: Sequence[str] | None = None) -> Any:
    """Return the value with its texts replaced; of dictionaries, those of ``keys`` or of all."""
    if isinstance(value, str):
        return replace(value)
    if isinstance(value, list | tuple):
        return [_texts_replaced(child, replace, keys=keys) for child in value]
    if isinstance(value, Mapping):
        return {
            key: _texts_replaced(child, replace, keys=keys) if keys is None or key in keys else child
            for key, child in value.items()
        }
    return value


def tokens_with(characters: BoolArray, offsets: IntArray) -> BoolArray:
    """Return which tokens ``[T]``, of ``offsets`` ``[T, 2]``, have one of the marked ``characters`` ``[C]``.

    A token of no width, as of tokenizers that trim white space, belongs to the character before it.
    """
    counts = np.concatenate([[0], np.cumsum(characters)])
    starts, stops = offsets.T
    starts = np.where(starts == stops, np.maximum(starts - 1, 0), starts)
    marked: BoolArray = counts[stops] > counts[starts]
    return marked


@dataclass(frozen=True)
class RowCheck:
    """The origins of a row's tokens, and what its messages want of them."""

    origins: Origins
    text: str
    offsets: IntArray
    """First character of each token and the one after its last ``[T, 2]``."""
    messages: ChatMessages
    """The messages as the template renders them."""
    parts: TrainedParts
    has_endless: bool = False
    """Whether turns of a trained role have no end marker, so that they go to the end of the sequence."""

    @cached_property
    def _excluded(self) -> BoolArray:
        """Characters of messages, and of parts of messages, that are not to be trained, though their roles are."""
        excluded = np.isin(self.origins.messages, self.parts.untrained)
        for index, spans in self.parts.spans.items():
            first, stop, offset = self._position(index)
            excluded[first:stop] = True
            for start, end in spans:
                excluded[max(start + offset, first) : max(end + offset, first)] = False
        return excluded

    def _position(self, index: int) -> tuple[int, int, int]:
        """Return where a message's content is in the text: first character, the one after its last, and its offset.

        Raises ``UnusableRow`` if the template does not write the content as it is.
        """
        content, span = self.messages[index]["content"], self.origins.span(index)
        if isinstance(content, list) and len(content) == 1:
            content = content[0].get("text")
        shown = [hit.span() for hit in self.origins.replaced.finditer(content or "") if not hit[1]]
        if span is None or not shown or self.text[slice(*span)] != content[shown[0][0] : shown[-1][1]]:
            raise UnusableRow(
                f"message {index + 1}: the chat template rewrites its content, so its trained spans can't be found"
            )
        return *span, span[0] - shown[0][0]

    def without_untrained(self, mask: BoolArray, spans: Sequence[Span]) -> BoolArray:
        """Return the mask ``[T]`` without what the messages exclude, and without the ends of turns that are excluded.

        ``spans`` are the turns that it is made of: first token and the one after the last, which may be an end marker.
        """
        if self.parts.is_everything:
            return mask
        mask = mask.copy()
        excluded = tokens_with(self._excluded, self.offsets)
        mask[excluded] = False
        for start, stop in spans:
            text_tokens = start + np.flatnonzero((excluded | self._trained)[start:stop])
            if not len(text_tokens):
                continue
            if not self._trained[start:stop].any():
                mask[start:stop] = False
                continue
            if excluded[text_tokens[0]]:
                mask[start : text_tokens[0]] = False  # such as a tag, which the template writes for the message
            if excluded[text_tokens[-1]]:
                mask[text_tokens[-1] : stop] = False  # whether to end there is not trained either
            for gap in np.flatnonzero(np.diff(text_tokens) > 1):  # blanks within what is excluded
                first, last = text_tokens[gap], text_tokens[gap + 1]
                mask[first:last] &= not (excluded[first] and excluded[last])
        indices = sorted([*self.parts.trained, *self.parts.untrained])
        if len(spans) == len(indices):
            for index, span in zip(indices, spans, strict=True):
                if index in self.parts.untrained:
                    mask[slice(*span)] = False
        return mask

    @cached_property
    def _trained(self) -> BoolArray:
        """Tokens that are to be trained."""
        trained = tokens_with(np.isin(self.origins.messages, self.parts.trained), self.offsets)
        return trained & ~tokens_with(self._excluded, self.offsets)

    def require_right(self, mask: BoolArray, spans: Sequence[Span]) -> None:
        """Raise ``UnusableRow`` if the mask ``[T]`` trains a message of another role, or leaves one out."""
        roles = [message["role"] for message in self.messages]
        listed = {*self.parts.trained, *self.parts.untrained}
        unlisted = [
            index for index in range(len(roles)) if index not in listed and roles[index] not in self.parts.folded
        ]
        wrong = tokens_with(np.isin(self.origins.messages, unlisted), self.offsets) & mask
        if wrong.any():
            why = "its text looks like a turn to train, or the chat template writes it within one"
            if self.has_endless:
                why = "with end: null (data.role_boundaries), a turn before it goes to the end of the row"
            raise UnusableRow(f"message {self._message_at(wrong, unlisted)} would be trained: {why}")
        missing = self._trained & ~mask
        missing[:1] = False
        if missing.any():
            raise UnusableRow(
                f"message {self._message_at(missing, self.parts.trained)} would not be trained: the markers of its "
                "turn merge with adjacent text, or the chat template writes none before it"
            )
        for index in self.parts.trained:
            num_shown = self._num_shown[index]
            if num_shown < (num_expected := self._num_required(index)):
                lost = f"{num_expected - num_shown} characters of " if num_shown else ""
                raise UnusableRow(
                    f"the chat template leaves out {lost}message {index + 1} ({roles[index]}), so it would not be "
                    "trained as it is"
                )
        silent = sum(self.origins.span(index) is None for index in self.parts.trained)
        empty = sum(mask[start:stop].any() and not self._trained[start:stop].any() for start, stop in spans)
        if empty > silent:
            raise UnusableRow(
                f"{empty} turns without text would be trained, but {silent} messages have none: a text of another "
                "message looks like such a turn"
            )

    def _message_at(self, tokens: BoolArray, candidates: Sequence[int]) -> str:
        """Return number and role of the first candidate in a marked token."""
        for start, stop in self.offsets[tokens]:
            for index in self.origins.messages[max(min(start, stop - 1), 0) : stop]:
                if index != TEMPLATE and index in candidates:
                    return f"{index + 1} ({self.messages[index]['role']})"
        raise AssertionError("a token of no candidate")

    @cached_property
    def _num_shown(self) -> list[int]:
        """Number of the text's characters that come from each message."""
        counts: list[int] = np.bincount(self.origins.messages - TEMPLATE, minlength=len(self.messages) + 1).tolist()
        return counts[1:]

    def _num_required(self, index: int) -> int:
        """Return how many of a message's replaced characters the template has to write.

        Templates leave out the reasoning of earlier turns on purpose, whatever its form, and many the text beside
        calls; the name of a call may be all that they write of it.
        """
        if self._calls(index):
            return self._count(index, *CALLS) if self._num_shown[index] else 0
        num_characters = self._count(index, "content")
        return num_characters if index == len(self.messages) - 1 else min(num_characters, 1)

    def omissions(self) -> Iterator[str]:
        """Yield what the template leaves out of trained messages, though they have it: their reasoning, for example.

        Of reasoning in a key of its own, only the last message is looked at.
        """
        for index in self.parts.trained:
            num_shown, calls = self._num_shown[index], self._calls(index)
            if calls and 0 < num_shown < self._count(index, "content", *calls):
                yield "the text of messages beside their calls"
            reasoning = [key for key in REASONING_KEYS if self.messages[index].get(key)]  # names of the same text
            is_last = index == len(self.messages) - 1
            if reasoning and is_last and 0 < num_shown < self._count(index, "content", *calls, reasoning[0]):
                yield f"the reasoning of messages ({reasoning[0]})"

    def _calls(self, index: int) -> list[str]:
        return [key for key in CALLS if self.messages[index].get(key)]

    def _count(self, index: int, *keys: str) -> int:
        """Return how many characters of a message's ``keys`` are replaced."""
        held = {key: value for key, value in self.messages[index].items() if key in keys}
        marked = json.dumps(_marked(held, index, self.origins.replaced), ensure_ascii=False, default=str)
        return marked.count(chr(FIRST + index))

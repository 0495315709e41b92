"""Which message each character of a rendered conversation comes from.

A conversation is rendered twice, the second time with the characters of its texts replaced by those that stand for
their message. Where the two renderings differ, the character comes from that message; all other characters are the chat
template's. So a loss mask can be checked on each row, whatever the template, the tokenizer and the texts are.

Shapes: C characters of the rendered text, T tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from rlpipe.data.render.messages import REASONING_KEYS, with_arguments
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
        places = np.flatnonzero(self.messages == message)
        return (int(places[0]), int(places[-1]) + 1) if len(places) else None


def find_origins(render: Callable[[ChatMessages], str], messages: ChatMessages, text: str) -> Origins | None:
    """Return the origins of ``text``, the rendered ``messages``; None if the template's output depends on the texts.

    ``render`` returns the rendered text of other messages, or raises ``UnusableRow``.
    """
    if len(messages) > LAST - FIRST:
        return None
    given = _code_points(text)
    for replaced in (ALL_BUT_TAGS, WORDS_BUT_TAGS):
        try:
            other = _code_points(render([_marked(own, index, replaced) for index, own in enumerate(messages)]))
        except UnusableRow:
            continue
        if len(other) != len(given):
            continue
        found = np.where(other != given, other - FIRST, TEMPLATE).astype(np.int32)
        if np.all((found >= TEMPLATE) & (found < len(messages))):
            return Origins(found, replaced)
    return None


def _code_points(text: str) -> IntArray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.int32)


def _marked(message: Mapping[str, Any], index: int, replaced: re.Pattern[str]) -> dict[str, Any]:
    """Return the message with its texts, its reasoning and the values of its calls' arguments replaced."""
    stand_in = chr(FIRST + index)
    replace = partial(replaced.sub, lambda found: found[0] if found[1] else stand_in * len(found[0]))
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
    found: BoolArray = counts[stops] > counts[starts]
    return found

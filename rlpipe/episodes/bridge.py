"""Bridges between turns: the tokens that a chat template writes after an answer, up to the policy's next turn.

A conversation is never rendered again: templates drop reasoning from earlier turns, and tokenizers split the text of an
answer in another way than the policy sampled it. A bridge is the end of a short made-up conversation instead. Whether a
template writes the same after every history is tried once, before the run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.derivation import ASSISTANT, CALL_IDS
from rlpipe.data.masks.rules import find_boundaries
from rlpipe.data.render.messages import REASONING_KEYS
from rlpipe.data.render.template import EMPTY_CONTENTS, PROBE_WORD, ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.episodes.tools import whole_characters
from rlpipe.errors import InputError
from rlpipe.types import ChatMessages, IntArray

STAND_INS = range(0xF0000, 0xFFFFE)
"""Private characters that stand for control tokens in texts."""
USER_MESSAGE, RESULT, RESULTS = "a user's message", "a tool's result", "two results"
RESULT_AND_USER = "a result and a user's message"
SLOW_TOKENIZER = "the tokenizer is not a fast one, and does not say which tokens stand for which text"
HIDING_KEYS = ("content", "name", "tool_calls", *REASONING_KEYS)
"""Fields of messages with texts in which control tokens are hidden."""
Message = Mapping[str, Any]


class Unbridgeable(Exception):
    """Raised if the tokens after an answer can't be determined; the message is the reason."""


def turn_ends(template: ChatTemplate, data: DataConfig) -> set[int]:
    """Return the tokens that end the assistant's turns by the template.

    They are the tokenizer's end, the turns' end markers, and the markers of results within a turn (Gemma 4).
    """
    end_ids = {template.tokenizer.eos_token_id} - {None}
    with suppress(InputError):  # a template whose turns can't be told apart
        for boundary in find_boundaries(template, data)[1]:
            ends_turn = boundary.role == ASSISTANT and boundary.include_end
            marker = boundary.start if boundary.interrupts else boundary.end if ends_turn else None
            end_ids |= set(marker) if marker is not None and len(marker) == 1 else set()
    return end_ids


def special_ids(template: ChatTemplate) -> set[int]:
    """Return the tokenizer's special tokens, which are no text, unlike markers such as those of calls."""
    return {number for number, token in template.tokenizer.added_tokens_decoder.items() if token.special}


@dataclass(slots=True, frozen=True)
class Suffix:
    """The end token of an answer in its template, and the tokens after it up to the next answer."""

    end_id: int
    token_ids: IntArray

    def after(self, turn: IntArray, bridge: Bridge) -> IntArray:
        """Return the tokens after a turn: the suffix, after an end token if the turn was cut off before its own."""
        end = [] if bridge.has_ended(turn) else [self.end_id]
        return np.array([*end, *self.token_ids], np.int32)


@dataclass
class Bridge:
    """Text of a template after the end of an answer; ``end_ids`` are the tokens that end the policy's turns in it."""

    template: ChatTemplate
    end_ids: Collection[int]
    further_end_ids: Collection[int] = ()
    """Tokens that end a turn in the engines alone, such as the end of a text in a template with another marker."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Kinds of messages that no bridge leads over, with the reasons; see ``check_bridge``."""
    _choices_of_content: dict[tuple[str, int], Sequence[str | None]] = field(default_factory=dict, init=False)
    """Content of an answer with calls, by the kind of the messages after it and the number of calls.

    Finding it takes four renderings.
    """

    def has_ended(self, turn: Sequence[int] | IntArray) -> bool:
        """Return whether the last token of a turn ends it."""
        return len(turn) > 0 and (turn[-1] in self.end_ids or turn[-1] in self.further_end_ids)

    def _control_tokens(self) -> ControlTokens:
        return ControlTokens(self.template, *self._control_patterns)

    @cached_property
    def _control_patterns(self) -> tuple[re.Pattern[str] | None, re.Pattern[str] | None]:
        """Patterns of the tokenizer's control tokens, and of the special ones of these, made once for all turns."""
        vocabulary, special = self.template.tokenizer.get_added_vocab(), special_ids(self.template)
        return _pattern_of(vocabulary), _pattern_of(name for name, number in vocabulary.items() if number in special)

    def suffix(self, answer: Message, new: ChatMessages) -> Suffix:
        """Return what follows an answer if ``new`` messages do.

        Control tokens in the messages' texts are encoded as plain text. Raises ``Unbridgeable``.
        """
        if (kind := kind_of(new)) in self.refused:
            raise Unbridgeable(self.refused[kind])
        probe = _Probe(answer, new)
        texts = self._control_tokens()
        question = {"role": "user", "content": PROBE_WORD}
        choices = self._choices_of_content.get((kind, probe.num_calls), EMPTY_CONTENTS)
        try:
            messages = self.template.as_taken([question, probe.answer, *texts.hidden(new)], choices)
            rendered = whole_characters(self.template.render(messages, add_generation_prompt=True))
        except UnusableRow as error:
            raise Unbridgeable(str(error)) from error
        self._choices_of_content[kind, probe.num_calls] = (messages[1]["content"],)
        start = rendered.rfind(probe.last_word)
        if start < 0:
            raise Unbridgeable("the chat template leaves out what the assistant said before")
        rendered = rendered[start:]  # tokens after a control token don't depend on what is before it
        encoded = self.template.encode_with_offsets(rendered)
        if encoded.offsets is None:
            raise Unbridgeable(SLOW_TOKENIZER)
        ends = np.isin(encoded.token_ids, list(self.end_ids)) & (encoded.offsets[:, 0] > 0)
        if not ends.any():
            raise Unbridgeable("the chat template writes no end token after the assistant's turn")
        end = int(np.flatnonzero(ends)[0])
        after_end = texts.shown(encoded.token_ids[end + 1 :], encoded.offsets[end + 1 :], rendered)
        return Suffix(int(encoded.token_ids[end]), after_end)

    def whole(self, messages: ChatMessages) -> IntArray:
        """Return the tokens of a conversation up to the policy's next turn.

        Control tokens in texts are encoded as plain text. Raises ``Unbridgeable``.
        """
        texts = self._control_tokens()
        try:
            text = whole_characters(self.template.text(texts.hidden(messages), add_generation_prompt=True))
        except UnusableRow as error:
            raise Unbridgeable(str(error)) from error
        if not texts.hide_any:
            return self.template.token_ids(text)
        encoded = self.template.encode_with_offsets(text)
        if encoded.offsets is None:
            raise Unbridgeable(SLOW_TOKENIZER)
        return texts.shown(encoded.token_ids, encoded.offsets, text)


def kind_of(new: ChatMessages) -> str:
    """Return the kind of messages in ``KINDS``; raise ``Unbridgeable`` if they are of none."""
    roles = tuple(message["role"] for message in new)
    num_results = sum(role == "tool" for role in roles)
    kinds = {
        ("user",): USER_MESSAGE,
        ("tool",): RESULT,
        ("tool",) * max(num_results, 2): RESULTS,
        (*("tool",) * max(num_results, 1), "user"): RESULT_AND_USER,
    }
    if roles not in kinds:
        raise Unbridgeable(f"the chat template does not allow appending messages of {', '.join(roles) or 'nobody'}")
    return kinds[roles]


class _Probe:
    """Answer with the calls of a given one, made of words that do not occur in the messages after it."""

    def __init__(self, answer: Message, new: ChatMessages) -> None:
        text, number = repr(new), 0
        while f"{PROBE_WORD}{number}" in text:
            number += 1
        self.last_word = f"{PROBE_WORD}{number}"
        calls = answer.get("tool_calls") or ()
        self.num_calls = len(calls)
        self.answer: dict[str, Any] = {"role": "assistant", "content": None if calls else self.last_word}
        if calls:
            self.answer["tool_calls"] = [self._with_word(call) for call in calls]

    def _with_word(self, call: Message) -> dict[str, Any]:
        return {**call, "function": {"name": call["function"]["name"], "arguments": {"at": self.last_word}}}


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

    def __init__(
        self, template: ChatTemplate, controls: re.Pattern[str] | None, special: re.Pattern[str] | None
    ) -> None:
        self._template, self._controls, self._special = template, controls, special
        self._hidden: dict[str, str] = {}
        self._stand_ins: Iterator[str] = iter(())

    @property
    def hide_any(self) -> bool:
        return bool(self._hidden)

    def hidden(self, messages: ChatMessages) -> ChatMessages:
        """Return the messages with a private character in place of each control token in their texts.

        Texts of the system have none.
        """
        patterns = {"user": self._controls, "tool": self._controls, "assistant": self._special}
        self._stand_ins = _unused_characters(messages)
        return [
            message | {key: self._hide(message[key], pattern) for key in HIDING_KEYS if key in message}
            if (pattern := patterns.get(message["role"])) is not None
            else message
            for message in messages
        ]

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
                raise Unbridgeable("the tokenizer joins a control token in a text with its neighbours")
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
        raise Unbridgeable(f"the tokenizer has no plain tokens for the text {token!r}")


@dataclass(slots=True)
class BridgeCheck:
    """Result of trying a bridge on histories of several shapes."""

    accepted: list[str] = field(default_factory=list)
    """Kinds of messages after which the template writes the same after every history."""
    refused: dict[str, str] = field(default_factory=dict)
    """Reasons, by kind, why no bridge leads over them: they are rendered anew, as branches of their own."""


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _called(*ids: str, text: str | None = None) -> dict[str, Any]:
    calls = [
        {"id": call_id, "type": "function", "function": {"name": "look", "arguments": {"at": "home"}}}
        for call_id in ids
    ]
    return {"role": "assistant", "content": text, "tool_calls": calls}


def _result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "name": "look", "content": text}


FIRST, SECOND = CALL_IDS
HISTORIES: Sequence[ChatMessages] = (
    [_user("How far is it?")],
    [{"role": "system", "content": "You know the way."}, _user("Which way?")],
    [_user("Hello"), _assistant("Hello, where to?"), _user("To the sea, {please}.\n")],
    [_user("Where?"), _called(FIRST), _result(FIRST, "north"), _assistant("North."), _user("And then?")],
    [_user("Два пути\n\nили три?"), _assistant("<b>Два</b>"), _user("1 + 1 = ?"), _assistant("2"), _user("  Why?  ")],
    [_user("```\ndef way(): ...\n```"), _assistant("It has no end.\n"), _user("Has it none?")],
    [_user("a" * 500)],
)
MIN_HISTORIES = 5
"""Histories that a template must accept to be trusted; it may know neither system messages nor tools."""
KINDS: Mapping[str, tuple[Message, ChatMessages]] = {
    USER_MESSAGE: (_assistant("It is far."), [_user("How far?")]),
    RESULT: (_called(FIRST), [_result(FIRST, "ten miles")]),
    RESULTS: (_called(FIRST, SECOND), [_result(FIRST, "ten miles"), _result(SECOND, "two ways")]),
    RESULT_AND_USER: (_called(FIRST), [_result(FIRST, "ten miles"), _user("Then go.")]),
}


def check_bridge(bridge: Bridge) -> BridgeCheck:
    """Try the bridge on histories of several shapes, against renderings of the whole conversations."""
    check = BridgeCheck()
    for kind, (answer, new) in KINDS.items():
        if (reason := _why_refused(bridge, answer, new)) is None:
            check.accepted.append(kind)
        else:
            check.refused[kind] = reason
    return check


def _why_refused(bridge: Bridge, answer: Message, new: ChatMessages) -> str | None:
    try:
        expected = bridge.suffix(answer, new)
    except Unbridgeable as problem:
        return str(problem)
    num_tried = 0
    for history in HISTORIES:
        try:
            rendered = render_whole(bridge.template, [*history, dict(answer), *new])
        except UnusableRow:
            continue  # the template takes no such history at all
        num_tried += 1
        if not ends_with(rendered, expected):
            return "what the chat template writes after it depends on the history"
    if num_tried < MIN_HISTORIES:
        return f"the chat template accepts it after {num_tried} of {len(HISTORIES)} histories, too few to tell"
    return None


def render_whole(template: ChatTemplate, messages: ChatMessages) -> IntArray:
    """Return the tokens of a conversation up to the policy's next turn; raise ``UnusableRow`` if that fails."""
    return template.token_ids(template.text(messages, add_generation_prompt=True))


def ends_with(whole: IntArray, suffix: Suffix) -> bool:
    """Return whether a conversation ends with a suffix, after the suffix's end token."""
    start = len(whole) - len(suffix.token_ids)
    return start > 0 and whole[start - 1] == suffix.end_id and np.array_equal(whole[start:], suffix.token_ids)

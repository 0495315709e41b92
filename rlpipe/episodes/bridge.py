"""Bridges between turns: the tokens that a chat template writes after an answer, up to the policy's next turn.

A conversation is never rendered again: templates drop reasoning from earlier turns, and tokenizers split the text of an
answer in another way than the policy sampled it. A bridge is the end of a short made-up conversation instead. Whether a
template writes the same after every history is tried once, before the run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.masks.derivation import ASSISTANT, CALL_IDS
from rlpipe.data.masks.rules import find_boundaries
from rlpipe.data.render.control_tokens import SLOW_TOKENIZER, ControlTokens, conversation_ids
from rlpipe.data.render.messages import REASONING_KEYS
from rlpipe.data.render.template import EMPTY_CONTENTS, PROBE_WORD, ChatTemplate
from rlpipe.data.row import UnusableRow
from rlpipe.episodes.tools import whole_characters
from rlpipe.errors import InputError
from rlpipe.types import ChatMessages, IntArray

FIRST_WORD = "Juniper"
USER_MESSAGE, RESULT, RESULTS = "a user's message", "a tool's result", "two results"
RESULT_AND_USER = "a result and a user's message"
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


def turn_starts(template: ChatTemplate, data: DataConfig) -> set[int]:
    """Return the tokens that alone begin a role's turn, or a result within a turn, by the template."""
    with suppress(InputError):  # as above
        return {boundary.start[0] for boundary in find_boundaries(template, data)[1] if len(boundary.start) == 1}
    return set()


def ends_within_turns(template: ChatTemplate, end_ids: Collection[int]) -> set[int]:
    """Return the end tokens that the template also writes between a turn's reasoning and its answer (gpt-oss)."""
    reasoned = dict.fromkeys(REASONING_KEYS, FIRST_WORD)
    turn = {"role": "assistant", "content": PROBE_WORD, **reasoned}
    with suppress(UnusableRow):
        text = template.text([{"role": "user", "content": "Where?"}, turn])
        _, is_shown, after = text.rpartition(FIRST_WORD)
        between = after.partition(PROBE_WORD)[0] if is_shown else ""
        return {*end_ids} & {*template.token_ids(between).tolist()}
    return set()


@dataclass(slots=True, frozen=True)
class Suffix:
    """The end token of an answer in its template, and the tokens after it up to the next answer."""

    end_id: int
    token_ids: IntArray

    def after(self, turn: IntArray, bridge: Bridge) -> IntArray:
        """Return the tokens after a turn: the suffix, after its end token unless the turn has ended.

        An end that also begins something, such as the next role's turn (GLM), has no other in its place.
        """
        begins = self.end_id in bridge.starting_ids or (len(turn) > 0 and turn[-1] in bridge.starting_ids)
        has_ended = len(turn) > 0 and turn[-1] == self.end_id if begins else bridge.has_ended(turn)
        return np.array([*([] if has_ended else [self.end_id]), *self.token_ids], np.int32)


@dataclass
class Bridge:
    """Text of a template after the end of an answer; ``end_ids`` are the tokens that end the policy's turns in it."""

    template: ChatTemplate
    end_ids: Collection[int]
    further_end_ids: Collection[int] = ()
    """Tokens that end a turn in the engines alone, such as the end of a text in a template with another marker."""
    starting_ids: Collection[int] = ()
    """Ends of turns that are the begin of the next role's turn, too, or of a result."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Kinds of messages that no bridge leads over, with the reasons; see ``check_bridge``."""
    _choices_of_content: dict[tuple[str, int], Sequence[str | None]] = field(default_factory=dict, init=False)
    """Content of an answer with calls, by the kind of the messages after it and the number of calls.

    Finding it takes four renderings.
    """

    def has_ended(self, turn: Sequence[int] | IntArray) -> bool:
        """Return whether the last token of a turn ends it."""
        return len(turn) > 0 and (turn[-1] in self.end_ids or turn[-1] in self.further_end_ids)

    def suffix(self, answer: Message, new: ChatMessages) -> Suffix:
        """Return what follows an answer if ``new`` messages do.

        Control tokens in the messages' texts are encoded as plain text. Raises ``Unbridgeable``.
        """
        if (kind := kind_of(new)) in self.refused:
            raise Unbridgeable(self.refused[kind])
        probe = _Probe(answer, new)
        texts = ControlTokens(self.template)
        question = {"role": "user", "content": PROBE_WORD}
        choices = self._choices_of_content.get((kind, probe.num_calls), EMPTY_CONTENTS)
        try:
            messages = self.template.as_taken([question, *texts.hidden([probe.answer, *new])], choices)
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
        try:
            after_end = texts.shown(encoded.token_ids[end + 1 :], encoded.offsets[end + 1 :], rendered)
        except UnusableRow as error:
            raise Unbridgeable(str(error)) from error
        return Suffix(int(encoded.token_ids[end]), after_end)

    def whole(self, messages: ChatMessages) -> IntArray:
        """Return the tokens of a conversation up to the policy's next turn.

        Control tokens in texts are encoded as plain text. Raises ``Unbridgeable``.
        """

        def rendered(hidden: ChatMessages) -> str:
            return str(whole_characters(self.template.text(hidden, add_generation_prompt=True)))

        try:
            return conversation_ids(self.template, messages, rendered)
        except UnusableRow as error:
            raise Unbridgeable(str(error)) from error


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

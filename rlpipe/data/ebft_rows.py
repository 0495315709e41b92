"""Transforms that make rows with a prompt and a ground truth: of pairs, conversations, and reasoning.

Each is a ``data.transform``, such as ``rlpipe.data.ebft_rows:first_turn``. The prompt goes to ``data.prompt_column``,
the ground truth to ``ground_truth`` or what ``data.transform_args.truth_column`` says. The columns that they are made
of are removed, the others kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from rlpipe.data.render.formats import (
    CONVERSATIONS,
    conversation,
    conversation_column,
    conversation_columns,
    no_conversation,
)
from rlpipe.data.render.ground_truth import REMAINING_TURNS
from rlpipe.data.render.messages import assistant_turns, no_assistant
from rlpipe.data.render.reasoning import REASONING_KEY, with_thinking, without_thinking
from rlpipe.data.row import Row, UnusableRow, require_columns
from rlpipe.errors import DataError
from rlpipe.types import ChatMessages

Columns = dict[str, Any]
Transform = tuple[Callable[[dict[str, Any]], Columns], dict[str, Any]]


def input_output(cfg: Mapping[str, Any]) -> Transform:
    """Of ``{input, output}`` pairs (``input_column``, ``output_column``), each a text or messages."""
    arguments = _arguments(cfg, input_column="input", output_column="output")
    source, target = arguments["input_column"], arguments["output_column"]
    names = _Names.of(cfg, arguments)

    def map_row(row: Row) -> Columns:
        require_columns(row.keys(), [source], "data.transform", "data.transform_args.input_column")
        require_columns(row.keys(), [target], "data.transform", "data.transform_args.output_column")
        return {names.prompt: _text_or_messages(row, source), names.truth: _text_or_messages(row, target)}

    return map_row, {"remove_columns": [source, target]}


def first_turn(cfg: Mapping[str, Any]) -> Transform:
    """Of a conversation, its first assistant turn, and as ``remaining_turns`` what follows, up to the last one."""
    names = _Names.of(cfg, _arguments(cfg))

    def split(messages: ChatMessages, turns: list[int]) -> Columns:
        return names.columns(messages, turns[0]) | {REMAINING_TURNS: messages[turns[0] + 1 : turns[-1] + 1]}

    return _of_conversations(names, split)


def last_turn(cfg: Mapping[str, Any]) -> Transform:
    """Of a conversation, its last assistant turn; the prompt is all that stands before it."""
    names = _Names.of(cfg, _arguments(cfg))
    return _of_conversations(names, lambda messages, turns: names.columns(messages, turns[-1]))


def all_turns(cfg: Mapping[str, Any]) -> Transform:
    """Of a conversation, a row for each assistant turn; the prompt is all that stands before it."""
    names = _Names.of(cfg, _arguments(cfg))

    def map_batch(batch: Row) -> Columns:
        made = []
        for values in zip(*batch.values(), strict=True):
            messages, turns = names.conversation(dict(zip(batch, values, strict=True)))
            made += [names.columns(messages, turn) for turn in turns]
        return {name: [columns[name] for columns in made] for name in (names.prompt, names.truth)}

    return map_batch, {"remove_columns": names.removed, "batched": True}


def reasoning(cfg: Mapping[str, Any]) -> Transform:
    """Of a conversation, its last assistant turn, with its ``<think>...</think>`` span if ``thinking`` is ``keep``.

    With ``keep``, a turn without a complete span is unusable: as ground truth, it would teach not to reason. With
    ``strip``, the answer alone is the ground truth, and the turn may be without a span. Earlier turns lose theirs, as
    in the chat templates of reasoning models. A turn's ``reasoning_content`` counts as its span.
    """
    arguments = _arguments(cfg, thinking="keep")
    if arguments["thinking"] not in ("keep", "strip"):
        raise DataError(f"data.transform_args.thinking: {arguments['thinking']!r} is neither 'keep' nor 'strip'")
    names = _Names.of(cfg, arguments)
    of_last = with_thinking if arguments["thinking"] == "keep" else without_thinking

    def split(messages: ChatMessages, turns: list[int]) -> Columns:
        last, messages = turns[-1], list(messages)
        for turn in turns:
            change = of_last if turn == last else without_thinking
            messages[turn] = change(messages[turn], f"message {turn + 1}")
        if _is_empty(messages[last]):
            raise UnusableRow(f"message {last + 1} has no answer beside its reasoning")
        return names.columns(messages, last)

    return _of_conversations(names, split)


@dataclass(frozen=True, slots=True)
class _Names:
    """The columns that conversations are read from, and that rows are made of."""

    messages: str
    prompt: str
    truth: str

    @classmethod
    def of(cls, cfg: Mapping[str, Any], arguments: Mapping[str, str]) -> _Names:
        return cls(cfg["messages_column"], cfg["prompt_column"], arguments["truth_column"])

    @property
    def removed(self) -> list[str]:
        return list(conversation_columns(self.messages))

    def conversation(self, row: Row) -> tuple[ChatMessages, list[int]]:
        """The messages, and which are the assistant's.

        Raises ``UnusableRow`` if one of these could be no ground truth, ``DataError`` if there is no such column.
        """
        column = conversation_column(row, self.messages)
        if column is None and CONVERSATIONS not in row:
            require_columns(row.keys(), [self.messages], "data.transform", "data.messages_column")
        if column is None:
            raise UnusableRow(no_conversation(row.keys(), self.messages))
        messages = conversation(row, column)
        turns = assistant_turns(messages)
        if not turns:
            raise no_assistant(messages, column)
        for turn in turns:
            if _is_empty(messages[turn]):
                raise UnusableRow(f"message {turn + 1}, a turn of the assistant, is empty")
            if turn + 1 in turns:
                raise UnusableRow(f"messages {turn + 1} and {turn + 2} are both the assistant's; make one of them")
        return messages, turns

    def columns(self, messages: ChatMessages, turn: int) -> Columns:
        """The messages before a turn, and the turn: its text, or the message where it is more, such as a tool call."""
        message = messages[turn]
        is_text = isinstance(message.get("content"), str) and message.keys() == {"role", "content"}
        return {self.prompt: messages[:turn], self.truth: message["content"] if is_text else [message]}


def _arguments(cfg: Mapping[str, Any], **defaults: str) -> dict[str, str]:
    """``data.transform_args`` over the defaults; raises ``DataError`` for one that is unknown."""
    known = {**defaults, "truth_column": "ground_truth"}
    given: Mapping[str, str] = cfg["transform_args"]
    for name in given.keys() - known.keys():
        close = get_close_matches(name, known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"it takes {', '.join(known)}"
        raise DataError(f"data.transform_args: {cfg['transform']} has no argument {name!r}; {hint}")
    return {**known, **given}


def _of_conversations(names: _Names, split: Callable[[ChatMessages, list[int]], Columns]) -> Transform:
    """``split`` takes the messages, and which of them are the assistant's."""

    def map_row(row: Row) -> Columns:
        return split(*names.conversation(row))

    return map_row, {"remove_columns": names.removed}


def _is_empty(message: dict[str, Any]) -> bool:
    return not any(message.get(key) for key in ("content", "tool_calls", REASONING_KEY))


def _text_or_messages(row: Row, column: str) -> Any:
    value = row[column]
    if not isinstance(value, str | list | tuple):
        found = "is null" if value is None else f"holds a {type(value).__name__}, not a text or messages"
        raise UnusableRow(f"column {column!r} {found}")
    if not value:
        raise UnusableRow(f"column {column!r} is empty")
    return value

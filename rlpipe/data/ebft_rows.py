"""Transforms to rows with a prompt and a ground truth, from pairs, conversations, and reasoning.

Each is a ``data.transform``, such as ``rlpipe.data.ebft_rows:first_turn``. The prompt goes to ``data.prompt_column``,
the ground truth to ``ground_truth`` or the column that ``data.transform_args.truth_column`` names. The columns that
they are made from are removed, the others kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlpipe.data.render.formats import (
    CONVERSATIONS,
    conversation,
    conversation_column,
    conversation_columns,
    no_conversation,
)
from rlpipe.data.render.messages import REASONING_KEY, assistant_turns, no_assistant, with_thinking, without_thinking
from rlpipe.data.row import Row, UnusableRow, require_columns
from rlpipe.data.row_renderer import REMAINING_TURNS
from rlpipe.errors import DataError, did_you_mean
from rlpipe.types import ChatMessages

Columns = dict[str, Any]
Transform = tuple[Callable[[dict[str, Any]], Columns], dict[str, Any]]


def input_output(cfg: Mapping[str, Any]) -> Transform:
    """Make rows of ``{input, output}`` pairs (``input_column``, ``output_column``), each a text or messages."""
    arguments = _arguments(cfg, input_column="input", output_column="output")
    source, target = arguments["input_column"], arguments["output_column"]
    names = _Names.of(cfg, arguments)

    def map_row(row: Row) -> Columns:
        require_columns(row.keys(), [source], "data.transform", "data.transform_args.input_column")
        require_columns(row.keys(), [target], "data.transform", "data.transform_args.output_column")
        return {names.prompt: _text_or_messages(row, source), names.truth: _text_or_messages(row, target)}

    return map_row, {"remove_columns": [source, target]}


def first_turn(cfg: Mapping[str, Any]) -> Transform:
    """Make a conversation's first assistant turn the ground truth.

    ``remaining_turns`` holds the messages after it, up to the last assistant turn.
    """
    names = _Names.of(cfg, _arguments(cfg))

    def split(messages: ChatMessages, turns: list[int]) -> Columns:
        return names.columns(messages, turns[0]) | {REMAINING_TURNS: messages[turns[0] + 1 : turns[-1] + 1]}

    return _conversation_transform(names, split)


def last_turn(cfg: Mapping[str, Any]) -> Transform:
    """Make a conversation's last assistant turn the ground truth, and all messages before it the prompt."""
    names = _Names.of(cfg, _arguments(cfg))
    return _conversation_transform(names, lambda messages, turns: names.columns(messages, turns[-1]))


def all_turns(cfg: Mapping[str, Any]) -> Transform:
    """Make a row of each assistant turn of a conversation, with all messages before it as the prompt."""
    names = _Names.of(cfg, _arguments(cfg))

    def map_batch(batch: Row) -> Columns:
        rows = []
        for values in zip(*batch.values(), strict=True):
            messages, turns = names.conversation(dict(zip(batch, values, strict=True)))
            rows += [names.columns(messages, turn) for turn in turns]
        return {name: [columns[name] for columns in rows] for name in (names.prompt, names.truth)}

    return map_batch, {"remove_columns": names.removed, "batched": True}


def reasoning(cfg: Mapping[str, Any]) -> Transform:
    """Make a conversation's last assistant turn the ground truth, with its ``<think>...</think>`` span if kept.

    With ``thinking`` set to ``keep``, a turn without a complete span is unusable, because as ground truth it would
    teach the policy not to reason. With ``strip``, the answer alone is the ground truth, and the turn needs no span.
    Spans of earlier turns are removed, as in the chat templates of reasoning models. A turn's ``reasoning_content``
    counts as its span.
    """
    arguments = _arguments(cfg, thinking="keep")
    if arguments["thinking"] not in ("keep", "strip"):
        raise DataError(f"data.transform_args.thinking: {arguments['thinking']!r} is neither 'keep' nor 'strip'")
    names = _Names.of(cfg, arguments)
    change_last = with_thinking if arguments["thinking"] == "keep" else without_thinking

    def split(messages: ChatMessages, turns: list[int]) -> Columns:
        last, messages = turns[-1], list(messages)
        for turn in turns:
            change = change_last if turn == last else without_thinking
            messages[turn] = change(messages[turn], f"message {turn + 1}")
        if _is_empty(messages[last]):
            raise UnusableRow(f"message {last + 1} has only reasoning, and no answer")
        return names.columns(messages, last)

    return _conversation_transform(names, split)


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the columns that conversations are read from, and that prompts and ground truths are written to."""

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
        """Return the messages, and the indices of the assistant's.

        Raises ``UnusableRow`` if one of these can't be a ground truth, ``DataError`` if there is no column of messages.
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
                raise UnusableRow(f"message {turn + 1}, an assistant turn, is empty")
            if turn + 1 in turns:
                raise UnusableRow(f"messages {turn + 1} and {turn + 2} are both the assistant's; merge them into one")
        return messages, turns

    def columns(self, messages: ChatMessages, turn: int) -> Columns:
        """Return the messages before a turn, and its text, or the message if it holds more, such as a tool call."""
        message = messages[turn]
        is_text = isinstance(message.get("content"), str) and message.keys() == {"role", "content"}
        return {self.prompt: messages[:turn], self.truth: message["content"] if is_text else [message]}


def _arguments(cfg: Mapping[str, Any], **defaults: str) -> dict[str, str]:
    """Return the defaults updated by ``data.transform_args``; raise ``DataError`` for an unknown argument."""
    arguments = {**defaults, "truth_column": "ground_truth"}
    overrides: Mapping[str, str] = cfg["transform_args"]
    for name in overrides.keys() - arguments.keys():
        hint = did_you_mean(name, arguments, f"its arguments are {', '.join(arguments)}")
        raise DataError(f"data.transform_args: {cfg['transform']} has no argument {name!r}{hint}")
    return {**arguments, **overrides}


def _conversation_transform(names: _Names, split: Callable[[ChatMessages, list[int]], Columns]) -> Transform:
    """Return the transform by ``split``, which takes the messages and the indices of the assistant's."""

    def map_row(row: Row) -> Columns:
        return split(*names.conversation(row))

    return map_row, {"remove_columns": names.removed}


def _is_empty(message: dict[str, Any]) -> bool:
    return not any(message.get(key) for key in ("content", "tool_calls", REASONING_KEY))


def _text_or_messages(row: Row, column: str) -> Any:
    value = row[column]
    if not isinstance(value, str | list | tuple):
        problem = "is null" if value is None else f"holds a {type(value).__name__}, not a string or messages"
        raise UnusableRow(f"column {column!r} {problem}")
    if not value:
        raise UnusableRow(f"column {column!r} is empty")
    return value

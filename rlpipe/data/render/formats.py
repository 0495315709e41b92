"""Conversion of rows written for other libraries into a conversation, or a prompt and a completion."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.messages import assistant_turns, chat_messages, column_messages, no_assistant
from rlpipe.data.row import Row, UnusableRow, require_columns
from rlpipe.errors import DataError
from rlpipe.types import ChatMessages

CONVERSATIONS = "conversations"
"""ShareGPT's column, which is read if ``data.messages_column`` is missing or null."""
SYSTEM = "system"
"""The column with the system turn of ShareGPT's and Alpaca's rows."""
INSTRUCTION, INPUT, OUTPUT, HISTORY = "instruction", "input", "output", "history"
"""Alpaca's columns, of which ``instruction`` and ``output`` are required."""
ALPACA_PROMPT = (
    "Below is an instruction that describes a task{with_input}. Write a response that appropriately completes the "
    "request.\n\n### Instruction:\n{instruction}\n\n{input}### Response:\n"
)
"""The prompt that Alpaca's rows are rendered to without a chat template."""


class SupervisedForm:
    """A converter of SFT rows, whose format it detects, into a conversation, or a prompt and a completion.

    The formats are tried in this order: a conversation in ``data.messages_column`` or ``conversations``,
    ``data.prompt_column`` with ``completion_column``, Alpaca's columns. Null columns are skipped, since in a table
    every row has all columns.
    """

    def __init__(self, data: DataConfig, completion_column: str) -> None:
        self._chat, self._messages = data.chat, data.messages_column
        self._pair = (data.prompt_column, completion_column)
        only_assistant = list(data.roles_to_train) == ["assistant"]
        self._needs_assistant = only_assistant and data.loss_mask == "roles" and not data.train_on_inputs

    def check(self, columns: Collection[str], location: str, nulls: Collection[str] = ()) -> None:
        """Raise ``DataError`` if the columns, of which ``nulls`` are null, match none of the formats."""
        conversations = conversation_columns(self._messages)
        if any(name in columns and name not in nulls for name in conversations):
            return
        if set(self._pair) <= set(columns) or {INSTRUCTION, OUTPUT} <= set(columns):
            return
        if any(name in columns for name in conversations):
            raise DataError(f"{location}: {no_conversation(columns, self._messages)}")
        options = "data.prompt_column and data.completion_column, or data.messages_column, or data.transform"
        require_columns(columns, self._pair, location, options)

    def normal(self, row: Row) -> Row:
        """Return the row with ``data.messages_column``, or with prompt and completion.

        The columns that these are made from are removed, the others kept. Raises ``UnusableRow`` for a row that matches
        no format.
        """
        if (name := conversation_column(row, self._messages)) is not None:
            messages = conversation(row, name)
            if self._needs_assistant and not assistant_turns(messages):
                raise no_assistant(messages, name)
            used = (*conversation_columns(self._messages), *([SYSTEM] if name == CONVERSATIONS else []))
            return {**_without(row, *used), self._messages: messages}
        rest = _without(row, *conversation_columns(self._messages))
        pair, alpaca = set(self._pair), {INSTRUCTION, OUTPUT}
        given = {name for name, value in row.items() if value is not None}
        if pair <= given or (pair <= row.keys() and not alpaca <= given):
            return rest
        if alpaca <= row.keys():
            return self._of_alpaca(rest)
        raise UnusableRow(no_conversation(row.keys(), self._messages))

    def _of_alpaca(self, row: Row) -> Row:
        for name in (INSTRUCTION, OUTPUT):
            if not isinstance(row[name], str):
                raise UnusableRow(f"column {name!r} is {row[name]!r:.80}, not a text")
        for name in (INPUT, SYSTEM):
            if not isinstance(row.get(name), str | None):
                raise UnusableRow(f"column {name!r} is {row[name]!r:.80}, not a text")
        if not isinstance(row.get(HISTORY), list | tuple | None):
            raise UnusableRow(f"column {HISTORY!r} is {row[HISTORY]!r:.80}, not a list of pairs of texts")
        rest = _without(row, INSTRUCTION, INPUT, OUTPUT, HISTORY, SYSTEM)
        earlier, system = row.get(HISTORY) or [], row.get(SYSTEM)
        if not self._chat:
            if earlier or system:
                raise UnusableRow(f"columns {HISTORY!r} and {SYSTEM!r} need data.chat=true")
            return {**rest, **dict(zip(self._pair, (_alpaca_text(row), row[OUTPUT]), strict=True))}
        question = "\n".join(part for part in (row[INSTRUCTION], row.get(INPUT)) if part)
        turns = [(SYSTEM, system)] if system else []
        for pair in earlier:
            is_pair = isinstance(pair, list | tuple) and len(pair) == 2
            if not is_pair or not all(isinstance(text, str) for text in pair):
                raise UnusableRow(f"column {HISTORY!r}: a pair of question and answer was expected, found {pair!r:.80}")
            turns += zip(("user", "assistant"), pair, strict=True)
        turns += [("user", question), ("assistant", row[OUTPUT])]
        messages = chat_messages([{"role": role, "content": content} for role, content in turns])
        return {**rest, self._messages: messages}


def conversation_columns(messages_column: str) -> tuple[str, ...]:
    """Return the columns that may hold a conversation; the first one that is not null does."""
    return tuple(dict.fromkeys((messages_column, CONVERSATIONS)))


def conversation_column(row: Row, messages_column: str) -> str | None:
    """Return the column that holds the row's conversation, or None."""
    return next((name for name in conversation_columns(messages_column) if row.get(name) is not None), None)


def conversation(row: Row, column: str) -> ChatMessages:
    """Return the messages in a column, ShareGPT's after a system turn from the row's ``system`` column.

    Raises ``UnusableRow`` if the column does not hold messages.
    """
    messages = column_messages(row[column], column)
    system = row.get(SYSTEM) if column == CONVERSATIONS else None
    if system and messages[0]["role"] != SYSTEM:
        return [*chat_messages([{"role": SYSTEM, "content": system}]), *messages]
    return messages


def no_conversation(columns: Collection[str], messages_column: str) -> str:
    """Return the message that all columns that could hold a conversation are null or missing."""
    names = conversation_columns(messages_column)
    null = [repr(name) for name in names if name in columns]
    absent = [repr(name) for name in names if name not in columns]
    noun, verb = ("column", "is") if len(null) == 1 else ("columns", "are")
    rest = f", and there is no column {' or '.join(absent)}" if absent else ""
    return f"{noun} {' and '.join(null)} {verb} null{rest}; set data.messages_column or data.transform"


def _alpaca_text(row: Row) -> str:
    if not row.get(INPUT):
        return ALPACA_PROMPT.format(with_input="", instruction=row[INSTRUCTION], input="")
    more = ", paired with an input that provides further context"
    return ALPACA_PROMPT.format(with_input=more, instruction=row[INSTRUCTION], input=f"### Input:\n{row[INPUT]}\n\n")


def _without(row: Row, *columns: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in columns}

"""Formats of rows in datasets, and user functions that transform rows."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any, cast, overload

import numpy as np

from rlpipe.common.imports import describe_error, import_object
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.data.render.messages import assistant_turns, chat_messages, column_messages, no_assistant
from rlpipe.data.row import AnyRows, Row, Rows, UnusableRow, find_part, require_columns
from rlpipe.errors import DataError, InputError, RlpipeError
from rlpipe.types import ChatMessages

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
        non_null = {name for name, value in row.items() if value is not None}
        if pair <= non_null or (pair <= row.keys() and not alpaca <= non_null):
            return rest
        if alpaca <= row.keys():
            return self._of_alpaca(rest)
        raise UnusableRow(no_conversation(row.keys(), self._messages))

    def _of_alpaca(self, row: Row) -> Row:
        for name in (INSTRUCTION, OUTPUT):
            if not isinstance(row[name], str):
                raise UnusableRow(f"column {name!r} is {row[name]!r:.80}, not a string")
        for name in (INPUT, SYSTEM):
            if not isinstance(row.get(name), str | None):
                raise UnusableRow(f"column {name!r} is {row[name]!r:.80}, not a string")
        if not isinstance(row.get(HISTORY), list | tuple | None):
            raise UnusableRow(f"column {HISTORY!r} is {row[HISTORY]!r:.80}, not a list of pairs of strings")
        rest = _without(row, INSTRUCTION, INPUT, OUTPUT, HISTORY, SYSTEM)
        earlier, system = row.get(HISTORY) or [], row.get(SYSTEM)
        if not self._chat:
            if earlier or system:
                raise UnusableRow(f"columns {HISTORY!r} and {SYSTEM!r} need data.chat=true")
            return {**rest, **dict(zip(self._pair, (_alpaca_text(row), row[OUTPUT]), strict=True))}
        question = "\n".join(value for value in (row[INSTRUCTION], row.get(INPUT)) if value)
        turns = [(SYSTEM, system)] if system else []
        for pair in earlier:
            is_pair = isinstance(pair, list | tuple) and len(pair) == 2
            if not is_pair or not all(isinstance(text, str) for text in pair):
                raise UnusableRow(f"column {HISTORY!r}: expected a pair of question and answer, found {pair!r:.80}")
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
    return with_system(messages, row.get(SYSTEM)) if column == CONVERSATIONS else messages


def with_system(messages: ChatMessages, system: Any) -> ChatMessages:
    """Return messages after a system turn with the text ``system``, unless it is empty or they begin with one."""
    if not system or messages[0]["role"] == SYSTEM:
        return messages
    return [*chat_messages([{"role": SYSTEM, "content": system}]), *messages]


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


logger = logging.getLogger(__name__)

MapFunction = Callable[[dict[str, Any]], Any]

ALL_COLUMNS = "__all__"
OPTIONS = {"remove_columns", "batched"}


class TransformConfig(dict[str, Any]):
    """The ``cfg`` of a transform: the data config and ``transform_args``, by key or attribute, None if unset."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.get(name)

    def __missing__(self, key: str) -> None:
        return None


class TransformedRows:
    """Rows after a transform: a row's columns, less the removed ones, plus those that ``map_row`` returns.

    ``remove`` names columns, or is ``"__all__"`` for all columns of the original row. A row on which ``map_row`` raises
    is unusable.
    """

    def __init__(self, rows: AnyRows, map_row: MapFunction, remove: Collection[str] | str) -> None:
        self.name = rows.name
        self._rows = rows
        self._map_row = map_row
        self._remove = remove

    def __len__(self) -> int:
        assert isinstance(self._rows, Sized), "a stream has no length"
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        return {**_remaining_columns(row, self._remove), **_call(self._map_row, row, self.location(index))}

    def location(self, index: int) -> str:
        return self._rows.location(index)


class ExpandedRows:
    """Rows after a batched transform, which makes any number of rows from each; untouched columns are repeated.

    ``map_batch`` is called with one row at a time, as a dict of lists of length 1. All rows are read once at the start,
    to count the rows made from each; the number must be the same every time. A row on which ``map_batch`` raises stays
    one unusable row. Raises ``DataError`` if no row is left.
    """

    def __init__(self, rows: Rows, map_batch: MapFunction, remove: Collection[str] | str) -> None:
        self.name = rows.name
        self._rows = rows
        self._map_batch = map_batch
        self._remove = remove
        self._counts = np.array([self._count_at_start(source) for source in range(len(rows))], np.int64)
        self._ends = np.cumsum(self._counts)
        if not len(self):
            raise DataError(f"{self.name}: data.transform created no rows from its {len(rows)} rows")
        if without := int(np.sum(self._counts == 0)):
            logger.warning("%s: data.transform created no rows from %d of its %d rows", self.name, without, len(rows))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Row:
        source, offset = find_part(self._ends, index)
        row, location = self._rows[source], self._rows.location(source)
        columns = self._expand(row, location)
        count = _common_length(columns)
        if count != self._counts[source]:
            raise DataError(
                f"{location}: data.transform created {count} rows from it, but {self._counts[source]} when the data "
                "was opened; it must create the same number each time"
            )
        return {**_remaining_columns(row, self._remove), **{name: values[offset] for name, values in columns.items()}}

    def location(self, index: int) -> str:
        source, offset = find_part(self._ends, index)
        location = self._rows.location(source)
        count = self._counts[source]
        return location if count == 1 else f"{location}, part {offset + 1} of {count}"

    def _count_at_start(self, source: int) -> int:
        try:
            return _common_length(self._expand(self._rows[source], self._rows.location(source)))
        except UnusableRow:
            return 1

    def _expand(self, row: Row, location: str) -> Mapping[str, Sequence[Any]]:
        """Return the columns of all rows made from a row; raise ``DataError`` if they are not lists of one length."""
        columns = _call(self._map_batch, {name: [value] for name, value in row.items()}, location)
        for name, values in columns.items():
            if not isinstance(values, list | tuple | np.ndarray):
                kind = type(values).__name__
                raise DataError(f"{location}: data.transform is batched, but {name!r} is a {kind} instead of a list")
        if len({len(values) for values in columns.values()}) > 1:
            lengths = ", ".join(f"{name} {len(values)}" for name, values in columns.items())
            raise DataError(f"{location}: data.transform returned columns of different lengths: {lengths}")
        return columns


def _common_length(columns: Mapping[str, Sequence[Any]]) -> int:
    return max((len(values) for values in columns.values()), default=0)


def _remaining_columns(row: Row, remove: Collection[str] | str) -> dict[str, Any]:
    removed = row.keys() if remove == ALL_COLUMNS else remove
    return {name: value for name, value in row.items() if name not in removed}


def _call(function: MapFunction, row: Row, location: str) -> Mapping[str, Any]:
    """Call a map function; raise ``UnusableRow`` if it raises any ``Exception`` other than rlpipe's own.

    It gets a copy: streams keep their rows, and it may change lists in them.
    """
    try:
        new = function(deepcopy(dict(row)))
    except InputError as error:
        raise DataError(f"{location}: {error}") from None
    except (RlpipeError, UnusableRow):
        raise
    except Exception as error:
        raise UnusableRow(f"data.transform raised {describe_error(error)}") from error
    if not isinstance(new, Mapping):
        raise DataError(f"{location}: data.transform returned {type(new).__name__} instead of a dict")
    return new


@overload
def apply_transform(rows: Rows, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> Rows: ...


@overload
def apply_transform(rows: AnyRows, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> AnyRows: ...


def apply_transform(rows: AnyRows, data: DataConfig, tokenizer: PreTrainedTokenizerBase) -> AnyRows:
    """Return ``rows`` after ``data.transform``, or unchanged without one.

    The transform is called as ``transform(cfg)`` and returns ``map_fn`` or ``(map_fn, {"remove_columns": [...]})``;
    ``map_fn(row)`` returns the new row's columns and is given the ``tokenizer`` if it has a parameter of that name.
    With ``"batched": True`` beside ``remove_columns``, it takes and returns lists of values (see ``ExpandedRows``).
    Raises ``DataError`` if the transform can't be imported or returns anything else.
    """
    if data.transform is None:
        return rows
    transform = import_object(data.transform, what="data.transform", error=DataError)
    settings = {field.name: getattr(data, field.name) for field in dataclasses.fields(data)}
    try:
        result = transform(TransformConfig(settings | data.transform_args))
    except RlpipeError:
        raise
    except Exception as error:
        raise DataError(f"data.transform {data.transform!r} raised {describe_error(error)}") from error
    map_row, options = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not callable(map_row) or not isinstance(options, Mapping):
        raise DataError(f"data.transform {data.transform!r} must return (map_fn, {{'remove_columns': [...]}})")
    unknown = options.keys() - OPTIONS
    if unknown:
        allowed = " and ".join(sorted(OPTIONS, reverse=True))
        raise DataError(f"data.transform {data.transform!r}: the options are {allowed}, not {', '.join(unknown)}")
    if "tokenizer" in inspect.signature(map_row).parameters:
        map_row = partial(map_row, tokenizer=tokenizer)
    remove = _removed_columns(options.get("remove_columns"))
    if not options.get("batched"):
        return TransformedRows(rows, map_row, remove)
    if not isinstance(rows, Sized):
        raise DataError(
            f"data.transform {data.transform!r} is batched, so its rows are counted at the start, which a stream does "
            "not allow: set data.streaming=false, or create the rows beforehand"
        )
    return ExpandedRows(cast(Rows, rows), map_row, remove)


def _removed_columns(value: Any) -> Collection[str] | str:
    if isinstance(value, str) and value != ALL_COLUMNS:
        return [value]
    return value or ()

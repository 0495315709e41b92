"""Chat messages: validation, tools, and the assistant's reasoning."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpipe.configs.schema.data_config import SET_BY_OPTIONS, SET_FOR_EACH_ROW
from rlpipe.data.row import Row, UnusableRow
from rlpipe.errors import ConfigError, did_you_mean
from rlpipe.types import ChatMessages

SHAREGPT_ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
}
"""Role for each value of ShareGPT's key ``from``."""
TEMPLATE_OPTIONS = "chat_template_kwargs"
"""The column with a row's own arguments of the chat template."""
CALLS = ("tool_calls", "function_call")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
INSTEAD = (*CALLS, *REASONING_KEYS)
"""Keys that a message may have in place of content."""


def chat_messages(value: Any) -> ChatMessages:
    """Return ``value`` as messages with ``role`` and ``content``; raise ``UnusableRow`` if it holds anything else.

    Content made only of text parts becomes a string, which every chat template can render.
    """
    if not isinstance(value, list | tuple):
        hint = "; a transform can read the JSON in it" if isinstance(value, str) else ""
        raise UnusableRow(f"expected a list of chat messages, found {type(value).__name__}{hint}")
    return [_message(message, f"message {number}") for number, message in enumerate(value, start=1)]


def column_messages(value: Any, column: str, role: str | None = None) -> ChatMessages:
    """Return the messages of a column's value, at least one; with a ``role``, a text becomes a turn of that role.

    Raises ``UnusableRow``, with the column's name, if the value holds no messages.
    """
    if role is not None and isinstance(value, str):
        return [{"role": role, "content": value}]
    if role is not None and not isinstance(value, list | tuple):
        raise UnusableRow(f"column {column!r} holds a {type(value).__name__}, not a string or messages")
    try:
        messages = chat_messages(value)
    except UnusableRow as problem:
        raise UnusableRow(f"column {column!r}: {problem.reason}") from None
    if not messages:
        raise UnusableRow(f"column {column!r} is an empty list")
    return messages


def content_text(content: Any) -> str:
    """Return a message's content as a text for people, with ``<image>`` for each image."""
    if not isinstance(content, list):
        return "" if content is None else str(content)
    return "".join(part["text"] if part["type"] == "text" else f"<{part['type']}>" for part in content)


def without_nulls(value: Any) -> Any:
    """Drop keys whose value is None, since tables give every dict the keys of all others, filled with None."""
    if isinstance(value, dict):
        return {key: without_nulls(child) for key, child in value.items() if child is not None}
    return [without_nulls(child) for child in value] if isinstance(value, list | tuple) else value


def assistant_turns(messages: ChatMessages) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def no_assistant(messages: ChatMessages, column: str) -> UnusableRow:
    """Return the exception for a conversation without an assistant turn."""
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages)) or "none"
    return UnusableRow(f"column {column!r} has no assistant turn; its roles are {roles}")


def _message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UnusableRow(f"{name}: a chat message must be a dict with role and content, found {message!r:.80}")
    fields = {
        key: without_nulls(value) if key in CALLS else value for key, value in message.items() if value is not None
    }
    if "role" not in fields and "from" in fields:
        fields = _of_sharegpt(fields, name)
    if not isinstance(fields.get("role"), str):
        problem = f"the role is {fields['role']!r:.80}" if "role" in fields else f"no key 'role' in {message!r:.80}"
        raise UnusableRow(f"{name}: a chat message must be a dict with role and content; {problem}")
    content = fields.get("content")
    if content is None and not any(fields.get(key) for key in INSTEAD):
        raise UnusableRow(f"{name}: its key 'content' is {'null' if 'content' in message else 'missing'}")
    return {**fields, "content": _content(content, name)}


def _of_sharegpt(message: dict[str, Any], name: str) -> dict[str, Any]:
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        hint = did_you_mean(str(speaker), SHAREGPT_ROLES, f"the roles are {', '.join(SHAREGPT_ROLES)}")
        raise UnusableRow(f"{name}: its key 'from' is {speaker!r:.80}, which is not a role{hint}")
    if "value" not in message:
        raise UnusableRow(f"{name}: its key 'value' is missing or null")
    extra = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": SHAREGPT_ROLES[speaker], "content": message["value"], **extra}


def _content(content: Any, name: str) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise UnusableRow(f"{name}: its content is a {type(content).__name__}, neither a string nor a list of parts")
    parts = [_part(part, f"{name}, part {number}") for number, part in enumerate(content, start=1)]
    is_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def _part(part: Any, name: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise UnusableRow(f"{name}: a content part must be a string or a dict with the key 'type', found {part!r:.80}")
    fields = {key: value for key, value in part.items() if value is not None}
    if fields["type"] == "text" and not isinstance(fields.get("text"), str):
        raise UnusableRow(f"{name}: its key 'text' is {fields.get('text')!r:.80}, not a string")
    return fields


def row_tools(row: Row, column: str | None) -> list[Any] | None:
    """Return the schemas in a column, a list or its JSON; None if the row does not set its tools.

    An empty list, or an empty text, means a row without tools. Raises ``UnusableRow`` for anything else.
    """
    value = None if column is None else row.get(column)
    try:
        return _read(value)
    except UnusableRow as problem:
        hint = "set data.tools_column=null if it holds something else"
        raise UnusableRow(f"column {column!r}{problem.reason}; {hint}") from None


def row_template_options(row: Row) -> dict[str, Any]:
    """Return a row's own arguments of the chat template, as TRL reads them, or their JSON, without nulls.

    Raises ``UnusableRow`` for a value that is no dictionary, and for arguments that are set for each row anyway.
    """
    value, name = row.get(TEMPLATE_OPTIONS), f"column {TEMPLATE_OPTIONS!r}"
    try:
        value = (_parse(value) or {}) if isinstance(value, str) else value
    except UnusableRow as problem:
        raise UnusableRow(f"{name}{problem.reason}") from None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UnusableRow(f"{name}: expected a dictionary of arguments of the chat template, found {value!r:.80}")
    if reserved := sorted(value.keys() & {*SET_BY_OPTIONS, *SET_FOR_EACH_ROW}):
        raise UnusableRow(f"{name}: {reserved[0]!r} is set for each row already; leave it out")
    return {key: option for key, option in value.items() if option is not None}


def check_tools(tools: Sequence[Any]) -> list[Any]:
    """Return the schemas of ``data.tools``; raise ``ConfigError`` if one of them is none."""
    try:
        return [_schema(tool, f"[{index}]") for index, tool in enumerate(tools)]
    except UnusableRow as problem:
        raise ConfigError(f"data.tools{problem.reason}") from None


def _read(value: Any) -> list[Any] | None:
    if isinstance(value, str):
        value = _parse(value)
    elif value is not None:
        value = without_nulls(value)
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        raise UnusableRow(f": expected a list of tools, or its JSON, found {type(value).__name__}")
    return [_schema(tool, f", tool {number}") for number, tool in enumerate(value, start=1)]


def _parse(text: str) -> Any:
    try:
        return json.loads(text) if text.strip() else []
    except (ValueError, RecursionError) as error:
        raise UnusableRow(f": not JSON ({error}): {text!r:.80}") from None


def _schema(tool: Any, name: str) -> dict[str, Any]:
    """Return a tool's schema, with JSON of dictionaries in it parsed, as tables that hold only texts have it."""
    tool = _parsed(tool)
    if not isinstance(tool, dict):
        raise UnusableRow(f"{name}: expected a JSON schema with a name, found {tool!r:.80}")
    if "function" in tool:
        tool = {**tool, "function": _parsed(tool["function"])}
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        raise UnusableRow(f"{name}: its key 'function' is {function!r:.80}, not a schema")
    if not isinstance(function.get("name"), str):
        raise UnusableRow(f"{name}: its key 'name' is {function.get('name')!r:.80}, not a string")
    if "parameters" not in function:
        return tool
    function = {**function, "parameters": _parsed(function["parameters"])}
    if isinstance(function["parameters"], str):
        raise UnusableRow(f"{name}: its key 'parameters' is {function['parameters']!r:.80}, not a schema")
    return {**tool, "function": function} if "function" in tool else function


def with_parsed_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its calls' arguments as dictionaries where they are the JSON of one."""
    return with_arguments(message, _parsed)


def with_arguments_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message with its calls' arguments as JSON."""
    return with_arguments(
        message, lambda value: json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else value
    )


def _parsed(value: Any) -> Any:
    """Parse a text that is the JSON of a dictionary; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        return value
    return parsed if isinstance(parsed, dict) else value


def with_arguments(message: dict[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the message with the arguments of each of its calls converted."""
    changed = {key: _call_with(message[key], convert) for key in CALLS if message.get(key)}
    return {**message, **changed} if changed else message


def _call_with(call: Any, convert: Callable[[Any], Any]) -> Any:
    if isinstance(call, list | tuple):
        return [_call_with(entry, convert) for entry in call]
    if not isinstance(call, dict):
        return call
    if "function" in call:
        return {**call, "function": _call_with(call["function"], convert)}
    return {**call, "arguments": convert(call["arguments"])} if "arguments" in call else call


THINK, END_THINK = "<think>", "</think>"
SPAN = re.compile(f"{THINK}.*?{END_THINK}", re.DOTALL)
REASONING_KEY = "reasoning_content"
"""The key of a message that holds its reasoning beside the content, without tags."""


def with_thinking(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the turn with its reasoning as a span of the content; raise ``UnusableRow`` without a complete span."""
    content, reasoning = _text_of(message, name), message.get(REASONING_KEY)
    if reasoning and not SPAN.search(content):
        content = f"{THINK}\n{reasoning.strip()}\n{END_THINK}\n\n{content}"
    if not SPAN.search(content):
        raise UnusableRow(f"{name} has no complete {THINK}...{END_THINK} span")
    return _with_content(message, content)


def without_thinking(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the turn without its reasoning; raise ``UnusableRow`` if a span is not closed.

    Text before a ``</think>`` whose span the chat template opens counts as reasoning, too.
    """
    content = _text_of(message, name)
    rest = SPAN.sub("", content)
    if THINK in rest:
        raise UnusableRow(f"{name} has a {THINK} without {END_THINK}")
    return _with_content(message, rest.rpartition(END_THINK)[2].strip() if END_THINK in content else content)


def _with_content(message: dict[str, Any], content: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != REASONING_KEY} | {"content": content}


def _text_of(message: dict[str, Any], name: str) -> str:
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise UnusableRow(f"the content of {name} is a {type(content).__name__}, not a string")
    return content or ""

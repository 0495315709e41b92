"""The chat messages of a column, with keys role and content or, as in ShareGPT, from and value."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from rlpipe.data.row import UnusableRow
from rlpipe.types import ChatMessages

SHAREGPT_ROLES = {
    **dict.fromkeys(("system",), "system"),
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "function_call"), "assistant"),
    **dict.fromkeys(("tool", "observation", "function", "function_response"), "tool"),
}
"""Role for each value of ShareGPT's key ``from``."""
CALLS = ("tool_calls", "function_call")
INSTEAD = (*CALLS, "reasoning_content", "reasoning", "thinking")
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
        raise UnusableRow(f"column {column!r} holds a {type(value).__name__}, not a text or messages")
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
    return UnusableRow(f"column {column!r} has no turn of the role assistant; its roles are {roles}")


def _message(message: Any, name: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise UnusableRow(f"{name}: a chat message must be a dict with role and content, found {message!r:.80}")
    known = {
        key: without_nulls(value) if key in CALLS else value for key, value in message.items() if value is not None
    }
    if "role" not in known and "from" in known:
        known = _of_sharegpt(known, name)
    if not isinstance(known.get("role"), str):
        found = f"the role is {known['role']!r:.80}" if "role" in known else f"no key 'role' in {message!r:.80}"
        raise UnusableRow(f"{name}: a chat message must be a dict with role and content, and {found}")
    content = known.get("content")
    if content is None and not any(known.get(key) for key in INSTEAD):
        raise UnusableRow(f"{name}: its key 'content' is {'null' if 'content' in message else 'missing'}")
    return {**known, "content": _content(content, name)}


def _of_sharegpt(message: dict[str, Any], name: str) -> dict[str, Any]:
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT_ROLES:
        close = get_close_matches(str(speaker), SHAREGPT_ROLES, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(SHAREGPT_ROLES)}"
        raise UnusableRow(f"{name}: its key 'from' is {speaker!r:.80}, which is no role; {hint}")
    if "value" not in message:
        raise UnusableRow(f"{name}: its key 'value' is missing or null")
    others = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": SHAREGPT_ROLES[speaker], "content": message["value"], **others}


def _content(content: Any, name: str) -> Any:
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        raise UnusableRow(f"{name}: its content is a {type(content).__name__}, neither a text nor a list of parts")
    parts = [_part(part, f"{name}, part {number}") for number, part in enumerate(content, start=1)]
    is_text = all(part["type"] == "text" for part in parts)
    return "".join(part["text"] for part in parts) if is_text else parts


def _part(part: Any, name: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise UnusableRow(
            f"{name}: a part of a content must be a text or a dict with the key 'type', found {part!r:.80}"
        )
    known = {key: value for key, value in part.items() if value is not None}
    if known["type"] == "text" and not isinstance(known.get("text"), str):
        raise UnusableRow(f"{name}: its key 'text' is {known.get('text')!r:.80}, not a text")
    return known

"""Reads the chat messages that a column holds."""

from __future__ import annotations

from typing import Any

from rlpipe.data.rows import UnusableRow
from rlpipe.types import ChatMessages

SHAREGPT_KEYS = {"from", "value"}


def chat_messages(value: Any) -> ChatMessages:
    """``value`` as messages; raises ``UnusableRow`` if it is none."""
    if not isinstance(value, list | tuple):
        raise UnusableRow(f"expected a text or chat messages, found {type(value).__name__}")
    for message in value:
        if not isinstance(message, dict) or message.get("role") is None:
            raise UnusableRow(_problem(message))
    # Tables give every message the keys of all others, filled up with None.
    return [{key: value for key, value in m.items() if value is not None or key == "content"} for m in value]


def assistant_turns(messages: ChatMessages) -> list[int]:
    """Which messages are the assistant's."""
    return [index for index, message in enumerate(messages) if message["role"] == "assistant"]


def _problem(message: Any) -> str:
    if isinstance(message, dict) and message.keys() >= SHAREGPT_KEYS:
        return (
            "its messages have the keys 'from' and 'value', as in ShareGPT; rename them to 'role' and 'content', "
            "and the roles 'human' and 'gpt' to 'user' and 'assistant'"
        )
    return f"a chat message must be a dict with role and content, found {message!r:.80}"

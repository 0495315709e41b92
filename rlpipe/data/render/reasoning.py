"""The reasoning in turns of the assistant: ``<think>...</think>`` spans, or ``reasoning_content``."""

from __future__ import annotations

import re
from typing import Any

from rlpipe.data.row import UnusableRow

OPEN, CLOSE = "<think>", "</think>"
SPAN = re.compile(f"{OPEN}.*?{CLOSE}", re.DOTALL)
REASONING_KEY = "reasoning_content"
"""The key of a message that holds its reasoning beside the content, without tags."""


def with_thinking(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the turn with its reasoning as a span of the content; raise ``UnusableRow`` without a complete span."""
    content, reasoning = _content(message, name), message.get(REASONING_KEY)
    if reasoning and not SPAN.search(content):
        content = f"{OPEN}\n{reasoning.strip()}\n{CLOSE}\n\n{content}"
    if not SPAN.search(content):
        raise UnusableRow(f"{name} has no complete {OPEN}...{CLOSE} span")
    return _with_content(message, content)


def without_thinking(message: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the turn without its reasoning; raise ``UnusableRow`` if a span is not closed.

    Text before a ``</think>`` whose span the chat template opens counts as reasoning, too.
    """
    content = _content(message, name)
    rest = SPAN.sub("", content)
    if OPEN in rest:
        raise UnusableRow(f"{name} has a {OPEN} without {CLOSE}")
    return _with_content(message, rest.rpartition(CLOSE)[2].strip() if CLOSE in content else content)


def _with_content(message: dict[str, Any], content: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key != REASONING_KEY} | {"content": content}


def _content(message: dict[str, Any], name: str) -> str:
    content = message.get("content")
    if content is not None and not isinstance(content, str):
        raise UnusableRow(f"the content of {name} is a {type(content).__name__}, not a text")
    return content or ""

"""Parsers of the policy's turns: text, reasoning and tool calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlpipe.episodes.tools import ToolCall

ID_CHARS = 9
"""Characters of a call's id; Mistral's templates take no other number."""
THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


@dataclass(kw_only=True, slots=True)
class ParsedTurn:
    """A turn of the policy, read from its text."""

    content: str
    reasoning: str | None = None
    calls: list[ToolCall] = field(default_factory=list)

    def as_message(self) -> dict[str, Any]:
        """Return the turn as a chat message."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.as_message_part() for call in self.calls]
        return message


Parser = Callable[[str, str], ParsedTurn]
"""Function that reads a turn's text; call ids begin with the given prefix, so that they differ between turns."""


def parse_hermes(text: str, prefix: str) -> ParsedTurn:
    """Read calls as JSON within ``<tool_call>`` (Hermes, Qwen)."""
    rest, reasoning = split_reasoning(text)
    content, *marked = rest.split(CALL)
    calls = []
    for number, part in enumerate(marked):
        call, _, behind = part.partition(END_CALL)
        calls.append(_read_call(call.strip(), prefix, number))
        content += behind
    return ParsedTurn(content=content.strip() if calls else content, reasoning=reasoning, calls=calls)


def parse_json(text: str, prefix: str) -> ParsedTurn:
    """Read a turn that is one JSON object, or a list of them, as calls (Llama 3); any other turn is a text."""
    rest, reasoning = split_reasoning(text)
    try:
        found = json.loads(rest)
    except (ValueError, RecursionError):
        return ParsedTurn(content=rest, reasoning=reasoning)
    entries = found if isinstance(found, list) else [found]
    if not entries or not all(isinstance(entry, dict) and isinstance(entry.get("name"), str) for entry in entries):
        return ParsedTurn(content=rest, reasoning=reasoning)
    calls = [make_call(entry, prefix, number) for number, entry in enumerate(entries)]
    return ParsedTurn(content="", reasoning=reasoning, calls=calls)


PARSERS: Mapping[str, Parser] = {"hermes": parse_hermes, "json": parse_json}


def with_tools(parser: Parser, tools: Sequence[Any]) -> Parser:
    """Return a parser that knows the schemas of the tools, if it can use them."""
    bind: Callable[[Sequence[Any]], Parser] | None = getattr(parser, "with_tools", None)
    return parser if bind is None else bind(tools)


def parse_text(text: str, prefix: str) -> ParsedTurn:
    """Read a turn without calls."""
    rest, reasoning = split_reasoning(text)
    return ParsedTurn(content=rest, reasoning=reasoning)


def split_reasoning(text: str) -> tuple[str, str | None]:
    """Return a turn's text without its thoughts, and these; a turn may begin within them, as prompts may end so."""
    thoughts, end, rest = text.partition(END_THINK)
    return (rest.lstrip(), thoughts.strip().removeprefix(THINK).strip()) if end else (text, None)


def _read_call(text: str, prefix: str, number: int) -> ToolCall:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(id=_id(prefix, number), name="", problem=f"the call is not JSON ({error})")
    return make_call(entry, prefix, number)


def make_call(entry: Any, prefix: str, number: int) -> ToolCall:
    """Return the call of an object with a name and arguments, in one of the forms that models write."""
    own = _id(prefix, number)
    if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
        return ToolCall(id=own, name="", problem='a call is an object with "name" and "arguments"')
    arguments = entry.get("arguments", entry.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI's form
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(id=own, name=entry["name"], problem=f"its arguments are not JSON ({error})")
    if not isinstance(arguments, dict):
        return ToolCall(id=own, name=entry["name"], problem="its arguments are not an object")
    return ToolCall(id=own, name=entry["name"], arguments=arguments)


def _id(prefix: str, number: int) -> str:
    return f"{prefix}{number}".rjust(ID_CHARS, "0")[-ID_CHARS:]

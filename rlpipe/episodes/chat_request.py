"""Requests for chat completions, as OpenAI's clients send them, and what of them a turn of the policy can't have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

from rlpipe.data.render.messages import row_template_options
from rlpipe.data.row import UnusableRow
from rlpipe.episodes.tools import whole_characters
from rlpipe.types import ChatMessages

PLAIN_FORMATS: tuple[Any, ...] = (None, {"type": "text"})
REFUSED: Mapping[str, Any] = {
    "n": (None, 1),
    "logprobs": (None, False),
    "best_of": (None, 1),
    "response_format": PLAIN_FORMATS,
    "tool_choice": (None, "auto", "none", "required"),
    "functions": (None, []),
    "function_call": (None, "none"),
    "continue_final_message": (None, False),
    "add_generation_prompt": (None, True),
    # Forms in which vLLM and SGLang take what restricts the tokens.
    **dict.fromkeys(
        ("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), (None, {}, "", [])
    ),
    **dict.fromkeys(("regex", "ebnf", "json_schema"), (None, "")),
}
"""Options of a request that a turn can't have, with the values that it can have.

Forced tokens would not be the policy's; ``required`` is taken as ``auto``, because smolagents always sends it.
"""


class RequestRefused(Exception):
    """Raised for a request that can't be answered, with the HTTP status and a code that a program can test."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(kw_only=True, slots=True, frozen=True)
class ChatQuestion:
    """A request for one answer to a conversation."""

    messages: ChatMessages
    tools: Sequence[Any] = ()
    max_tokens: int | None = None
    stop: Sequence[str] = ()
    template_options: Mapping[str, Any] = field(default_factory=dict)
    """The request's own arguments of the chat template, as vLLM takes them."""
    id_prefix: str
    """Beginning of the answer's id."""

    @classmethod
    def parse(cls, body: Mapping[str, Any], *, id_prefix: str = "chatcmpl-") -> ChatQuestion:
        """Read the body of a request to ``/chat/completions``; raise ``RequestRefused`` if it is not one."""
        for name, values in REFUSED.items():
            require_one_of(values, name, body.get(name))
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
            raise RequestRefused(400, "invalid", "messages must be a list of at least one message")
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        if limit is not None and (not isinstance(limit, int) or limit < 1):
            raise RequestRefused(400, "invalid", f"max_tokens={limit!r:.50} is not a number of tokens")
        stop = body.get("stop") or ()
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
            raise RequestRefused(400, "invalid", "stop must be a string or a list of strings")
        if not isinstance(body.get("stream_options"), dict | None):
            raise RequestRefused(400, "invalid", "stream_options must be an object")
        tools = _functions(body.get("tools") or ())
        tools = () if body.get("tool_choice") == "none" else tools
        try:
            messages, tools = whole_characters(messages), whole_characters(tools)
        except RecursionError:
            raise RequestRefused(400, "invalid", "messages or tools are nested too deeply") from None
        try:
            options = row_template_options(body)
        except UnusableRow as problem:
            raise RequestRefused(400, "invalid", problem.reason.removeprefix("column ")) from None
        return cls(
            messages=_normalize(messages),
            tools=tools,
            max_tokens=limit,
            stop=list(stop),
            template_options=options,
            id_prefix=id_prefix,
        )

    @property
    def digest(self) -> str:
        """A digest by which a repeated request is recognized."""
        fields = (self.messages, self.tools, self.max_tokens, self.stop, self.template_options, self.id_prefix)
        return sha256(json.dumps(fields, sort_keys=True, default=repr).encode()).hexdigest()


def _functions(tools: Any) -> Sequence[Any]:
    """Return a request's tools; raise ``RequestRefused`` unless all are functions with names."""
    if not isinstance(tools, Sequence) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestRefused(400, "invalid", "tools must be a list of objects")
    for tool in tools:
        function = tool.get("function")
        if tool.get("type") != "function":
            message = f"the tool {tool.get('type')!r:.50} is none of the program's functions"
            raise RequestRefused(400, "unsupported", message)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RequestRefused(400, "invalid", "a tool must have an object 'function' with a 'name'")
    return tools


def require_one_of(values: Sequence[Any], name: str, value: Any) -> None:
    """Raise ``RequestRefused`` unless an option of a request has a supported value."""
    if value not in values:
        raise RequestRefused(400, "unsupported", f"{name}={value!r:.50} is not supported in training")


def _normalize(messages: ChatMessages) -> ChatMessages:
    """Return messages as chat templates and reward functions take them.

    They have known roles, content that is a string, and results with the names of their functions.
    """
    names: dict[str, str] = {}
    read: ChatMessages = []
    for message in messages:
        role = message.get("role")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise RequestRefused(400, "invalid", f"a message has the role {role!r:.50}")
        # Clients send whole messages of their own types, with nulls, which templates take for values.
        converted = {name: value for name, value in message.items() if value is not None}
        converted["role"] = "system" if role == "developer" else role
        if "content" in converted:
            converted["content"] = joined_text(converted["content"])
        if not converted.get("tool_calls", True):
            del converted["tool_calls"]
        try:
            for call in message.get("tool_calls") or ():
                names[str(call.get("id"))] = call["function"]["name"]
            if converted.get("tool_calls"):
                converted["tool_calls"] = [
                    {**call, "function": {**call["function"], "arguments": call["function"].get("arguments") or "{}"}}
                    for call in converted["tool_calls"]
                ]
        except (TypeError, KeyError, AttributeError):
            raise RequestRefused(400, "invalid", "tool_calls must be a list of calls of named functions") from None
        if role == "tool" and not converted.get("name"):
            converted["name"] = names.get(str(converted.get("tool_call_id")), "")
        read.append(converted)
    return read


def joined_text(content: Any) -> str:
    """Return content that is a string or text parts as one string; raise ``RequestRefused`` for any other."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text", part.get("refusal")) if isinstance(part, dict) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise RequestRefused(400, "unsupported", "content must be a string or text parts")
    return "".join(map(str, texts))

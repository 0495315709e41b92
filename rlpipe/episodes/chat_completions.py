"""Forms of OpenAI's chat completions: answers as the body of a response, and as the events of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from rlpipe.episodes.agent_session import ChatAnswer

MODEL = "policy"
FINISH_REASONS = {"length": "length"}


def as_message(answer: ChatAnswer) -> dict[str, Any]:
    """Return an answer as OpenAI's clients read it: the arguments of calls are texts."""
    parsed = answer.parsed
    message: dict[str, Any] = {"role": "assistant", "content": parsed.content or (None if parsed.calls else "")}
    if parsed.reasoning is not None:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
            }
            for call in parsed.calls
        ]
    return message


def _finish_reason(answer: ChatAnswer) -> str:
    return FINISH_REASONS.get(answer.finish_reason, "tool_calls" if answer.parsed.calls else "stop")


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
    }


def as_completion(answer: ChatAnswer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as the body of a response to a request."""
    choice = {"index": 0, "message": as_message(answer), "finish_reason": _finish_reason(answer), "logprobs": None}
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def completion_events(answer: ChatAnswer, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer as the events of a stream: all of it, then the reason of its end."""
    head = _head(answer, "chat.completion.chunk")
    delta = as_message(answer)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(answer)}]},
    ]
    if (body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**head, "choices": [], "usage": _usage(answer)})
    for chunk in chunks:
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def _head(answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": int(time.time()), "model": MODEL}

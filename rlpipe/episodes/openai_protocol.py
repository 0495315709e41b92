"""Forms of OpenAI's chat completions and Responses API: requests, bodies of responses, and events of streams.

A request of the Responses API becomes one of chat completions; it may hold the whole conversation, or go on from an
earlier answer of the same episode.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlpipe.data.render.messages import TEMPLATE_OPTIONS
from rlpipe.episodes.agent_session import ChatAnswer
from rlpipe.episodes.chat_request import PLAIN_FORMATS, RequestRefused, joined_text, require_one_of
from rlpipe.types import ChatMessages

MODEL = "policy"
RESPONSE_PREFIX = "resp_"
REFUSED = ("background", "conversation", "prompt", "top_logprobs")
"""Options that need a server which keeps them, or log-probs; a request may have them without a value."""

Item = Mapping[str, Any]


def as_message(answer: ChatAnswer) -> dict[str, Any]:
    """Return an answer as OpenAI's clients read it: the arguments of calls are texts."""
    message = answer.parsed.as_message()
    message["content"] = answer.parsed.content or (None if answer.parsed.calls else "")
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return message


def _finish_reason(answer: ChatAnswer) -> str:
    if answer.finish_reason == "length":
        return "length"
    return "tool_calls" if answer.parsed.calls else "stop"


def _usage(answer: ChatAnswer) -> dict[str, int]:
    return {
        "prompt_tokens": answer.num_prompt_tokens,
        "completion_tokens": answer.num_tokens,
        "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
    }


def as_completion(answer: ChatAnswer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as the body of a response to a request."""
    choice = {"index": 0, "message": as_message(answer), "finish_reason": _finish_reason(answer), "logprobs": None}
    return {**_completion_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def completion_events(answer: ChatAnswer, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer as the events of a stream: all of it, then the reason of its end."""
    head = _completion_head(answer, "chat.completion.chunk")
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


def _completion_head(answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": int(time.time()), "model": MODEL}


def as_chat_request(
    body: Mapping[str, Any], earlier: Mapping[str, ChatMessages], items: Mapping[str, Item]
) -> dict[str, Any]:
    """Return a request as the body of one for a chat completion; raise ``RequestRefused`` if it is not one.

    ``earlier`` has the conversations up to the answers that ``previous_response_id`` may name, and ``items`` the parts
    of answers that an ``item_reference`` may name, by their ids.
    """
    for name in REFUSED:
        if body.get(name):
            raise RequestRefused(400, "unsupported", f"{name} is not supported in training")
    text = body.get("text") or {}
    require_one_of(PLAIN_FORMATS, "text.format", text.get("format") if isinstance(text, dict) else text)
    include = body.get("include") or []
    if not isinstance(include, list):
        raise RequestRefused(400, "invalid", "include must be a list")
    if any("logprobs" in str(name) for name in include):
        raise RequestRefused(400, "unsupported", "log-probs are not supported in training")
    tools = body.get("tools")
    instructions, previous = body.get("instructions"), body.get("previous_response_id")
    if previous is not None and not (isinstance(previous, str) and previous in earlier):
        raise RequestRefused(400, "invalid", f"this episode has no answer {previous!r:.50}")
    messages: ChatMessages = [{"role": "system", "content": instructions}] if instructions else []
    messages += [*(earlier[previous] if previous is not None else ()), *_as_messages(body.get("input"), items)]
    return {
        "messages": messages,
        "max_tokens": body.get("max_output_tokens"),
        "tools": [_as_tool(tool) for tool in tools] if isinstance(tools, list) else tools,
        "tool_choice": body.get("tool_choice"),
        TEMPLATE_OPTIONS: body.get(TEMPLATE_OPTIONS),
    }


def follows(body: Mapping[str, Any], request: Mapping[str, Any], answer: ChatAnswer) -> ChatMessages:
    """Return the conversation up to an answer, for requests that name it; instructions hold for one request alone."""
    messages: ChatMessages = request["messages"]
    return [*(messages[1:] if body.get("instructions") else messages), as_message(answer)]


def _as_tool(tool: Any) -> Any:
    """Return a function in the form of chat completions; anything else as it is, which is refused there."""
    if not isinstance(tool, dict) or tool.get("type") != "function":
        return tool
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": function}


def _as_messages(items: Any, earlier: Mapping[str, Item]) -> ChatMessages:
    """Return the items of a request as chat messages: an answer's reasoning, text and calls are one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RequestRefused(400, "invalid", "input must be a string or a list of objects")
    messages: ChatMessages = []
    answer: dict[str, Any] | None = None
    """The message of the policy that further items belong to."""
    for item in items:
        item = _referenced(item, earlier) if item.get("type") == "item_reference" else item
        kind = item.get("type") or "message"
        is_answers = kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")
        if not is_answers:
            answer = None
            messages.append(_as_message(item, kind))
            continue
        if answer is None or (kind != "function_call" and ("content" in answer or "tool_calls" in answer)):
            answer = {"role": "assistant"}
            messages.append(answer)
        _add(answer, item, kind)
    return [{"content": "", **message} for message in messages]


def _referenced(reference: Item, earlier: Mapping[str, Item]) -> Item:
    item_id = str(reference.get("id"))
    if item_id not in earlier:
        raise RequestRefused(400, "invalid", f"this episode has no item {item_id!r:.50}")
    return earlier[item_id]


def _add(answer: dict[str, Any], item: Item, kind: str) -> None:
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        answer.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        answer["reasoning_content"] = joined_text(item.get("content") or item.get("summary") or "")
    else:
        answer["content"] = joined_text(item.get("content"))


def _as_message(item: Item, kind: str) -> dict[str, Any]:
    if kind == "message":
        return {"role": item.get("role"), "content": joined_text(item.get("content"))}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": joined_text(item.get("output"))}
    raise RequestRefused(400, "unsupported", f"an item of the type {kind!r:.50} is not supported in training")


def as_response(answer: ChatAnswer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return an answer as the body of a response to a request."""
    is_cut = answer.finish_reason == "length"
    return {
        **_head(answer, body),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output_items(answer),
        "usage": {
            "input_tokens": answer.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": answer.num_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answer.num_prompt_tokens + answer.num_tokens,
        },
    }


def _head(answer: ChatAnswer, body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "id": answer.id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "model": MODEL,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": None,
        "usage": None,
    }


def output_items(answer: ChatAnswer) -> list[dict[str, Any]]:
    """Return the reasoning, the text and the calls of an answer, as items with ids."""
    message = as_message(answer)
    number = answer.id.removeprefix(RESPONSE_PREFIX)
    output: list[dict[str, Any]] = []
    if "reasoning_content" in message:
        part = {"type": "reasoning_text", "text": message["reasoning_content"]}
        output.append({"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [part]})
    if message["content"] is not None:
        part = {"type": "output_text", "text": message["content"], "annotations": []}
        output.append({"type": "message", "id": f"msg_{number}", "role": "assistant", "content": [part]})
    for call in message.get("tool_calls", ()):
        function_call = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"], **call["function"]}
        output.append(function_call)
    return [{**item, "status": "completed"} for item in output]


def response_events(answer: ChatAnswer, body: Mapping[str, Any]) -> Iterator[str]:
    """Yield an answer as the events of a stream; each text comes in one piece."""
    for number, (kind, event) in enumerate(_events(answer, body)):
        text = json.dumps({"type": kind, "sequence_number": number, **event})
        yield f"event: {kind}\ndata: {text}\n\n"


def _events(answer: ChatAnswer, body: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    created, response = _head(answer, body), as_response(answer, body)
    yield "response.created", {"response": created}
    yield "response.in_progress", {"response": created}
    for index, item in enumerate(response["output"]):
        yield "response.output_item.added", {"output_index": index, "item": _empty_item(item)}
        position = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "function_call":
            yield "response.function_call_arguments.delta", {**position, "delta": item["arguments"]}
            function = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**position, **function}
        else:
            yield from _part_events(item["content"], position)
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield f"response.{response['status']}", {"response": response}


def _part_events(parts: Sequence[Item], position: Item) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, part in enumerate(parts):
        content_position = {**position, "content_index": number}
        logprobs: dict[str, Any] = {"logprobs": []} if part["type"] == "output_text" else {}
        yield "response.content_part.added", {**content_position, "part": {**part, "text": ""}}
        yield f"response.{part['type']}.delta", {**content_position, "delta": part["text"], **logprobs}
        yield f"response.{part['type']}.done", {**content_position, "text": part["text"], **logprobs}
        yield "response.content_part.done", {**content_position, "part": part}


def _empty_item(item: Item) -> dict[str, Any]:
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    return {**item, **empty, "status": "in_progress"}

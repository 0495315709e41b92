"""HTTP server through which programs ask the run's policy, with the interface of OpenAI's chat completions.

Each episode has a key of its own, which reaches nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import time
from collections.abc import Mapping
from secrets import token_bytes, token_hex
from typing import Any

from aiohttp import web

from rlpipe.episodes.agent_session import AgentSession, ChatAnswer, ChatQuestion, RequestRefused

MAX_BODY_BYTES = 64 * 2**20
MODEL = "policy"
RETRY_HEADER = "x-stainless-retry-count"
"""Header by which OpenAI's clients count the repetitions of a request."""
FINISH_REASONS = {"length": "length"}


class Gateway:
    """Server on a loopback address; for one event loop."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._sessions: dict[str, AgentSession] = {}
        self._secret = token_bytes(32)
        self._runner: web.AppRunner | None = None
        self.base_url = ""
        """URL for ``OPENAI_BASE_URL``; available once the server has started."""

    async def start(self) -> None:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/reward", self._reward)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.base_url = f"http://{self._host}:{port}/v1"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    def open(self, session: AgentSession) -> str:
        """Return a new key, of 256 bits, by which a program reaches the session."""
        key = self._sign(token_hex(32))
        self._sessions[key] = session
        return key

    def close(self, key: str) -> None:
        """Refuse further requests with the key."""
        self._sessions.pop(key, None)

    def _sign(self, number: str) -> str:
        """Return a key that ``_session`` knows as one of this gateway's even after its episode."""
        return f"rlpipe-{number}-{hmac.new(self._secret, number.encode(), 'sha256').hexdigest()}"

    def _session(self, request: web.Request) -> AgentSession:
        key = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        session = self._sessions.get(key)
        if session is not None:
            return session
        _, _, signed = key.partition("-")
        if hmac.compare_digest(key.encode(), self._sign(signed.partition("-")[0]).encode()):
            raise RequestRefused(409, "sealed", "the episode is over")
        raise RequestRefused(401, "invalid_api_key", "the key is of no episode of this run")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            session = self._session(request)
            body = await _read(request)
            question = ChatQuestion.parse(body)
            is_retry = request.headers.get(RETRY_HEADER, "0") != "0"
            answer = await _until_sealed(session, question, is_retry=is_retry)
        except RequestRefused as refusal:
            return _refused(refusal)
        session.received(question, answer)
        response, is_sent = await _respond(request, body, answer)
        if not is_sent or request.transport is None or request.transport.is_closing():
            session.lost(question, answer)
        return response

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request)
        except RequestRefused as refusal:
            return _refused(refusal)
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "owned_by": "rlpipe"}]})

    async def _reward(self, request: web.Request) -> web.Response:
        """Take the reward of an episode, or rewards of answers by their ids."""
        try:
            session, body = self._session(request), await _read(request)
            session.set_reward(body.get("reward", body.get("rewards")))
        except RequestRefused as refusal:
            return _refused(refusal)
        return web.json_response({})


async def _read(request: web.Request) -> Mapping[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError) as error:
        raise RequestRefused(400, "invalid", f"the request's body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestRefused(400, "invalid", "the request's body is not a JSON object")
    return body


async def _until_sealed(session: AgentSession, question: ChatQuestion, *, is_retry: bool) -> ChatAnswer:
    try:
        return await session.ask(question, is_retry=is_retry)
    except asyncio.CancelledError:
        if session.is_sealed:
            raise RequestRefused(409, "sealed", "the episode ended before the answer") from None
        raise
    except RequestRefused:
        raise
    except Exception as error:  # the program has to be told, whatever an engine raises
        raise RequestRefused(500, "failed", str(error)) from error


def _refused(refusal: RequestRefused) -> web.Response:
    error = {"message": str(refusal), "type": "invalid_request_error", "code": refusal.code, "param": None}
    return web.json_response({"error": error}, status=refusal.status)


async def _respond(
    request: web.Request, body: Mapping[str, Any], answer: ChatAnswer
) -> tuple[web.StreamResponse, bool]:
    """Send an answer, as one object or as events; return the response, and whether the connection held."""
    if not body.get("stream"):
        response = web.Response(text=json.dumps(as_completion(answer)), content_type="application/json")
        return response, await _is_sent(request, response)
    events = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    try:
        await events.prepare(request)
        for chunk in as_chunks(answer, with_usage=with_usage):
            await events.write(f"data: {json.dumps(chunk)}\n\n".encode())
        await events.write(b"data: [DONE]\n\n")
        await events.write_eof()
    except ConnectionError:
        return events, False
    return events, True


async def _is_sent(request: web.Request, response: web.Response) -> bool:
    try:
        await response.prepare(request)
        await response.write_eof()
    except ConnectionError:
        return False
    return True


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


def as_completion(answer: ChatAnswer) -> dict[str, Any]:
    """Return an answer as the body of a response."""
    choice = {
        "index": 0,
        "message": as_message(answer),
        "finish_reason": _finish_reason(answer),
        "logprobs": None,
    }
    return {**_head(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}


def as_chunks(answer: ChatAnswer, *, with_usage: bool) -> list[dict[str, Any]]:
    """Return an answer as the events of a stream: all of it, then the reason of its end."""
    head = _head(answer, "chat.completion.chunk")
    delta = as_message(answer)
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(delta["tool_calls"])]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish_reason(answer)}]},
    ]
    return [*chunks, {**head, "choices": [], "usage": _usage(answer)}] if with_usage else chunks


def _head(answer: ChatAnswer, kind: str) -> dict[str, Any]:
    return {"id": answer.id, "object": kind, "created": int(time.time()), "model": MODEL}

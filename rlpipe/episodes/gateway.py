"""HTTP server through which programs ask the run's policy, with OpenAI's chat completions and Responses API.

Each episode has a key of its own, which reaches nothing else.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import json
from collections.abc import Callable, Iterable, Mapping
from secrets import token_bytes, token_hex
from typing import Any, NamedTuple

from aiohttp import web

from rlpipe.episodes.agent_session import AgentSession, ChatAnswer
from rlpipe.episodes.agents import KEY_HEADER
from rlpipe.episodes.chat_request import ChatQuestion, RequestRefused
from rlpipe.episodes.openai_protocol import (
    MODEL,
    RESPONSE_PREFIX,
    as_chat_request,
    as_completion,
    as_response,
    completion_events,
    follows,
    output_items,
    response_events,
)
from rlpipe.errors import ConfigError

MAX_BODY_BYTES = 64 * 2**20
ADDRESS_WAIT_S, ADDRESS_PAUSE_S = 10.0, 0.2
RETRY_HEADER = "x-stainless-retry-count"
"""Header by which OpenAI's clients count the repetitions of a request."""
STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache"}


class ResponseFormat(NamedTuple):
    """Writers of an answer: as the body of a response to a request, and as the events of a stream."""

    body: Callable[[ChatAnswer, Mapping[str, Any]], dict[str, Any]]
    events: Callable[[ChatAnswer, Mapping[str, Any]], Iterable[str]]


COMPLETIONS = ResponseFormat(as_completion, completion_events)
RESPONSES = ResponseFormat(as_response, response_events)


class Gateway:
    """Server on one address, which is a loopback one by default; for one event loop."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host, self._port = host, port
        self._sessions: dict[str, AgentSession] = {}
        self._secret = token_bytes(32)
        self._runner: web.AppRunner | None = None
        self.base_url = ""
        """URL for ``OPENAI_BASE_URL``; available once the server has started."""

    async def start(self) -> None:
        """Begin to listen; raise ``ConfigError`` if the address can't be had."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_post("/v1/responses", self._respond)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{name}", self._models)
        app.router.add_post("/v1/reward", self._reward)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await self._listen(self._runner)
        host = f"[{self._host}]" if ":" in self._host else self._host
        self.base_url = f"http://{host}:{self._runner.addresses[0][1]}/v1"

    async def _listen(self, runner: web.AppRunner) -> None:
        """Listen at the address; a process that this one replaces may have it for a moment longer."""
        deadline = asyncio.get_running_loop().time() + ADDRESS_WAIT_S
        while True:
            try:
                return await web.TCPSite(runner, self._host, self._port).start()
            except OSError as error:
                if error.errno != errno.EADDRINUSE or asyncio.get_running_loop().time() > deadline:
                    address = f"environment.host={self._host} environment.port={self._port}"
                    raise ConfigError(f"{address}: agents can't be served there: {error.strerror or error}") from error
            await asyncio.sleep(ADDRESS_PAUSE_S)

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
        """Return a signed key, which ``_session`` recognizes as this gateway's even after its episode."""
        return f"rlpipe-{number}-{hmac.new(self._secret, number.encode(errors='replace'), 'sha256').hexdigest()}"

    def _session(self, request: web.Request, body: Mapping[str, Any]) -> AgentSession:
        """Return the session of a request's key, which proxies with another one pass on in a header or as ``user``."""
        scheme, _, bearer_key = request.headers.get("Authorization", "").strip().partition(" ")
        bearer_key = bearer_key.strip() if scheme.lower() == "bearer" else scheme
        keys = [bearer_key, request.headers.get(KEY_HEADER, ""), str(body.get("user"))]
        for key in keys:
            if key in self._sessions:
                return self._sessions[key]
        for key in keys:
            signed = self._sign(key.partition("-")[2].partition("-")[0])
            if hmac.compare_digest(key.encode(errors="replace"), signed.encode(errors="replace")):
                raise RequestRefused(409, "sealed", "the episode is over")
        raise RequestRefused(401, "invalid_api_key", "the key belongs to no episode of this run")

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await _read(request)
            session = self._session(request, body)
            question = ChatQuestion.parse(body)
            answer = await _answer_question(request, session, question)
        except RequestRefused as refusal:
            return _refused(refusal)
        return await _send(request, body, session, question, answer, COMPLETIONS)

    async def _respond(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await _read(request)
            session = self._session(request, body)
            chat = as_chat_request(body, session.conversations, session.items)
            question = ChatQuestion.parse(chat, id_prefix=RESPONSE_PREFIX)
            answer = await _answer_question(request, session, question)
        except RequestRefused as refusal:
            return _refused(refusal)
        if body.get("store") is not False:
            session.conversations[answer.id] = follows(body, chat, answer)
            session.items |= {item["id"]: item for item in output_items(answer)}
        return await _send(request, body, session, question, answer, RESPONSES)

    async def _models(self, request: web.Request) -> web.Response:
        try:
            self._session(request, {})
        except RequestRefused as refusal:
            return _refused(refusal)
        name = request.match_info.get("name")
        model = {"id": name or MODEL, "object": "model", "created": 0, "owned_by": "rlpipe"}  # any name is the policy's
        return web.json_response({"object": "list", "data": [model]} if name is None else model)

    async def _reward(self, request: web.Request) -> web.Response:
        """Take the reward of an episode, or rewards of answers by their ids."""
        try:
            body = await _read(request)
            self._session(request, body).set_reward(body.get("reward", body.get("rewards")))
        except RequestRefused as refusal:
            return _refused(refusal)
        return web.json_response({})


async def _read(request: web.Request) -> Mapping[str, Any]:
    try:
        body = await request.json()
    except (ValueError, RecursionError, LookupError, web.RequestPayloadError) as error:  # also unknown encodings
        raise RequestRefused(400, "invalid", f"the request's body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise RequestRefused(400, "invalid", "the request's body is not a JSON object")
    return body


async def _answer_question(request: web.Request, session: AgentSession, question: ChatQuestion) -> ChatAnswer:
    try:
        is_retry = request.headers.get(RETRY_HEADER, "0") != "0"
        transport = request.transport  # not the request, with its body, as the session keeps it
        return await session.ask(question, is_retry=is_retry, listens=lambda: _is_open(transport))
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


async def _send(
    request: web.Request,
    body: Mapping[str, Any],
    session: AgentSession,
    question: ChatQuestion,
    answer: ChatAnswer,
    form: ResponseFormat,
) -> web.StreamResponse:
    """Send an answer, as one object or as a stream; one that does not arrive is taken back."""
    session.received(question, answer)
    response: web.StreamResponse
    if body.get("stream"):
        response, texts = web.StreamResponse(headers=STREAM_HEADERS), form.events(answer, body)
    else:
        response, texts = web.Response(text=json.dumps(form.body(answer, body)), content_type="application/json"), ()
    if not await _is_sent(request, response, texts):
        session.lost(question, answer)
    return response


async def _is_sent(request: web.Request, response: web.StreamResponse, texts: Iterable[str]) -> bool:
    """Send a response, and return whether the connection held."""
    try:
        await response.prepare(request)
        for text in texts:
            await response.write(text.encode())
        await response.write_eof()
    except ConnectionError:
        return False
    return _is_open(request.transport)


def _is_open(transport: asyncio.Transport | None) -> bool:
    return transport is not None and not transport.is_closing()

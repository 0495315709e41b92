"""HTTP client that posts JSON to servers that may be busy, slow or temporarily broken."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import httpx

from rlpipe.common.formatting import shortened, without_password
from rlpipe.scoring.validation import strict_json

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Status codes after which a request is retried."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
MAX_SHOWN_CHARS = 200
MAX_ANSWER_BYTES = 16 * 2**20
"""Longest answer that is read; a judge's with all its log-probabilities takes well below one MiB."""

Value = TypeVar("Value")


class RequestFailed(Exception):
    """Raised when a server or an engine gives no usable answer; the message has the last reason."""


class UnusableAnswer(Exception):
    """Raised while an answer is read, to request another one."""


class JsonClient:
    """Client of one server, with at most ``concurrency`` concurrent requests in this process.

    A request is retried up to ``retries`` times if the server can't be reached, does not answer within ``timeout_s``
    seconds, is busy or broken (429 and 5xx among others), or gives an unusable answer. The pauses in between double
    from half a second, unless the server says how long to wait. Answers are requested uncompressed, and refused
    otherwise, so that the limit of their size holds for what they take in memory. Redirects are not followed.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float | None,
        retries: int,
        concurrency: int,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._timeout_s, self._retries = timeout_s, retries
        self._slots = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._client = httpx.AsyncClient(
            timeout=timeout_s, limits=limits, headers={"accept-encoding": "identity", **(headers or {})}
        )

    async def post(self, path: str, body: Any, read: Callable[[Any], Value]) -> Value:
        """Post a request and return ``read`` of its JSON answer; ``read`` raises ``UnusableAnswer`` for a retry.

        Raises ``RequestFailed`` once the attempts are used up, or at once for answers that will not change, such as
        404.
        """
        url = f"{self._url}{path}"
        server = without_password(url).partition("?")[0]
        for attempt in range(self._retries + 1):
            pause_s: float | None = None
            try:
                async with (
                    self._slots,
                    asyncio.timeout(self._timeout_s),  # for the whole answer, however slowly it arrives
                    self._client.stream("POST", url, json=body) as response,
                ):
                    answer = await _body_of(response)
                if response.is_success:
                    return read(_json_of(response, answer))
                reason = f"it answered {response.status_code} ({_shown(answer)})"
                if response.status_code not in RETRIED:
                    raise RequestFailed(f"{server}: {reason}")
                pause_s = _retry_after_s(response)
            except (httpx.TimeoutException, TimeoutError):
                reason = f"no answer within {self._timeout_s or 0:g} seconds"
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            except UnusableAnswer as error:
                reason = str(error)
            if attempt < self._retries:
                await asyncio.sleep(_pause_s(attempt) if pause_s is None else pause_s)
        raise RequestFailed(f"{server}: {reason}, at the last of {self._retries + 1} attempts")


async def together(work: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """Run coroutines concurrently and return their results; if one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


async def _body_of(response: httpx.Response) -> bytes:
    """Return the body as it was sent, or its beginning if it is longer than the limit."""
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > MAX_ANSWER_BYTES:
            break
    return bytes(body)


def _json_of(response: httpx.Response, body: bytes) -> Any:
    encoding = response.headers.get("content-encoding", "identity")
    if encoding.strip().lower() != "identity":
        raise UnusableAnswer(
            f"its answer is compressed ({shortened(encoding, MAX_SHOWN_CHARS)}), which was not asked for"
        )
    if len(body) > MAX_ANSWER_BYTES:
        raise UnusableAnswer(f"its answer is longer than {MAX_ANSWER_BYTES:,} bytes")
    try:
        return strict_json(body)
    except (ValueError, RecursionError):
        raise UnusableAnswer(f"its answer is not JSON ({_shown(body)})") from None


def _pause_s(attempt: int) -> float:
    """Return the pause after an attempt: it doubles, and varies by half so that clients do not retry all at once."""
    return min(FIRST_PAUSE_S * 2**attempt, MAX_PAUSE_S) * random.uniform(0.5, 1.0)


def _retry_after_s(response: httpx.Response) -> float | None:
    """Return the seconds of ``Retry-After``, within limits; None for a date, or what is not a number."""
    try:
        pause_s = float(response.headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return None if math.isnan(pause_s) else min(max(pause_s, 0.0), MAX_PAUSE_S)


def _shown(body: bytes) -> str:
    # A character takes up to four bytes; the rest of a long body is not decoded.
    return shortened(" ".join(body[: 8 * MAX_SHOWN_CHARS].decode(errors="replace").split()), MAX_SHOWN_CHARS)

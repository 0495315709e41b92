"""HTTP client that posts JSON to servers that may be busy, slow or temporarily broken."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, TypeVar

import httpx

from rlpipe.scoring.validation import shortened

RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
"""Status codes after which a request is retried."""
FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0
MAX_SHOWN_CHARS = 200

Value = TypeVar("Value")


class RequestFailed(Exception):
    """Raised when a server or an engine gives no usable answer; the message has the last reason."""


class UnusableAnswer(Exception):
    """Raised while an answer is read, to request another one."""


class JsonClient:
    """Client of one server, with at most ``concurrency`` requests at one time in this process.

    A request is retried up to ``retries`` times if the server can't be reached, does not answer within ``timeout_s``
    seconds, is busy or broken (429 and 5xx among others), or gives an unusable answer. The pauses in between double
    from half a second, unless the server says how long to wait.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float,
        retries: int,
        concurrency: int,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self._url = url.rstrip("/")
        self._timeout_s, self._retries = timeout_s, retries
        self._places = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        self._client = httpx.AsyncClient(timeout=timeout_s, limits=limits, headers=dict(headers or {}))

    async def post(self, path: str, body: Any, read: Callable[[Any], Value]) -> Value:
        """Post a request and return ``read`` of its JSON answer; ``read`` raises ``UnusableAnswer`` for a retry.

        Raises ``RequestFailed`` once the attempts are used up, or at once for answers that will not change, such as
        404.
        """
        url = f"{self._url}{path}"
        for attempt in range(self._retries + 1):
            pause_s: float | None = None
            try:
                async with self._places, asyncio.timeout(self._timeout_s):
                    response = await self._client.post(url, json=body)
                if response.is_success:
                    return read(_json_of(response))
                reason = f"it answered {response.status_code} ({_shown(response.text)})"
                if response.status_code not in RETRIED:
                    raise RequestFailed(f"{url}: {reason}")
                pause_s = _wanted_pause_s(response)
            except (httpx.TimeoutException, TimeoutError):
                reason = f"no answer within {self._timeout_s:g} seconds"
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            except UnusableAnswer as error:
                reason = str(error)
            if attempt < self._retries:
                await asyncio.sleep(_pause_s(attempt) if pause_s is None else pause_s)
        raise RequestFailed(f"{url}: {reason}, at the last of {self._retries + 1} attempts")


async def together(work: Iterable[Coroutine[Any, Any, Value]]) -> list[Value]:
    """Run coroutines concurrently and return their results; if one fails, cancel the others and raise its error."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(one) for one in work]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in running]


def _json_of(response: httpx.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise UnusableAnswer(f"its answer is not JSON ({_shown(response.text)})") from None


def _pause_s(attempt: int) -> float:
    """Return the pause after an attempt: it doubles, and varies by half so that clients do not retry all at once."""
    return min(FIRST_PAUSE_S * 2**attempt, MAX_PAUSE_S) * random.uniform(0.5, 1.0)


def _wanted_pause_s(response: httpx.Response) -> float | None:
    try:
        return min(max(float(response.headers["retry-after"]), 0.0), MAX_PAUSE_S)
    except (KeyError, ValueError):
        return None


def _shown(text: str) -> str:
    return shortened(" ".join(text.split()), MAX_SHOWN_CHARS)

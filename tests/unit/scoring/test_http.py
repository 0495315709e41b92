"""Tests of the HTTP client against a loopback server that misbehaves."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import httpx
import pytest
from http_cases import Reply, serving

from rlpipe.scoring.http import MAX_ANSWER_BYTES, MAX_PAUSE_S, JsonClient, RequestFailed, _retry_after_s


async def post(url: str, timeout_s: float = 5) -> Any:
    client = JsonClient(url, timeout_s=timeout_s, retries=0, concurrency=1)
    return await client.post("/x", {}, lambda answer: answer)


def failure(reply: Reply) -> str:
    with serving(lambda path, body: reply) as server, pytest.raises(RequestFailed) as caught:
        asyncio.run(post(server.url))
    return str(caught.value)


def test_a_compressed_answer_is_refused_unread() -> None:
    reply = Reply(body=gzip.compress(b"0" * 10_000), headers={"content-encoding": "gzip"})
    assert "compressed (gzip)" in failure(reply)


def test_an_answer_beyond_the_limit_fails() -> None:
    assert "longer than" in failure(Reply(body=b" " * (MAX_ANSWER_BYTES + 1)))


@pytest.mark.parametrize(
    "body",
    [b"[" * 200_000, b'{"a": NaN}', b"-Infinity", b"1e999", b"9" * 301, b"9" * 5000, b'{"a": 1, "a": 2}', b"\xff\xfe{"],
    ids=["deep", "nan", "infinity", "overflow", "integer", "long-integer", "duplicate", "charset"],
)
def test_what_is_not_strict_json_fails_in_one_line(body: bytes) -> None:
    reason = failure(Reply(body=body))
    assert "is not JSON" in reason
    assert "\n" not in reason
    assert len(reason) < 500


def test_redirects_are_not_followed() -> None:
    assert "answered 307" in failure(Reply(body={}, status=307, headers={"location": "file:///etc/passwd"}))


@pytest.mark.parametrize(
    ("written", "pause_s"),
    [
        ("nan", None),
        ("soon", None),
        ("Fri, 31 Dec 9999 23:59:59 GMT", None),
        ("-5", 0.0),
        ("inf", MAX_PAUSE_S),
        ("1e9", MAX_PAUSE_S),
        ("2", 2.0),
    ],
)
def test_retry_after_is_bounded(written: str, pause_s: float | None) -> None:
    assert _retry_after_s(httpx.Response(503, headers={"retry-after": written})) == pause_s


def test_a_drip_does_not_outlive_the_timeout() -> None:
    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        try:
            for _ in range(100):
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.1)
        except OSError:
            pass
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with asyncio.timeout(5):
            await post(f"http://127.0.0.1:{port}", timeout_s=0.5)

    with pytest.raises(RequestFailed, match=r"no answer within 0\.5 seconds"):
        asyncio.run(run())


def test_a_failure_does_not_show_the_secrets_of_the_address() -> None:
    client = JsonClient("http://me:pa55@127.0.0.1:9/v1?key=s3cret", timeout_s=5, retries=0, concurrency=1)
    with pytest.raises(RequestFailed) as failed:
        asyncio.run(client.post("/x", {}, lambda answer: answer))
    assert "127.0.0.1:9/v1" in str(failed.value)
    assert "pa55" not in str(failed.value)
    assert "s3cret" not in str(failed.value)

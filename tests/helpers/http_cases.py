"""A local HTTP server with scripted answers, including deliberate failures."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(kw_only=True)
class Reply:
    body: Any = None
    """The response body, sent unchanged if it is bytes and as JSON otherwise."""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    delay_s: float = 0.0
    hang_up: bool = False
    """Whether to close the connection instead of answering."""


class Server:
    """The requests that a running server received, and the function that answers them."""

    def __init__(self, answer: Callable[[str, Any], Reply]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.most_at_one_time = 0
        self._running = 0
        self.url = ""

    def reply(self, path: str, body: Any, headers: Mapping[str, str]) -> Reply:
        with self._lock:
            self.requests.append((path, body))
            self.headers.append(headers)
            self._running += 1
            self.most_at_one_time = max(self.most_at_one_time, self._running)
            reply = self._answer(path, body)
        time.sleep(reply.delay_s)
        with self._lock:
            self._running -= 1
        return reply


@contextmanager
def serving(answer: Callable[[str, Any], Reply]) -> Iterator[Server]:
    """Serve on a loopback port; ``answer`` is called with the path and body of each request."""
    server = Server(answer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            reply = server.reply(self.path, body, {name.lower(): value for name, value in self.headers.items()})
            if reply.hang_up:
                self.close_connection = True
                return
            sent = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
            try:
                self.send_response(reply.status)
                for name, value in {**reply.headers, "content-length": str(len(sent))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(sent)
            except OSError:
                self.close_connection = True  # the client did not wait

        def log_message(self, *args: Any) -> None:
            """Print nothing."""

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def in_turn(*replies: Reply) -> Callable[[str, Any], Reply]:
    """Return each reply once, and then the last one for all further requests."""
    left = list(replies)
    return lambda path, body: left.pop(0) if len(left) > 1 else left[0]

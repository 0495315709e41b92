"""The web application of `rlpipe view`: a token, one host, and answers that no model's text can turn into a program."""

from __future__ import annotations

import hmac
import json
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import QueryParams
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rlpipe.common.imports import describe_error
from rlpipe.errors import InputError
from rlpipe.viewer.comparison import Side, groups_of_prompt, shared_prompts
from rlpipe.viewer.group_detail import MAX_TOKENS, image_kind
from rlpipe.viewer.group_query import BOUNDS, FUNCTION, PAGE, GroupQuery
from rlpipe.viewer.static_files import KINDS, served_files
from rlpipe.viewer.viewed_run import NotInRun, ViewedRun, ViewedRuns

HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names that a browser may ask for, whatever the port, so that it can be forwarded; any other is refused."""
REFRESH_S = 1.0
LOOK_S = 5.0
"""Seconds from one look for new runs to the next."""
INDEX_S = 1.0
"""Seconds of indexing one run's groups, after which the other runs are read again."""
ASKING_S = 0.3
"""Seconds after an answer in which a page may ask for more, and nothing is indexed."""
LONGEST_WAIT_S = 2.0
"""Seconds for which pages that ask all the time hold up the index."""
PAUSE_S = 0.05
MAX_PAGE = 500
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
    " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """ASGI application that lets only requests with the token at the start of their path, and a local host, through.

    The token is part of the path, not a cookie, which a browser would send to every other port of this machine, too.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token
        self._num_asked, self._answered_at = 0, 0.0

    @property
    def is_asked(self) -> bool:
        """Whether a page waits for an answer, or may be about to ask for more."""
        return self._num_asked > 0 or time.monotonic() - self._answered_at < ASKING_S

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        self._num_asked += 1
        try:
            await self._answer(scope, receive, send)
        finally:
            self._num_asked -= 1
            self._answered_at = time.monotonic()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refuse(scope)
        if refusal is not None:
            await refusal(scope, receive, _with_headers(send))
            return
        prefix = f"/{self._token}"
        if scope["path"] == prefix:  # the page's addresses are relative to a folder
            await RedirectResponse(f"{prefix}/")(scope, receive, _with_headers(send))
            return
        inner = {**scope, "path": scope["path"].removeprefix(prefix), "raw_path": b""}
        await self._app(inner, receive, _with_headers(send))

    def _refuse(self, scope: Scope) -> Response | None:
        host = dict(scope["headers"]).get(b"host", b"").decode("latin-1")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        if name.lower() not in HOSTS:
            return PlainTextResponse(f"this page is only for {', '.join(HOSTS)}\n", 403)
        token = scope["path"].partition("/")[2].partition("/")[0]  # the path of ``OPTIONS *`` has no slash
        if not hmac.compare_digest(token.encode(errors="replace"), self._token.encode()):
            return PlainTextResponse("wrong token: open the address that `rlpipe view` has printed\n", 401)
        return None


def _with_headers(send: Send) -> Send:
    async def sending(message: Any) -> None:
        if message["type"] == "http.response.start":
            added = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return sending


def to_json(value: Any) -> str:
    """Return JSON in ASCII, with null for what is not finite, which JavaScript can't read."""
    try:
        return json.dumps(value, allow_nan=False, default=str)
    except ValueError:
        return json.dumps(_finite(value), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _finite(child) for name, child in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(child) for child in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Pages:
    """The answers of the page's requests, for a list of runs."""

    def __init__(self, runs: Sequence[ViewedRun]) -> None:
        self._runs, self._static = runs, served_files()

    def answers(self) -> dict[str, Callable[[QueryParams], Any]]:
        """Return the functions that answer, by the names that follow ``api/``."""
        return {
            "runs": lambda query: [run.summary() for run in self._runs],
            "series": self._series,
            "names": lambda query: self._run(query).series.names,
            "diagnosis": lambda query: self._run(query).diagnosis(),
            "groups": self._groups,
            "count": lambda query: self._run(query).count(make_query(query)),
            "choices": lambda query: self._run(query).choices(),
            "group": self._group,
            "events": self._events,
            "marks": lambda query: self._run(query).marks(),
            "parts": lambda query: self._run(query).parts(),
            "prompts": lambda query: shared_prompts(*self._sides(query), query.get("text", "")),
            "answers": self._answers,
        }

    def _run(self, query: QueryParams, name: str = "run") -> ViewedRun:
        number = _integer(query, name) or 0
        if not 0 <= number < len(self._runs):
            raise NotInRun(f"there is no run {number}")
        return self._runs[number]

    def _series(self, query: QueryParams) -> Any:
        return self._run(query).series.get(query.getlist("name"))

    def _groups(self, query: QueryParams) -> Any:
        size = min(max(_integer(query, "size") or PAGE, 1), MAX_PAGE)
        return self._run(query).groups(make_query(query), size)

    def _group(self, query: QueryParams) -> Any:
        most_tokens = max(_integer(query, "tokens") or MAX_TOKENS, 1)
        return self._run(query).group(_integer(query, "id") or 0, most_tokens=most_tokens)

    def _events(self, query: QueryParams) -> Any:
        return self._run(query).events(before=_integer(query, "before"), kind=query.get("kind", ""))

    def _sides(self, query: QueryParams) -> tuple[Side, Side]:
        left, right = (
            Side(
                run=self._run(query, name),
                least=_integer(query, f"{name}_min"),
                most=_integer(query, f"{name}_max"),
                held_out=query.get("prompts") == "held_out",
            )
            for name in ("left", "right")
        )
        return left, right

    def _answers(self, query: QueryParams) -> Any:
        key = _integer(query, "key") or 0
        left, right = self._sides(query)
        return {"left": groups_of_prompt(left, key), "right": groups_of_prompt(right, key)}

    async def file(self, request: Request) -> Response:  # which needs no thread, unlike an answer
        path = request.path_params["path"] or "index.html"
        content = self._static.get(path)
        if content is None:
            return PlainTextResponse(f"there is no page {path[:100]!r}\n", 404)
        return Response(content, media_type=KINDS[path.rpartition(".")[2]])

    def image(self, request: Request) -> Response:
        query = request.query_params
        return _guarded(lambda: self._image(query))

    def _image(self, query: QueryParams) -> Response:
        content = self._run(query).image(_integer(query, "id") or 0, _integer(query, "number") or 0)
        return Response(content, media_type=image_kind(content))


def _guarded(answer: Callable[[], Response]) -> Response:
    """Return an answer, or what is wrong with the question."""
    try:
        return answer()
    except NotInRun as error:
        return PlainTextResponse(f"{error}\n", 404)
    except InputError as error:
        return PlainTextResponse(f"{error}\n", 400)
    except Exception as error:  # noqa: BLE001 - files of a run may hold anything
        return PlainTextResponse(f"a file of the run can't be read: {describe_error(error)}\n", 500)


def _integer(query: QueryParams, name: str) -> int | None:
    text = query.get(name, "")
    try:
        value = int(text) if text else None
    except ValueError:
        value = 2**63
    if value is not None and not -(2**63) <= value < 2**63:
        raise InputError(f"{name}={text[:40]!r} is not an integer")
    return value


def _number(query: QueryParams, name: str) -> float | None:
    text = query.get(name, "")
    try:
        value = float(text) if text else None
    except ValueError:
        value = math.nan
    if value is not None and math.isnan(value):
        raise InputError(f"{name}={text[:40]!r} is not a number")
    return value


def make_query(query: QueryParams) -> GroupQuery:
    """Return the selection of groups that a request asks for; raise ``InputError`` if it makes no sense."""
    named = [(name, name) for name in BOUNDS]
    if function := query.get("function", ""):
        named.append((f"{FUNCTION}{function}", "function"))
    bounds = [(name, _number(query, f"{short}_min"), _number(query, f"{short}_max")) for name, short in named]
    key, _, group_id = query.get("after", "").partition("|")
    try:
        after = (float(key), int(group_id)) if key else None
    except ValueError:
        raise InputError(f"after={key[:40]!r} is not the start of a page") from None
    return GroupQuery(
        sort=query.get("sort", "id"),
        descending=query.get("order", "desc") != "asc",
        after=after,
        bounds=tuple(bound for bound in bounds if bound[1:] != (None, None)),
        state=query.get("state", ""),
        status=query.get("status", ""),
        reason=query.get("reason", ""),
        text=query.get("text", ""),
    )


def make_app(runs: Sequence[ViewedRun], token: str) -> Guard:
    """Return the application, whose addresses begin with ``/TOKEN/``."""
    pages = Pages(runs)

    def route(answer: Callable[[QueryParams], Any]) -> Callable[[Request], Response]:
        def respond(request: Request) -> Response:
            query = request.query_params
            return _guarded(lambda: Response(to_json(answer(query)), media_type="application/json"))

        return respond

    routes = [Route(f"/api/{name}", route(answer), methods=["GET"]) for name, answer in pages.answers().items()]
    routes.append(Route("/api/image", pages.image, methods=["GET"]))
    routes.append(Route("/{path:path}", pages.file, methods=["GET"]))
    return Guard(Starlette(routes=routes), token)


class Refresher(threading.Thread):
    """Thread that reads what is new in the runs' files, and finds new runs.

    While ``is_asked``, no groups are indexed, which would slow down the answers.
    """

    def __init__(self, runs: ViewedRuns, is_asked: Callable[[], bool] = lambda: False) -> None:
        super().__init__(daemon=True, name="refresher")
        self._runs, self._ended, self._is_asked = runs, threading.Event(), is_asked
        self._idle_at = 0.0
        """When no page was asking, last."""

    def run(self) -> None:
        self._read(ViewedRun.read_metrics)
        self._idle_at = time.monotonic()
        is_complete, looked_at = True, 0.0
        # At first, the page is drawn before anything is indexed.
        while not self._ended.wait(REFRESH_S if is_complete or not looked_at else PAUSE_S if self._gives_way() else 0):
            if time.monotonic() - looked_at > LOOK_S:
                self._runs.look()
                looked_at = time.monotonic()
            self._read(ViewedRun.read_new, is_all=False)
            is_complete = self._read(self._refresh)

    def _refresh(self, run: ViewedRun) -> bool:
        """Read a run's files and index its groups for a moment, so that the other runs' curves go on."""
        deadline = time.monotonic() + INDEX_S
        return run.refresh(lambda: self._ended.is_set() or time.monotonic() > deadline or self._gives_way())

    def _gives_way(self) -> bool:
        """Return whether the index waits for answers to a page."""
        now = time.monotonic()
        if not self._is_asked():
            self._idle_at = now
        return 0 < now - self._idle_at < LONGEST_WAIT_S

    def _read(self, read: Callable[[ViewedRun], bool | None], *, is_all: bool = True) -> bool:
        """Read all runs, or if not ``is_all`` only a part of each; return whether nothing is left."""
        is_complete = True
        for run in self._runs:
            try:
                is_complete &= read(run) is not False
                if is_all:
                    run.problem = ""
            # A ledger that is being replaced is missing for a moment.
            except (InputError, OSError, sqlite3.Error) as error:
                run.problem = str(error)
            except Exception as error:  # noqa: BLE001 - files of a run may hold anything, and other runs are read on
                run.problem = f"a file of the run can't be read: {describe_error(error)}"
        return is_complete

    def stop(self) -> None:
        self._ended.set()
        self.join()

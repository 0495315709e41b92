"""Environments of other libraries as rlpipe's: gymnasium's, TRL's classes, and those that an OpenEnv server has.

With a server, each episode has a session of its own there. The protocol is that of OpenEnv 0.10: JSON over a WebSocket;
the package itself is not needed here.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import aiohttp

from rlpipe.common.formatting import printable, without_password
from rlpipe.episodes.tools import Environment, FunctionTool, Observation, Step, as_messages, call_anywhere
from rlpipe.errors import ConfigError

Show = Callable[[Any, Any], str]
"""Function of an environment and its observation that returns what the policy sees."""
Read = Callable[[str, Any], Any]
"""Function of the policy's text and the action space that returns an action; raises ``ValueError``."""
TRL_METHODS = ("reset", "get_reward")
"""Methods of TRL's environments that are no tools."""
ShowObservation = Callable[[Any], str]
"""Function of an observation that returns what the policy sees."""
ReadAction = Callable[[str], Any]
"""Function of the policy's text that returns an action; raises ``ValueError``."""
OWN_FIELDS = ("metadata", "done", "reward")
"""Fields of observations and actions that OpenEnv itself has there."""
WRONG_ACTION = "VALIDATION_ERROR"
CAPACITY = "CAPACITY_REACHED"
CONNECT_TIMEOUT_S = 30.0
MAX_MESSAGE_BYTES = 64 * 2**20
MAX_UNREAD = 4
"""Messages of a server that are kept before it is asked again; more wait at the server."""
MAX_SHOWN_CHARS = 500


def from_gymnasium(
    name: str, *, show: Show | None = None, read: Read | None = None, **options: Any
) -> type[Environment]:
    """Return gymnasium's environment ``name`` as an environment class; ``options`` go to ``gymnasium.make``.

    The policy sees the text that ``render_mode="ansi"`` renders, or else the observation. It answers with an action: a
    number for a discrete space, JSON for others. A row may have a ``seed``, and further options of ``make`` in a column
    ``make``. Subclasses, which may change rewards, find gymnasium's environment in ``env``. Raises ``ConfigError`` if
    gymnasium is not installed.
    """
    try:
        import gymnasium
    except ImportError:
        raise ConfigError("gymnasium is not installed: pip install 'rlpipe[gymnasium]'") from None

    class GymnasiumEnvironment(Environment):
        def reset(self, row: Mapping[str, Any], seed: int) -> str:
            self.env = gymnasium.make(name, **{**options, **(row.get("make") or {})})
            observation, _ = self.env.reset(seed=seed if row.get("seed") is None else row["seed"])
            return self._show(observation)

        def step(self, action: str) -> Step:
            try:
                parsed_action = (read or read_action)(action, self.env.action_space)
            except ValueError as error:
                return Step(f"{error}; actions are {self.env.action_space}")
            observation, reward, is_terminal, is_truncated, _ = self.env.step(parsed_action)
            return Step(self._show(observation), reward=float(reward), done=is_terminal or is_truncated)

        def _show(self, observation: Any) -> str:
            if show is not None:
                return show(self.env, observation)
            return str(self.env.render()) if self.env.render_mode == "ansi" else str(observation)

        def close(self) -> None:
            if hasattr(self, "env"):
                self.env.close()

    return GymnasiumEnvironment


def read_action(text: str, space: Any) -> Any:
    """Return the action that a text names; raise ``ValueError`` if it is none of the space."""
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        action: Any = text
    else:
        try:
            action = _read_value(json.loads(text), space)
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError):
            raise ValueError(f"{text.strip()[:50]!r} is not an action") from None
    if not space.contains(action):
        raise ValueError(f"{text.strip()[:50]!r} is not an action")
    return action


def _read_value(value: Any, space: Any) -> Any:
    """Return a JSON value in the form that a space has; raise what a lookup or numpy raises if it has no such form."""
    import numpy as np
    from gymnasium import spaces

    match space:
        case spaces.Discrete() | spaces.Text():
            return value
        case spaces.Dict():
            return {name: _read_value(value[name], subspace) for name, subspace in space.spaces.items()}
        case spaces.Tuple():
            return tuple(_read_value(item, subspace) for item, subspace in zip(value, space.spaces, strict=True))
    return np.asarray(value, getattr(space, "dtype", None))


def from_trl(
    factory: Callable[[], Any],
    *,
    rewards: Callable[..., Any] | Sequence[Callable[..., Any]] = (),
    prompt_column: str = "prompt",
) -> type[Environment]:
    """Return what TRL takes as ``environment_factory`` as an environment class.

    Its public methods are tools; the text that its ``reset`` returns for the row's columns is appended to the row's
    prompt, which is in ``prompt_column``. An episode's reward is that of ``get_reward``, if there is one, and of
    ``rewards``, TRL's reward functions with the parameter ``environments``; others belong under ``scoring.rewards``.
    Raises ``ConfigError`` if it has no ``reset``, or if one of the functions needs ``completions``.
    """
    name = getattr(factory, "__name__", str(factory))
    if not callable(factory) or not callable(getattr(factory(), "reset", None)):
        raise ConfigError(f"{name:.200} has no method reset, which TRL's environments have")
    functions = [rewards] if callable(rewards) else list(rewards)
    for function in functions:
        _check_trl_reward(function)

    class TrlEnvironment(Environment):
        def __init__(self) -> None:
            self.env = factory()
            self._columns: Mapping[str, Any] = {}

        async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
            self._columns = row
            prompt = row.get(prompt_column) or ""
            *before, last = as_messages(prompt, f"the row's {prompt_column!r}")
            added = await call_anywhere(self.env.reset, **row)
            if not (prompt or added):
                raise ValueError(
                    f"the row has no text in {prompt_column!r}, and reset returned none: set prompt_column"
                )
            return [*before, last if added is None else _with_text(last, added)]

        async def final_reward(self) -> float:
            get_reward = getattr(self.env, "get_reward", None)
            values = [] if get_reward is None else [await call_anywhere(get_reward)]
            lists = {column: [value] for column, value in self._columns.items() if column != prompt_column}
            for function in functions:
                arguments = {**lists, "prompts": [self._columns.get(prompt_column)], "environments": [self.env]}
                (reward,) = await call_anywhere(function, **arguments)
                values.append(reward)
            return sum(float(reward) for reward in values if reward is not None)  # None: it does not apply

        def tools(self) -> list[FunctionTool]:
            names = [name for name, _ in inspect.getmembers(type(self.env), predicate=inspect.isfunction)]
            return [
                FunctionTool(getattr(self.env, name))
                for name in names
                if name not in TRL_METHODS and not name.startswith("_")
            ]

    return TrlEnvironment


def _with_text(message: Mapping[str, Any], added: Any) -> dict[str, Any]:
    """Return a message with the text of an environment's ``reset`` after its own, which may be a list of parts."""
    content = message.get("content") or ""
    if not isinstance(added, str):
        raise TypeError(f"reset returned {added!r:.100}, which can't be appended to the prompt: return a text or None")
    addition: Any = added if isinstance(content, str) else [{"type": "text", "text": added}]
    return {**message, "content": content + addition}


def _check_trl_reward(function: Callable[..., Any]) -> None:
    name, parameters = getattr(function, "__name__", str(function)), inspect.signature(function).parameters
    needed = [entry for entry in ("completions", "completion_ids") if entry in parameters]
    if needed and parameters[needed[0]].default is inspect.Parameter.empty:
        raise ConfigError(
            f"from_trl: the reward function {name} needs {needed[0]}, which environments don't have: put it under "
            "scoring.rewards, where it gets no environments"
        )
    if "environments" not in parameters:
        raise ConfigError(f"from_trl: the reward function {name} takes no environments: put it under scoring.rewards")


class OpenEnvFailed(Exception):
    """Raised if a server can't be reached, ends, or reports an error; ``code`` is OpenEnv's for the latter."""

    def __init__(self, message: str, *, code: str = "") -> None:
        super().__init__(message)
        self.code = code


@dataclass(kw_only=True, slots=True, frozen=True)
class SessionAnswer:
    """A server's answer to a reset or a step, with the names that OpenEnv's clients give its parts."""

    observation: Any
    reward: float | None = None
    done: bool = False


def from_openenv(
    server: str | Callable[[], Any], *, show: ShowObservation | None = None, read: ReadAction | None = None
) -> type[Environment]:
    """Return the environment of an OpenEnv server as an environment class.

    ``server`` is its URL, or a function that returns a new client of OpenEnv, such as the class of an environment's
    client with its arguments. The policy sees the text of an observation that has no other field, or else its fields
    as JSON. It answers with the only field that an action needs, if that is a text, or else with the action as a JSON
    object. ``show(observation)`` and ``read(text)`` replace that; a client's own classes of actions need the latter.
    A row may have a ``seed``, and further options of ``reset`` in a column ``reset``. Raises ``ConfigError`` for
    anything else than a URL or such a function.
    """
    if isinstance(server, str):
        if not server.startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(f"from_openenv: {server!r:.200} is not the URL of an OpenEnv server")
    elif not callable(server):
        raise ConfigError(
            f"from_openenv: {server!r:.200} is neither the URL of a server nor a function that returns a client: each "
            "episode needs one of its own"
        )

    class OpenEnvEnvironment(Environment):
        def __init__(self) -> None:
            self._client = OpenEnvSession(server) if isinstance(server, str) else server()
            self._fields: Mapping[str, Any] = {}
            self._required: list[str] = []

        async def reset(self, row: Mapping[str, Any], seed: int) -> str:
            if read is None and isinstance(self._client, OpenEnvSession):
                self._fields, self._required = action_fields(await self._client.schema())
            options = {"seed": seed if row.get("seed") is None else row["seed"], **(row.get("reset") or {})}
            answer = await _awaited(self._client.reset(**options))
            return (show or show_observation)(answer.observation)

        async def step(self, action: str) -> Step:
            try:
                parsed_action = read(action) if read is not None else read_fields(action, self._fields, self._required)
            except ValueError as error:
                return Step(str(error))
            try:
                answer = await _awaited(self._client.step(parsed_action))
            except Exception as error:
                if not _is_wrong_action(error):
                    raise
                return Step(f"{action.strip()[:50]!r} is not an action: {error}")
            observed = (show or show_observation)(answer.observation)
            return Step(observed, reward=float(answer.reward or 0.0), done=bool(answer.done))

        async def close(self) -> None:
            await _awaited(self._client.close())

    return OpenEnvEnvironment


async def _awaited(value: Any) -> Any:
    """Return what a client's method gives: OpenEnv's clients are asynchronous, their wrappers are not."""
    return await value if inspect.isawaitable(value) else value


def _is_wrong_action(error: Exception) -> bool:
    """Return whether a server refused the form of an action; OpenEnv's clients have the code in the message only."""
    return getattr(error, "code", "") == WRONG_ACTION or f"(code: {WRONG_ACTION})" in str(error)


def show_observation(observation: Any) -> str:
    """Return an observation's only text, or its fields as JSON."""
    fields = observation.model_dump(mode="json") if hasattr(observation, "model_dump") else observation
    if isinstance(fields, Mapping):
        fields = {name: value for name, value in fields.items() if name not in OWN_FIELDS}
        if len(fields) == 1 and isinstance(only := next(iter(fields.values())), str):
            return only
    return json.dumps(fields, default=str)


def action_fields(schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the fields of an environment's actions by their names, and the names of those that have no default."""
    action = schema.get("action") or {}
    fields = {name: field for name, field in action.get("properties", {}).items() if name not in OWN_FIELDS}
    return fields, [name for name in action.get("required", []) if name in fields]


def read_fields(text: str, fields: Mapping[str, Any], required: list[str]) -> dict[str, Any]:
    """Return the action that a text means: of its only required field, if that is a text, or as a JSON object."""
    if len(required) == 1 and fields[required[0]].get("type") == "string":
        return {required[0]: text}
    try:
        action = json.loads(text)
    except (ValueError, RecursionError):
        action = None
    if isinstance(action, dict):
        return action
    names = ", ".join(f"{name} ({field.get('type', 'any')})" for name, field in fields.items())
    suffix = f" with the fields {names}" if names else ""
    raise ValueError(f"{text.strip()[:50]!r} is not an action; actions are JSON objects{suffix}")


class OpenEnvSession:
    """A session on a server, which begins with the first request."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/").replace("ws", "http", 1) if url.startswith("ws") else url.rstrip("/")
        self._http: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._messages: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue(MAX_UNREAD)
        self._reading: asyncio.Task[None] | None = None

    async def schema(self) -> Mapping[str, Any]:
        """Return the JSON schemas of actions and observations."""
        try:
            async with self._opened().get(f"{self._url}/schema") as answer:
                answer.raise_for_status()
                schema = await answer.json()
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._fail(f"it gives no schema of its actions: {error!r}", error)
        return schema if isinstance(schema, Mapping) else {}

    async def reset(self, **options: Any) -> SessionAnswer:
        return await self._exchange("reset", options)

    async def step(self, action: Mapping[str, Any]) -> SessionAnswer:
        return await self._exchange("step", action)

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.wait([self._reading])
        if self._socket is not None and not self._socket.closed:
            await self._socket.send_json({"type": "close"})
            await self._socket.close()
        if self._http is not None:
            await self._http.close()

    def _opened(self) -> aiohttp.ClientSession:
        if self._http is None:
            limit = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S)
            self._http = aiohttp.ClientSession(timeout=limit)
        return self._http

    async def _read(self, connection: aiohttp.ClientWebSocketResponse) -> None:
        """Read what the server sends also while the policy has its turn: only then its pings are answered."""
        while True:
            message = await connection.receive()
            await self._messages.put(message)
            if message.type is not aiohttp.WSMsgType.TEXT:
                return

    async def _exchange(self, kind: str, data: Mapping[str, Any]) -> SessionAnswer:
        try:
            if self._socket is None:
                self._socket = await self._opened().ws_connect(f"{self._url}/ws", max_msg_size=MAX_MESSAGE_BYTES)
                self._reading = asyncio.create_task(self._read(self._socket))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            self._fail(f"it can't be reached: {error!r}", error)
        with suppress(ConnectionError):  # a server without a free session sends an error and closes at once
            await self._socket.send_json({"type": kind, "data": dict(data)})
        if self._reading is not None and self._reading.done() and self._messages.empty():
            self._fail(f"the connection broke before it was asked to {kind}")
        message = await self._messages.get()
        if message.type is not aiohttp.WSMsgType.TEXT:
            self._fail(f"the connection broke before it answered to {kind}")
        try:
            answer = json.loads(message.data)
            payload = answer["data"]
            if answer["type"] == "error":
                self._refuse(payload)
            return SessionAnswer(
                observation=payload["observation"], reward=payload.get("reward"), done=payload.get("done", False)
            )
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            self._fail(f"its answer to {kind} is not in the form of OpenEnv: {message.data!r:.100}", error)

    def _refuse(self, payload: Mapping[str, Any]) -> NoReturn:
        code, message = str(payload.get("code", "")), str(payload.get("message", ""))
        if code == WRONG_ACTION:
            errors = [error for error in payload.get("errors") or () if isinstance(error, Mapping)]
            problems = [f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in errors]
            raise OpenEnvFailed("; ".join(problems)[:MAX_SHOWN_CHARS] or message[:MAX_SHOWN_CHARS], code=code)
        fix = "; raise max_concurrent_envs there, or lower environment.concurrency" if code == CAPACITY else ""
        self._fail(f"{message}{fix} ({code})")

    def _fail(self, message: str, error: Exception | None = None) -> NoReturn:
        text = printable(" ".join(message.split()))[:MAX_SHOWN_CHARS]
        raise OpenEnvFailed(f"OpenEnv at {without_password(self._url)}: {text}") from error

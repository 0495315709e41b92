"""Process that has imported a run's environment, tools or agent, and forks others for episodes and calls of tools.

It has one thread, so that it may fork. What it forks stays until its episode ends, is watched as a sandboxed call is,
and ends with all that it started.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import math
import os
import pickle
import signal
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from rlpipe.common.imports import describe_error, enter_folder
from rlpipe.common.temporary_folders import remove_folder
from rlpipe.configs.schema.rollout_config import EnvironmentConfig
from rlpipe.episodes.load_environment import EpisodeKind, import_kind
from rlpipe.episodes.tools import Environment, InvalidArguments, Step, Tool, as_step, as_text, cut_off, uncancelled
from rlpipe.errors import InputError
from rlpipe.scoring.processes import MemoryLimit
from rlpipe.scoring.sandbox.call_runner import CallRunner, raise_priority
from rlpipe.scoring.sandbox.sandbox_child import Limits
from rlpipe.scoring.sandbox.sandbox_server import try_confinement

CHECK_S = 5.0
"""Seconds between two checks of an episode's processes and their memory."""
MAX_START_BYTES = 4096
MAX_REASON_CHARS = 500
END_S = 10.0
"""Seconds beyond its time limit after which an episode's process is ended, whatever it does."""


@dataclass(kw_only=True, frozen=True)
class HostSetup:
    """Settings of a host; ``folder`` is the run's working directory, ``scratch`` has its temporary files."""

    config: EnvironmentConfig
    max_outage_s: float
    """Seconds for which an episode's deadline may be paused, while an engine is replaced."""
    folder: str
    scratch: str


class IsolatedHost:
    """A server of a config's environment, tools or agent, each object in a process of its own."""

    def __init__(self, setup: HostSetup) -> None:
        config = self._config = setup.config
        self._max_outage_s = setup.max_outage_s
        self._scratch = setup.scratch
        enter_folder(setup.folder)
        self._kind = import_kind(config)
        self.schemas = self._kind.environment_schemas

    def run(self, starts: socket.socket) -> None:
        """Fork a process for each start that comes in, until the other side ends."""
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps its children
        gc.collect()
        gc.freeze()
        while True:
            started, fds, _, _ = socket.recv_fds(starts, MAX_START_BYTES, 2)
            if not started:
                return
            try:
                is_child = os.fork() == 0
            except OSError as error:  # the machine has no process or memory left: one call fails, the others go on
                _tell_end(os.dup(fds[0]), f"no process could be started for it: {error.strerror}")
                is_child = False
            if is_child:
                starts.close()
                self._watch(*fds, tool=json.loads(started))
            for fd in fds:
                os.close(fd)

    def _watch(self, control: int, link: int, *, tool: str | None) -> NoReturn:
        """Run one object's process until it ends or is not wanted any more, and tell why it ended."""
        config = self._config
        time_s = config.timeout_s + self._max_outage_s if tool is None else config.tool_timeout_s
        is_confined = config.isolation == "sandbox"
        limits = Limits(
            # Without a sandbox it serves many episodes, and the process that plays ends it if one takes too long.
            timeout_s=time_s + config.tool_timeout_s + END_S if is_confined else math.inf,
            memory=None if config.memory_gb is None else MemoryLimit(option="memory_gb", gb=config.memory_gb),
            is_confined=is_confined,
        )
        try:
            with Connection(control) as connection:
                runner = CallRunner(connection, self._scratch)
                if is_confined:
                    raise_priority()
                job = pickle.dumps((None, {"link": link, "tool": tool}))
                reason, written = runner.run(self._serve, job, limits, kept_fds=[link], check_s=CHECK_S)
                connection.send_bytes(json.dumps(reason or _failure(written)).encode())
        except (EOFError, OSError):
            pass  # nobody waits for it
        finally:
            os._exit(0)

    def _serve(self, link: int, tool: str | None) -> None:
        with Connection(link) as connection, asyncio.Runner() as runner, suppress(EOFError):
            runner.run(_answer_all(connection, ServedObject(self._kind, tool)))


def _failure(written: bytes) -> str | None:
    """Return what ended a process from within, such as ``sys.exit``; what it wrote may be anything."""
    with suppress(ValueError, RecursionError):
        match json.loads(written):
            case {"failure": str(reason)}:
                return " ".join(reason.split())[:MAX_REASON_CHARS]
    return None


def _tell_end(control: int, reason: str) -> None:
    """Tell the player why a process has ended, or did not begin."""
    with suppress(OSError), Connection(control) as connection:  # nobody may wait for it any more
        connection.send_bytes(json.dumps(reason).encode())


async def _answer_all(connection: Connection, served: ServedObject) -> NoReturn:
    """Answer calls one by one; tasks that the object has started run on between calls."""
    called = asyncio.Event()
    asyncio.get_running_loop().add_reader(connection.fileno(), called.set)
    while True:
        called.clear()
        if not connection.poll():  # the loop may set the event once more for a call that is read already
            await called.wait()
            continue
        name, arguments = connection.recv()
        answer = await served.answer(name, arguments)
        connection.send_bytes(_as_json(answer))


def _as_json(answer: Mapping[str, Any]) -> bytes:
    """Return an answer as JSON, or what is wrong with its value, such as keys that are no strings."""
    try:
        return json.dumps(answer, default=str).encode()
    except Exception as error:  # noqa: BLE001 - a user's object may have a __str__ that raises anything
        return json.dumps({"raised": f"what it returned can't be sent as JSON: {describe_error(error)}"}).encode()


class ServedObject:
    """An environment with its tools, a tool or an agent, whose methods another process calls.

    Each reset makes another environment.
    """

    def __init__(self, kind: EpisodeKind, tool: str | None) -> None:
        self._kind = kind
        self._environment: Environment | None = None
        self._tools: dict[str, Tool] = {candidate.name: candidate for candidate in kind.tools if candidate.name == tool}

    async def answer(self, name: str, arguments: tuple[Any, ...]) -> dict[str, Any]:
        """Return the value of a method, or what it raised, as JSON."""
        try:
            if name == "call":
                tool, call_arguments = arguments
                value = await self._tools[tool].call(call_arguments)
                answer = _as_result(value)
                # An environment may still wait for processes that it has started, and reap them itself.
                return answer if self._environment is not None else answer | {"is_alone": _is_alone()}
            if name == "run" and self._kind.agent is not None:
                return {"value": _plain(await self._kind.agent.run(*arguments)), "is_alone": _is_alone()}
            if name == "close" and self._environment is None:  # it could not be made
                return {"is_alone": _is_alone()}
            if name == "reset":
                self._environment = self._kind.make()
                self._tools = {
                    environment_tool.name: environment_tool for environment_tool in self._environment.tools()
                }
            value = getattr(self._environment, name)(*arguments)
            if inspect.isawaitable(value):
                value = await uncancelled(value)
            if name == "step":
                as_step(value)
            if name == "close":
                self._environment, self._tools = None, {}
                return {"is_alone": _is_alone()}
            return {"value": _plain(value)}
        except InvalidArguments as error:
            return {"invalid": str(error)}
        except Exception as error:  # noqa: BLE001 - a user's code raises anything
            return {"raised": describe_error(error)}


def _as_result(value: Any) -> dict[str, Any]:
    """Return what a tool returned, with a text that is cut off already here: a long one would end the process."""
    if not isinstance(value, Step):
        return {"text": cut_off(as_text(value))}
    return {"value": _plain(replace(value, observation=cut_off(as_text(value.observation))))}


def _plain(value: Any) -> Any:
    """Return what a method returned with Python's own numbers, since JSON has no others, such as numpy's."""
    if isinstance(value, Step):
        return {"observation": value.observation, "reward": float(value.reward), "done": bool(value.done)}
    if isinstance(value, Mapping):
        return {key: _plain(entry) for key, entry in value.items()}
    return value.item() if hasattr(value, "item") else value


def _is_alone() -> bool:
    """Return whether this process has no children, after reaping those that have ended."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return True
    return False


def main() -> None:
    starts = socket.socket(fileno=int(sys.argv[1]))
    setup: HostSetup = pickle.loads(starts.recv(2**20))
    try:
        obstacle = try_confinement() if setup.config.isolation == "sandbox" else None
        if obstacle is not None:
            starts.send(json.dumps({"obstacle": obstacle}).encode())
            return
        host = IsolatedHost(setup)
        starts.send(json.dumps({"schemas": host.schemas}).encode())
        host.run(starts)
    except InputError as error:
        starts.send(json.dumps({"wrong": str(error)}).encode())
    finally:
        remove_folder(setup.scratch)


if __name__ == "__main__":
    main()

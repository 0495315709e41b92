"""Environments, tools and agents in processes of their own, so that one that hangs or crashes costs nothing else.

Starting a process takes tens of milliseconds, so that it serves one episode after the other, outside of a sandbox.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from rlpipe.common.imports import RelayedError, describe_error
from rlpipe.common.temporary_folders import ScratchFolder
from rlpipe.configs.schema.rollout_config import EnvironmentConfig
from rlpipe.episodes.agents import EndpointAccess, FunctionAgent, Reward
from rlpipe.episodes.isolated_host import HostSetup
from rlpipe.episodes.load_environment import EpisodeKind
from rlpipe.episodes.parsing import MAX_CALLS
from rlpipe.episodes.tools import Environment, InvalidArguments, LimitedTool, Observation, Step, Tool
from rlpipe.errors import ConfigError
from rlpipe.scoring.processes import run_server

LENGTH = struct.Struct("!i")
"""Length ahead of a request or answer, as in ``multiprocessing.connection``."""
START_TIMEOUT_S = 300.0
STARTS = 3
"""Starts of a process, each of which may meet an accident, before its death counts as the config's fault."""
MAX_ANSWER_BYTES = 2**24
MAX_SETUP_BYTES = 2**22
REASON_S = 1.0
"""Seconds to wait for the reason why a process has ended."""


class ProcessEnded(RelayedError):
    """Raised for a call of an object whose process has ended; the message is the reason."""


class MethodRaised(RelayedError):
    """Raised for what a method raised in its process; the message is the error."""


def isolate(kind: EpisodeKind, config: EnvironmentConfig, *, max_outage_s: float = 0.0) -> EpisodeKind:
    """Return a kind whose environments and functions run in processes of their own, as ``environment.isolation`` says.

    Time in which no engine answers, up to ``max_outage_s``, does not count against an episode's limit. Raises
    ``ConfigError`` if this machine can't isolate them so.
    """
    is_function = isinstance(kind.agent, FunctionAgent)
    if config.isolation == "thread" or not (config.path is not None or kind.tools or is_function):
        return kind
    isolation = Isolation(config, max_outage_s)
    return replace(
        kind,
        make=isolation.make_environment if config.path is not None else kind.make,
        tools=[isolation.isolate(tool) for tool in kind.tools],
        agent=IsolatedAgent(isolation) if is_function else kind.agent,
    )


class Isolation:
    """Processes for the environments and tools of a config; raises ``ConfigError`` if they can't be had."""

    def __init__(self, config: EnvironmentConfig, max_outage_s: float = 0.0) -> None:
        self._config, self._max_outage_s = config, max_outage_s
        self._idle: dict[str | None, list[ObjectLink]] = {}
        """Processes without an episode or call, by the tool that they serve."""
        self._restarts = threading.Lock()
        self._start()

    def make_environment(self) -> Environment:
        return IsolatedEnvironment(self, self._schemas)

    def isolate(self, tool: Tool) -> Tool:
        """Return a tool each of whose calls has a process of its own, as many as a turn has calls at most, or more.

        All episodes that are played may call it, many times in every turn.
        """
        num_slots = max(self._config.concurrency, MAX_CALLS)
        return LimitedTool(IsolatedTool(self, tool.schema), asyncio.Semaphore(num_slots))

    async def open(self, tool: str | None = None) -> ObjectLink:
        """Return an idle process, or start one, for an episode's environment or a call of a tool."""
        idle, loop = self._idle.get(tool, []), asyncio.get_running_loop()
        while idle:
            link = idle.pop()
            if link.loop is not loop:
                continue
            if link.is_alive and link.host is self._host:
                return link
            link.close()
        parent_end, child_end = socket.socketpair()
        control, child_control = socket.socketpair()
        with child_end, child_control:
            fds, host = [child_control.fileno(), child_end.fileno()], self._host
            try:
                host.fork(tool, fds)
            except OSError:  # the host has died, of what a user's code did at its import or of a lack of memory
                await asyncio.to_thread(self._replace, host)
                host = self._host
                host.fork(tool, fds)
        return ObjectLink(parent_end, control, loop, host)

    async def ask_once(self, tool: str | None, name: str, *arguments: Any) -> dict[str, Any]:
        """Return the answer of a method in a process that does nothing else meanwhile."""
        link = await self.open(tool)
        is_alone = False
        try:
            answer = await link.ask(name, *arguments)
            is_alone = bool(answer.get("is_alone"))
        finally:
            self.release(link, tool, is_alone=is_alone)
        return answer

    def release(self, link: ObjectLink, tool: str | None = None, *, is_alone: bool = False) -> None:
        """Keep a process for the next episode or call, or end it; one in a sandbox serves no other.

        A process that is not alone has started others, which end with it.
        """
        is_fit = is_alone and not link.has_ended and link.host is self._host
        if is_fit and self._config.isolation == "process":
            self._idle.setdefault(tool, []).append(link)
        else:
            link.close()

    def close(self) -> None:
        """End the host, and with it all processes that it has forked."""
        self._host.close()

    def _replace(self, host: _IsolatedHost) -> None:
        """Start another host in place of a dead one, unless another thread has."""
        with self._restarts:
            if self._host is host:
                host.close()
                self._start()

    def _start(self) -> None:
        """Start a host; nothing sees it before it has imported its modules."""
        for _ in range(STARTS):
            host = _IsolatedHost(self._config, self._max_outage_s)
            report = host.start()
            if "schemas" in report:
                self._host, self._schemas = host, report["schemas"]
                return
            host.close()
            if report:
                break
        isolation = f"environment.isolation={self._config.isolation}"
        if "obstacle" in report:
            raise ConfigError(f"{isolation} can't be used on this machine: {report['obstacle']}; set process")
        silent = f"its process died at {STARTS} starts; its output says why"
        raise ConfigError(f"{isolation}: {report.get('wrong', silent)}")


class _IsolatedHost:
    """The process that has imported an environment and tools, and forks one for each episode or call."""

    def __init__(self, config: EnvironmentConfig, max_outage_s: float) -> None:
        self._config, self._max_outage_s = config, max_outage_s
        self.scratch = ScratchFolder("rlpipe-episodes-")
        self.process, self._socket = run_server("rlpipe.episodes.isolated_host", kind=socket.SOCK_SEQPACKET)

    def start(self) -> dict[str, Any]:
        """Wait for the import, and return what the host says of it; nothing if it died."""
        setup = HostSetup(
            config=self._config, max_outage_s=self._max_outage_s, folder=os.getcwd(), scratch=self.scratch.path
        )
        self._socket.settimeout(START_TIMEOUT_S)
        try:
            self._socket.send(pickle.dumps(setup))
            report: dict[str, Any] = json.loads(self._socket.recv(MAX_SETUP_BYTES) or b"{}")
        except TimeoutError:
            report = {"wrong": f"it took longer than {START_TIMEOUT_S:g} seconds to import"}
        except OSError:
            report = {}
        self._socket.settimeout(None)
        return report

    def fork(self, tool: str | None, fds: Sequence[int]) -> None:
        """Have a process forked for a tool or the environment; raise ``OSError`` if the host has died."""
        socket.send_fds(self._socket, [json.dumps(tool).encode()], fds)

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self._socket.close()
        self.process.kill()
        self.process.wait()
        self.scratch.close()


class ObjectLink:
    """A connection to one object in another process, whose methods are called one at a time; for one event loop.

    A call that is cancelled ends the process, since it may hang.
    """

    def __init__(
        self, link: socket.socket, control: socket.socket, loop: asyncio.AbstractEventLoop, host: _IsolatedHost
    ) -> None:
        self.loop, self.host = loop, host
        self._socket, self._control = link, Connection(control.detach())
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._one_at_a_time = asyncio.Lock()
        self._end: str | None = None
        self.timed_out = False
        """Whether a call was cancelled, which has ended the process."""

    async def ask(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Return a method's answer; raise ``ProcessEnded``, ``MethodRaised`` or ``InvalidArguments``."""
        async with self._one_at_a_time:
            if self._end is not None:
                raise ProcessEnded(self._end)
            try:
                answer = await self._exchange(pickle.dumps((name, arguments)))
            except asyncio.CancelledError:
                self.timed_out = True
                self.close("its process was ended, because a call took too long")
                raise
            except ValueError as error:
                self.close(f"its process wrote {error}")
                raise ProcessEnded(f"its process wrote {error}") from None
            except (OSError, EOFError) as error:
                reason = f"its process ended ({describe_error(error)})"
                try:
                    reason = await asyncio.to_thread(self._reason) or reason
                finally:
                    self.close(reason)
                raise ProcessEnded(reason) from None
        if "invalid" in answer:
            raise InvalidArguments(answer["invalid"])
        if "raised" in answer:
            raise MethodRaised(answer["raised"])
        return answer

    @property
    def has_ended(self) -> bool:
        return self._end is not None

    @property
    def is_alive(self) -> bool:
        """Whether an idle process can serve: it tells when it ends, and lives seconds at most without its host."""
        return self._end is None and self.host.is_alive and not self._control.poll()

    def close(self, reason: str = "its process was ended") -> None:
        """End the process, with all that it has started."""
        self._end = self._end or reason
        if self._streams is not None:
            self._streams[1].close()
        self._socket.close()
        self._control.close()

    async def _exchange(self, request: bytes) -> dict[str, Any]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(sock=self._socket)
        reader, writer = self._streams
        writer.write(LENGTH.pack(len(request)) + request)
        await writer.drain()
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if not 0 <= length <= MAX_ANSWER_BYTES:
            raise ValueError(f"an answer of {length} bytes")
        answer = json.loads(await reader.readexactly(length))
        if not isinstance(answer, dict):
            raise ValueError("an invalid answer")
        return answer

    def _reason(self) -> str:
        """Return why the process has ended, if that is known."""
        try:
            reason = json.loads(self._control.recv_bytes()) if self._control.poll(REASON_S) else None
        except (OSError, EOFError, ValueError):
            return ""
        return str(reason or "")


class IsolatedEnvironment(Environment):
    """An environment in a process of its own."""

    def __init__(self, isolation: Isolation, schemas: list[dict[str, Any]]) -> None:
        self._isolation, self._schemas = isolation, schemas
        self._link: ObjectLink | None = None

    async def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        self._link = self._link or await self._isolation.open()
        observation: Observation = (await self._link.ask("reset", dict(row), seed))["value"]
        return observation

    async def step(self, action: str) -> Step:
        return _as_step(await self.ask("step", action))

    @property
    def call_timed_out(self) -> bool:  # type: ignore[override]
        return self._link is not None and self._link.timed_out

    async def final_reward(self) -> float:
        if self._link is None or self._link.timed_out:  # one that ended in another way fails the episode
            return 0.0
        return float((await self.ask("final_reward"))["value"])

    def tools(self) -> Sequence[Tool]:
        return [_MethodTool(self, schema) for schema in self._schemas]

    async def ask(self, name: str, *arguments: Any) -> dict[str, Any]:
        """Return a method's answer, after ``reset``; raise as ``ObjectLink.ask`` does."""
        if self._link is None:
            raise ProcessEnded("it has not begun")
        return await self._link.ask(name, *arguments)

    async def close(self) -> None:
        if self._link is None:
            return
        is_alone = False
        try:
            if not self._link.has_ended:
                is_alone = bool((await self._link.ask("close")).get("is_alone"))
        finally:
            self._isolation.release(self._link, is_alone=is_alone)


class _MethodTool:
    def __init__(self, environment: IsolatedEnvironment, schema: dict[str, Any]) -> None:
        self._environment, self.schema = environment, schema
        self.name: str = schema["function"]["name"]

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        return _as_value(await self._environment.ask("call", self.name, dict(arguments)))


class IsolatedTool:
    """A function as a tool, each call in a process that does nothing else meanwhile."""

    def __init__(self, isolation: Isolation, schema: dict[str, Any]) -> None:
        self._isolation, self.schema = isolation, schema
        self.name: str = schema["function"]["name"]

    async def call(self, arguments: Mapping[str, Any]) -> Any:
        answer = await self._isolation.ask_once(self.name, "call", self.name, dict(arguments))
        return _as_value(answer)


class IsolatedAgent:
    """A function as an agent, each episode in a process that plays no other meanwhile."""

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation

    async def run(self, row: Mapping[str, Any], access: EndpointAccess) -> Reward:
        answer = await self._isolation.ask_once(None, "run", dict(row), access)
        reward: Reward = answer["value"]
        return reward


def _as_value(answer: Mapping[str, Any]) -> Any:
    return _as_step(answer) if "value" in answer else answer["text"]


def _as_step(answer: Mapping[str, Any]) -> Step:
    return Step(**answer["value"])

"""Programs that play episodes against the run's gateway: a Python function, a command, or agents of NeMo Gym.

The agents play by HTTP: a row names the agent, whose ``/run`` gives the reward. They ask the run's policy through
a model server of NeMo Gym, which has one key for all of them. So the key of an episode travels in the field ``user`` of
each request, which NeMo Gym passes on.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import httpx
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpipe.common.formatting import printable
from rlpipe.common.imports import import_object
from rlpipe.common.temporary_folders import ScratchFolder, remove_folder
from rlpipe.episodes.tools import call_anywhere
from rlpipe.errors import ConfigError
from rlpipe.scoring.http import JsonClient, RequestFailed
from rlpipe.scoring.nemo_gym import CREATE_PARAMS, reward_of, row_as_json
from rlpipe.scoring.processes import (
    CHILD_MARK,
    PROC,
    clock_ticks,
    end_processes,
    find_survivors,
    process_ids,
    read_processes,
)

Reward = float | Mapping[str, float] | None
"""Reward of an episode, or rewards of answers by their ids; None if reward functions score it."""
KEPT_VARIABLES = ("PATH", "LANG", "LC_ALL", "PYTHONPATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", CHILD_MARK)
"""Variables of the run's environment that a command inherits."""
MAX_OUTPUT_BYTES = 2**20
KEY_VARIABLE = "OPENAI_API_KEY"
"""Variable with an episode's key, by which processes of a command are known that have left its session."""
KEY_HEADER = "x-rlpipe-key"
"""Header for an episode's key, for programs whose requests have another key, or none, as theirs."""
END_S = 5.0
"""Seconds in which a command's output ends once its processes are killed."""
CONFIG_PATH = "/global_config_dict_yaml"
"""Path at which a head server gives the addresses of all servers."""
AGENTS_KEY = "responses_api_agents"
HEAD_TIMEOUT_S = 30.0


@dataclass(kw_only=True, slots=True, frozen=True)
class EndpointAccess:
    """Address and key by which a program asks the policy during one episode."""

    base_url: str
    """URL of the gateway, for ``OPENAI_BASE_URL``."""
    api_key: str


class Agent(Protocol):
    """A program that plays episodes against the gateway."""

    async def run(self, row: Mapping[str, Any], access: EndpointAccess) -> Reward:
        """Play an episode, and return its reward; raises anything."""


class FunctionAgent:
    """A function ``solve(row, episode)``, or a coroutine function; a function runs in a thread."""

    def __init__(self, path: str) -> None:
        self._function = import_object(path, what="environment.agent", error=ConfigError)
        if not callable(self._function):
            raise ConfigError(f"environment.agent: {path} is not a function")

    async def run(self, row: Mapping[str, Any], access: EndpointAccess) -> Reward:
        reward: Reward = await call_anywhere(self._function, row, access)
        return reward


class AgentFailed(Exception):
    """Raised if a command ends with an error; the message has the end of what it wrote."""


class CommandAgent:
    """A command that gets the row as JSON on standard input, and the gateway in ``OPENAI_BASE_URL`` and ``_API_KEY``.

    Its reward is the last line of its output, if that is a number, a truth value or an object by ids of answers. It
    runs in a session of its own, with few variables and a temporary folder as its home. When it has ended, or takes
    too long, all that it has started is killed; a process that leaves its session and drops the episode's key from its
    environment is missed.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Make the agent; raise ``ConfigError`` if there is no such program, or it may not be executed."""
        self._command = list(command)
        if shutil.which(self._command[0]) is None:
            raise ConfigError(
                f"environment.agent: there is no executable program {self._command[0]}, which the command begins with"
            )
        self._folder = ScratchFolder("rlpipe-agent-")

    async def run(self, row: Mapping[str, Any], access: EndpointAccess) -> Reward:
        folder = tempfile.mkdtemp(dir=self._folder.path)
        try:
            return await self._run(row, access, folder)
        finally:
            await asyncio.to_thread(remove_folder, folder)  # it may hold gigabytes

    async def _run(self, row: Mapping[str, Any], access: EndpointAccess, folder: str) -> Reward:
        row_as_json = json.dumps(dict(row), default=str).encode()
        unrelated = EarlierProcesses()
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_variables(access, folder),
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stderr is not None
        output, errors = bytearray(), bytearray()
        reading = asyncio.gather(_read(process.stdout, output), _read(process.stderr, errors))
        mark = f"{KEY_VARIABLE}={access.api_key}"
        sending = asyncio.ensure_future(_send(process, row_as_json))
        try:
            await _has_ended(process)  # it may end without reading its row
        finally:
            sending.cancel()
            await asyncio.to_thread(_end_all, process.pid, mark, unrelated)
        with suppress(TimeoutError):  # a process that is missed may hold the pipes open
            async with asyncio.timeout(END_S):
                await reading
                await process.wait()
        code = process.returncode
        if code != 0:
            lines = errors.decode(errors="replace").strip().splitlines() or ["it wrote no error"]
            raise AgentFailed(f"{self._command[0]} ended with exit code {code}: {printable(lines[-1])[:500]}")
        return read_reward(output.decode(errors="replace"))


def read_reward(output: str) -> Reward:
    """Return the reward in the last line of a command's output, or None if there is none.

    It is a number, an object of numbers, or a truth value as JSON or Python writes it.
    """
    last = next(reversed(output.strip().splitlines()), "")
    if last in ("True", "False"):
        return last == "True"
    try:
        value = json.loads(last)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, int | float | dict) else None


def _variables(access: EndpointAccess, folder: str) -> dict[str, str]:
    inherited = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    episode_variables = {
        "OPENAI_BASE_URL": access.base_url,
        KEY_VARIABLE: access.api_key,
        "HOME": folder,
        "TMPDIR": folder,
    }
    return {**inherited, **episode_variables, "NO_PROXY": "127.0.0.1,localhost", "PYTHONDONTWRITEBYTECODE": "1"}


async def _send(process: asyncio.subprocess.Process, row: bytes) -> None:
    assert process.stdin is not None
    with suppress(ConnectionError):  # the command may end without reading its row
        process.stdin.write(row)
        await process.stdin.drain()
        process.stdin.close()


async def _has_ended(process: asyncio.subprocess.Process) -> None:
    """Wait until the command itself has ended; ``wait`` would wait for all that hold its pipes open, too."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    try:
        end = os.pidfd_open(process.pid)
    except ProcessLookupError:  # it has been reaped already
        return
    except (AttributeError, OSError):  # another system, an old kernel, or a sandbox that forbids it
        await process.wait()
        return
    loop.add_reader(end, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(end)
        os.close(end)


async def _read(stream: asyncio.StreamReader, tail: bytearray) -> None:
    """Read a stream to its end, and keep its last bytes."""
    while chunk := await stream.read(2**16):
        tail += chunk
        del tail[:-MAX_OUTPUT_BYTES]


class EarlierProcesses:
    """The processes that ran before a program was started, which is not their parent."""

    def __init__(self) -> None:
        self._pids, self._began = process_ids(), clock_ticks()

    def find(self) -> set[int]:
        """Return the ids of those that still run; an id that was used again since then is another process's."""
        return {pid for pid, process in read_processes(self._pids).items() if process.started < self._began}


def _end_all(pid: int, mark: str, unrelated: EarlierProcesses) -> None:
    """Kill what a command has started: its session, processes with its mark, and their descendants."""
    if not PROC.is_dir():  # without /proc only its session can be found
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    end_processes(partial(find_survivors, pid, mark, unrelated.find()))


class GymAgent:
    """The agents of one NeMo Gym installation, by the URL of its head server.

    ``agent_ref.name`` of a row names the agent, otherwise ``name``. A run that can't be answered fails the episode; it
    is not repeated, as its turns were sampled already. Its time limit is the episode's.
    """

    def __init__(self, url: str, *, name: str, concurrency: int) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"environment.agent: {url!r:.200} is not the URL of NeMo Gym's head server")
        self._url, self._name, self._concurrency = url.rstrip("/"), name, concurrency
        self._clients: dict[str, JsonClient] = {}

    async def run(self, row: Mapping[str, Any], access: EndpointAccess) -> Reward:
        named = row.get("agent_ref")
        name = str(named.get("name", self._name)) if isinstance(named, Mapping) else self._name
        client = self._clients.get(name)
        if client is None:
            client = self._clients[name] = await self._client(name)
        try:
            return await client.post("/run", run_request(row, access), reward_of)
        except RequestFailed:
            if self._clients.get(name) is client:
                del self._clients[name]  # it may have started anew, at another address
            raise

    async def _client(self, name: str) -> JsonClient:
        agents = read_agents(await self._servers())
        if name not in agents:
            problem = (
                f"there is no agent {name!r:.100}" if name else "no agent is named, by agent_ref of the row or by name"
            )
            raise AgentFailed(f"NeMo Gym at {self._url}: {problem}; it has {', '.join(sorted(agents)) or 'none'}")
        return JsonClient(agents[name], timeout_s=None, retries=0, concurrency=self._concurrency)

    async def _servers(self) -> str:
        try:
            async with httpx.AsyncClient(timeout=HEAD_TIMEOUT_S) as client:
                response = await client.get(f"{self._url}{CONFIG_PATH}")
                response.raise_for_status()
        except httpx.HTTPError as error:
            raise AgentFailed(f"NeMo Gym's head server at {self._url} does not answer: {error!r:.300}") from error
        return response.text


def read_agents(text: str) -> dict[str, str]:
    """Return the URLs of agents by their names, from what a head server answers: YAML, or that in a JSON string."""
    try:
        entries = yaml.safe_load(text)
        entries = yaml.safe_load(entries) if isinstance(entries, str) else entries
        config, agents = OmegaConf.create(entries), {}
        for name, entry in entries.items():
            for kind in (entry.get(AGENTS_KEY) or {}) if isinstance(entry, dict) else {}:
                server = config[name][AGENTS_KEY][kind]  # resolves references
                agents[str(name)] = f"http://{server.host}:{server.port}"
    except (yaml.YAMLError, OmegaConfBaseException, AttributeError, TypeError, ValueError) as error:
        raise AgentFailed(f"NeMo Gym's head server gives no list of servers: {printable(str(error))[:200]}") from error
    return agents


def run_request(row: Mapping[str, Any], access: EndpointAccess) -> dict[str, Any]:
    """Return the body of a ``/run`` request: the row, whose model requests have the episode's key as ``user``.

    A row without ``responses_create_params`` gets them from its column ``prompt``.
    """
    params = row.get(CREATE_PARAMS) or {"input": row.get("prompt")}
    return {**row_as_json(row), CREATE_PARAMS: {**params, "user": access.api_key}}

"""Tools that need no code of the user: those of MCP servers, and one that runs Python programs of the policy.

Each MCP server is a command that an episode starts and ends. The Python tool needs ``environment.isolation=sandbox``.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jsonschema.exceptions import ValidationError, best_match
from jsonschema.validators import validator_for

from rlpipe.episodes.agents import EarlierProcesses
from rlpipe.episodes.tools import InvalidArguments, Tool, as_text
from rlpipe.errors import ConfigError
from rlpipe.scoring.processes import CHILD_MARK, end_processes, find_survivors
from rlpipe.scoring.remote_program import end_program, start_program

if TYPE_CHECKING:
    from mcp import Client

MAX_PRINTED_BYTES = 2**18
SERVER_MARK = "RLPIPE_MCP_SERVER"
"""Variable by which the processes of one server are known."""
NO_PROCESS_GROUP = -1


class ServerToolFailed(Exception):
    """Raised if a server reports an error as a call's result; the message is that error."""


@dataclass(kw_only=True, slots=True, frozen=True)
class McpServer:
    """Command of a server that speaks MCP over its standard input and output."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables of its environment, in addition to the few that every server gets."""

    @classmethod
    def parse(cls, entry: Mapping[str, Any]) -> McpServer:
        """Read an entry ``{mcp: {command: [...], env: {...}}}`` of the config; raise ``ConfigError``."""
        settings = entry.get("mcp") if set(entry) == {"mcp"} else None
        command, env = (
            (settings.get("command"), settings.get("env", {})) if isinstance(settings, Mapping) else (None, {})
        )
        is_command = isinstance(command, Sequence) and not isinstance(command, str) and len(command) > 0
        if not is_command or not isinstance(env, Mapping) or set(settings or ()) - {"command", "env"}:
            raise ConfigError(
                f"environment.tools: {dict(entry)!r:.200} is neither file.py:function nor "
                "{mcp: {command: [program, argument, ...], env: {NAME: value}}}"
            )
        assert command is not None
        return cls(command=[str(argument) for argument in command], env={str(key): str(env[key]) for key in env})


class ServerProcess:
    """The processes of one running server, which a variable of their environment tells from others."""

    def __init__(self) -> None:
        self._mark, self._unrelated = secrets.token_hex(16), EarlierProcesses()
        self.has_ended = False

    @property
    def env(self) -> Mapping[str, str]:
        return {SERVER_MARK: self._mark}

    def end(self) -> None:
        """Kill the server with all that it has started."""
        self.has_ended = True
        end_processes(partial(find_survivors, NO_PROCESS_GROUP, f"{SERVER_MARK}={self._mark}", self._unrelated.find()))


class McpTool:
    """A tool of a running server; its arguments are checked against the server's schema.

    A call that is cancelled ends the server, since it may hang.
    """

    def __init__(
        self, client: Client, process: ServerProcess, *, name: str, description: str, parameters: Mapping[str, Any]
    ) -> None:
        self.name, self._client, self._process = name, client, process
        self._validator = validator_for(parameters)(parameters)
        function = {"name": name, "description": description, "parameters": dict(parameters)}
        self.schema: dict[str, Any] = {"type": "function", "function": function}

    async def call(self, arguments: Mapping[str, Any]) -> str:
        problem: ValidationError | None = best_match(self._validator.iter_errors(dict(arguments)))
        if problem is not None:
            raise InvalidArguments(problem.message)
        if self._process.has_ended:
            raise ServerToolFailed("the server was ended, because a call took too long")
        try:
            result = await self._client.call_tool(self.name, dict(arguments))
        except asyncio.CancelledError:
            await asyncio.to_thread(self._process.end)
            raise
        text = "\n".join(map(_block_text, result.content))
        if not result.content and result.structured_content is not None:
            text = as_text(result.structured_content)
        if result.is_error:
            raise ServerToolFailed(text)
        return text


def _block_text(block: Any) -> str:
    """Return the text of a part of a result, also of an embedded resource, or the kind of one that has none."""
    texts = (getattr(source, "text", None) for source in (block, getattr(block, "resource", None)))
    return next((str(text) for text in texts if text is not None), f"[{block.type}]")


@asynccontextmanager
async def open_servers(servers: Sequence[McpServer]) -> AsyncIterator[list[Tool]]:
    """Start servers, yield their tools, and end the servers with all their processes."""
    if not servers:
        yield []
        return
    from mcp import Client
    from mcp.client.stdio import StdioServerParameters, stdio_client

    with open(os.devnull, "w") as devnull:
        async with AsyncExitStack() as stack:
            tools: list[Tool] = []
            # By this mark they are found and ended together with this process.
            mark = {name: value for name, value in os.environ.items() if name == CHILD_MARK}
            for server in servers:
                program, *arguments = server.command
                process = ServerProcess()
                stack.push_async_callback(asyncio.to_thread, process.end)  # the client ends only the server
                env = {**mark, **server.env, **process.env}
                started = StdioServerParameters(
                    command=program, args=arguments, env=env, encoding_error_handler="replace"
                )
                client = await stack.enter_async_context(Client(stdio_client(started, errlog=devnull)))
                tools += await _list_tools(client, process)
            yield tools


async def _list_tools(client: Client, process: ServerProcess) -> list[Tool]:
    """Return all tools of a server, which may list them in several pages."""
    tools: list[Tool] = []
    cursor = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += [
            McpTool(client, process, name=tool.name, description=tool.description or "", parameters=tool.input_schema)
            for tool in page.tools
        ]
        cursor = page.next_cursor
        if cursor is None:
            return tools


def python(code: str) -> str:
    """Run a Python program, and return what it prints.

    Args:
        code: the program; it has no network, and reads and writes files of its own folder alone
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        file = Path(folder) / "program.py"
        file.write_text(code, errors="surrogatepass")
        process = start_program(
            [str(file)], folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert process.stdout is not None
        with process.stdout as output:
            try:
                printed = output.read(MAX_PRINTED_BYTES)  # a program that prints without end is ended then
            finally:
                end_program(process)
    return printed.decode(errors="replace").replace(f"{folder}/", "")


python.needs_sandbox = True  # type: ignore[attr-defined]

"""Kinds of episodes: the environment, tools, servers or program that a config names."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rlpipe.common.imports import describe_error, import_object
from rlpipe.configs.schema.rollout_config import EnvironmentConfig
from rlpipe.episodes.agents import Agent, CommandAgent, FunctionAgent, GymAgent
from rlpipe.episodes.builtin_tools import McpServer
from rlpipe.episodes.tools import Environment, FunctionTool, Observation, Tool, uncancelled
from rlpipe.episodes.verifiers_agent import VerifiersAgent
from rlpipe.errors import ConfigError


class PromptOnlyEnvironment(Environment):
    """The environment of rows that have the first messages themselves: the policy may call tools, and then answers."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        messages: Observation = row["prompt"]
        return messages


@dataclass(kw_only=True, frozen=True)
class EpisodeKind:
    """The environment and tools that a config names."""

    make: Callable[[], Environment]
    tools: Sequence[Tool]
    has_reward: bool
    """Whether the environment gives rewards, in addition to reward functions."""
    agent: Agent | None = None
    """Program that plays instead of an environment."""
    servers: Sequence[McpServer] = ()
    """MCP servers that each episode starts for itself."""
    environment_schemas: Sequence[dict[str, Any]] = ()
    """Schemas of the environment's own tools."""

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """Schemas of all tools but those of servers, which are known once they run."""
        return [*self.environment_schemas, *(tool.schema for tool in self.tools)]

    @property
    def has_tools(self) -> bool:
        return bool(self.schemas or self.servers)


def import_kind(config: EnvironmentConfig) -> EpisodeKind:
    """Import the environment and tools of a config, and make one environment to try; raise ``ConfigError``."""
    if config.agent is not None:
        return EpisodeKind(
            make=PromptOnlyEnvironment, tools=[], has_reward=True, agent=_open_agent(config.agent, config.concurrency)
        )
    make_environment: Callable[[], Environment] = PromptOnlyEnvironment
    environment_tools: Sequence[Tool] = ()
    schemas: list[dict[str, Any]] = []
    if config.path is not None:
        environment_class = import_object(config.path, what="environment.path", error=ConfigError)
        if not (inspect.isclass(environment_class) and issubclass(environment_class, Environment)):
            raise ConfigError(f"environment.path: {config.path} is not a class derived from rlpipe.Environment")
        make_environment = _Maker(environment_class, dict(config.kwargs))
        try:
            environment = make_environment()
            environment_tools = environment.tools()
            schemas = [tool.schema for tool in environment_tools]
            close_tried(environment, config.tool_timeout_s)
        except Exception as error:  # a user's class raises anything
            raise ConfigError(f"environment.path: {config.path} can't be created: {describe_error(error)}") from error
    for tool in environment_tools:
        _require_sandbox(getattr(tool, "function", None), f"{config.path}.{tool.name}", "path", config)
    tools = [_import_tool(entry, config) for entry in config.tools if not isinstance(entry, Mapping)]
    servers = [McpServer.parse(entry) for entry in config.tools if isinstance(entry, Mapping)]
    return EpisodeKind(
        make=make_environment,
        tools=tools,
        has_reward=config.path is not None,
        servers=servers,
        environment_schemas=schemas,
    )


def close_tried(environment: Environment, timeout_s: float) -> None:
    """Close an environment that was only tried, and may have started a server, from whatever thread this is.

    Its method may not expect that the environment has not begun, and raise anything or hang.
    """

    def close() -> None:
        with suppress(Exception, SystemExit):
            result = environment.close()
            if inspect.isawaitable(result):
                asyncio.run(uncancelled(result))

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    thread.join(timeout_s)


def _open_agent(agent: Any, concurrency: int) -> Agent:
    match agent:
        case str():
            return FunctionAgent(agent)
        case {"command": [program, *arguments], **others} if not others:
            return CommandAgent([str(word) for word in (program, *arguments)])
        case {"nemo_gym": str(url), **others} if {*others} <= {"name"}:
            return GymAgent(url, name=str(others.get("name") or ""), concurrency=concurrency)
        case {"verifiers": str(address), **others} if not others:
            return VerifiersAgent(address)
    raise ConfigError(
        f"environment.agent: {agent!r:.200} is none of file.py:function, {{command: [program, argument, ...]}}, "
        "{nemo_gym: URL of the head server, name: AGENT} and {verifiers: tcp://HOST:PORT}"
    )


def _import_tool(entry: str, config: EnvironmentConfig) -> FunctionTool:
    function = import_object(entry, what="environment.tools", error=ConfigError)
    _require_sandbox(function, entry, "tools", config)
    if not callable(function):
        raise ConfigError(f"environment.tools: {entry} is {function!r:.100}, which can't be called")
    # Callable objects, such as partial functions, have the name under which they are found alone.
    return FunctionTool(function, name=getattr(function, "__name__", entry.rpartition(":")[2].rpartition(".")[2]))


def _require_sandbox(function: Any, name: str, option: str, config: EnvironmentConfig) -> None:
    if getattr(function, "needs_sandbox", False) and config.isolation != "sandbox":
        raise ConfigError(
            f"environment.{option}: {name} runs code that the model wrote: set environment.isolation=sandbox"
        )


@dataclass(frozen=True)
class _Maker:
    kind: type[Environment]
    kwargs: Mapping[str, Any]

    def __call__(self) -> Environment:
        return self.kind(**self.kwargs)

    @property
    def is_async(self) -> bool:
        """Whether the environment may need the event loop, also while it is made."""
        return inspect.iscoroutinefunction(self.kind.reset)

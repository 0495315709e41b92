"""Options of episodes: what answers the policy, and the limits of a conversation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlpipe.configs.schema.option import MAX_GIB, MAX_PROCESSES, MAX_SECONDS, MAX_WEIGHT, Freezable, option


@dataclass(kw_only=True)
class EnvironmentConfig(Freezable):
    path: str | None = option(
        None,
        "package.module:name, or file.py:name, of an Environment class; null: episodes begin with the row's prompt.",
    )
    kwargs: dict[str, Any] = option({}, "Keyword arguments for the class.")
    tools: list[Any] = option([], "Functions that the policy may call, each as package.module:name or file.py:name.")
    agent: Any = option(
        None,
        "A program that calls a chat completions endpoint: file.py:name of a function, {command: [program, "
        "argument, ...]}, {nemo_gym: URL of the head server, name: AGENT}, or {verifiers: tcp://HOST:PORT}.",
    )
    host: str = option("127.0.0.1", "Address of the endpoint that agents call.")
    port: int | None = option(
        None, "Port of the endpoint that agents call; null: any free one.", minimum=1, maximum=65_535
    )
    weight: float = option(
        1.0, "Weight of the environment's reward in the sum.", minimum=-MAX_WEIGHT, maximum=MAX_WEIGHT
    )
    max_turns: int = option(8, "Maximum number of the policy's turns in an episode.", minimum=1, maximum=100_000)
    timeout_s: float = option(120.0, "Maximum seconds of an episode.", above=0, maximum=MAX_SECONDS)
    tool_timeout_s: float = option(10.0, "Maximum seconds of a tool call.", above=0, maximum=MAX_SECONDS)
    isolation: str = option(
        "process",
        "Where an environment and tools run: in threads of the process that plays (thread), each episode and each call "
        "of a function in a process of its own (process), or that without network (sandbox).",
        choices=("thread", "process", "sandbox"),
    )
    memory_gb: float | None = option(
        None, "GiB that an episode's own process, or that of a call, may use; null: no limit.", above=0, maximum=MAX_GIB
    )
    history: str = option(
        "keep",
        "Earlier turns in the policy's context: as it drew them (keep), or as the chat template renders them again, "
        "such as without their thoughts (template).",
        choices=("keep", "template"),
    )
    parser: str = option(
        "auto",
        "How tool calls are read: hermes, json, a parser of vLLM, file.py:name of a function, or auto, by the chat "
        "template.",
    )
    on_error: str = option(
        "drop_episode",
        "If an environment raises: drop the episode or its group, count it as 0, or stop the run.",
        choices=("drop_episode", "drop_group", "zero", "raise"),
    )
    num_processes: int = option(1, "Processes that play episodes.", minimum=1, maximum=MAX_PROCESSES)
    num_cpus: float = option(
        0.5, "CPUs that Ray reserves for each of these processes.", minimum=0, maximum=MAX_PROCESSES
    )
    concurrency: int = option(
        64, "Episodes that a process plays at the same time; others wait.", minimum=1, maximum=100_000
    )

    @property
    def is_used(self) -> bool:
        """Whether the run plays episodes."""
        return self.takes_rows or bool(self.tools)

    @property
    def takes_rows(self) -> bool:
        """Whether rows go to an environment or agent as they are, which may give a reward."""
        return self.path is not None or self.agent is not None

"""Process of one sandboxed call: it confines itself, calls the function, and writes the answer."""

from __future__ import annotations

import asyncio
import inspect
import json
import math
import os
import pickle
import resource
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rlpipe.scoring.processes import MemoryLimit
from rlpipe.scoring.rewards import ignore_extra
from rlpipe.scoring.sandbox.seccomp import (
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    build_filter,
    call_prctl,
    drop_capabilities,
    install_filter,
)
from rlpipe.scoring.validation import check_scores, describe_exception, is_lack_of_memory

MAX_FILE_BYTES = 2**30
NO_CORE_DUMP = 1
"""Limit of core dumps in bytes; 0 would still call a dump handler, if the machine has one."""


@dataclass(kw_only=True, frozen=True)
class Limits:
    """Limits of one call."""

    timeout_s: float
    memory: MemoryLimit | None


def run_child(
    function: Callable[..., Any], job: bytes, limits: Limits, answer_fd: int, server_fds: Sequence[int]
) -> NoReturn:
    """Run one call, write its answer as JSON for ``rlpipe.scoring.sandbox.sandbox``, and end this process."""
    status = 1
    try:
        lock_in(limits, server_fds)
        answer = answer_of(function, job, limits.memory)
        with open(answer_fd, "w") as file:
            json.dump(answer, file)
        status = 0
    finally:
        os._exit(status)


def lock_in(limits: Limits, server_fds: Sequence[int]) -> None:
    """Confine this process for good, and close the server's files; raise ``OSError`` if the machine can't do it."""
    server = os.getppid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    for fd in server_fds:
        os.close(fd)
    call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)
    if limits.memory is not None:
        allowed = limits.memory.apply()
        resource.setrlimit(resource.RLIMIT_DATA, (allowed, allowed))
    cpu_s = math.ceil(limits.timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (NO_CORE_DUMP, NO_CORE_DUMP))
    drop_capabilities()
    # So that nothing that this process starts can reach the answer through /proc.
    call_prctl(PR_SET_DUMPABLE, 0)
    install_filter(build_filter(os.getpid(), [server]))


def answer_of(function: Callable[..., Any], job: bytes, memory: MemoryLimit | None) -> dict[str, Any]:
    """Call the function, and return its values with what was logged, or the failure."""
    logged: list[tuple[str, float]] = []
    tools = {"log_metric": lambda name, value: logged.append((str(name), float(value))), "log_extra": ignore_extra}
    try:
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # else every call draws the same numbers
        num_values, arguments = pickle.loads(job)
        returned = function(**{name: tools.get(name, value) for name, value in arguments.items()})
        if inspect.isawaitable(returned):
            returned = asyncio.run(_wait(returned))
        return {"values": check_scores(returned, num_values), "logged": logged}
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; the reason is reported
        hint = f"; its sandbox may use {memory}" if memory and is_lack_of_memory(error) else ""
        return {"failure": describe_exception(error) + hint}


async def _wait(pending: Awaitable[Any]) -> Any:
    return await pending

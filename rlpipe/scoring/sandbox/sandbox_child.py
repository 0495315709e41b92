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
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from rlpipe.scoring.processes import MemoryLimit, set_limit
from rlpipe.scoring.rewards import ignore_extra
from rlpipe.scoring.sandbox.confinement import confine_call, landlock_version
from rlpipe.scoring.sandbox.namespaces import enter_namespaces, limit_user_tasks, usable_namespaces
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
    is_confined: bool = True
    """False: the call's process may do whatever its user may."""

    @property
    def process(self) -> str:
        """Name of the call's process in messages."""
        return "its sandboxed process" if self.is_confined else "its process"

    @property
    def where(self) -> str:
        """Words that follow in messages after what the call did: where it ran, or none without a sandbox."""
        return " in its sandbox" if self.is_confined else ""


def run_child(
    function: Callable[..., Any],
    job: bytes,
    limits: Limits,
    answer_fd: int,
    server_fds: Sequence[int],
    scratch: str,
    kept_fds: Sequence[int] = (),
) -> NoReturn:
    """Run one call, write its answer as JSON for ``rlpipe.scoring.sandbox.sandbox``, and end this process.

    The call may use ``kept_fds``.
    """
    status = 1
    try:
        leave_server(server_fds)
        if limits.is_confined:
            lock_in(limits, scratch, [answer_fd, *kept_fds])
        else:
            limit_memory(limits, scratch)
        answer = answer_of(function, job, limits.memory)
        with open(answer_fd, "w") as file:
            json.dump(answer, file)
        status = 0
    finally:
        os._exit(status)


def leave_server(server_fds: Sequence[int]) -> None:
    """Give up what this process has from the server: its files, session, signal handlers and standard streams."""
    server = os.getppid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    devnull = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(devnull, standard)
    for fd in server_fds:
        os.close(fd)
    set_limit(resource.RLIMIT_CORE, NO_CORE_DUMP)
    call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:
        os._exit(1)


def lock_in(limits: Limits, scratch: str, outer_fds: Sequence[int]) -> None:
    """Confine this process for good, in namespaces of its own; raise ``OSError`` if the machine can't do it.

    It goes on as another process, whose temporary files lie in ``scratch``; processes around that one close
    ``outer_fds``.
    """
    namespaces = usable_namespaces()
    enter_namespaces(namespaces, scratch, outer_fds)
    os.setsid()
    parent = os.getppid()
    call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    limit_memory(limits, scratch)
    cpu_s = math.ceil(limits.timeout_s) + 1
    set_limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    set_limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    limit_user_tasks(namespaces)
    drop_capabilities(keep_mapping=landlock_version() == 0)  # for bubblewrap
    # So that nothing that this process starts can reach the answer through /proc.
    call_prctl(PR_SET_DUMPABLE, 0)
    confine_call(scratch)
    install_filter(build_filter(os.getpid(), [parent]))


def limit_memory(limits: Limits, scratch: str) -> None:
    """Set the call's memory limit, and its folder for temporary files."""
    if limits.memory is not None:
        allowed = limits.memory.apply()
        set_limit(resource.RLIMIT_DATA, allowed)
    tempfile.tempdir = os.environ["TMPDIR"] = scratch


def answer_of(function: Callable[..., Any], job: bytes, memory: MemoryLimit | None) -> dict[str, Any]:
    """Call the function, and return its values with what was logged, or the failure.

    Without a number of values, its value is any JSON.
    """
    logged: list[tuple[str, float]] = []
    tools = {"log_metric": lambda name, value: logged.append((str(name), float(value))), "log_extra": ignore_extra}
    try:
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()  # else every call draws the same numbers
        num_values, arguments = pickle.loads(job)
        returned = function(**{name: tools.get(name, value) for name, value in arguments.items()})
        if inspect.isawaitable(returned):
            returned = asyncio.run(_wait(returned))
        values = [returned] if num_values is None else check_scores(returned, num_values)
        return {"values": values, "logged": logged}
    except BaseException as error:  # noqa: BLE001 - user code may raise anything; the reason is reported
        return {"failure": describe_exception(error) + describe_limit(error, memory)}


def describe_limit(error: BaseException, memory: MemoryLimit | None) -> str:
    """Return which limit of the sandbox an exception is about, if that can be known."""
    if memory and is_lack_of_memory(error):
        return f"; its sandbox may use {memory}"
    if isinstance(error, PermissionError) and error.filename is not None and landlock_version():
        return "; a sandbox writes only to its temporary folder (tempfile)"
    return ""


async def _wait(pending: Awaitable[Any]) -> Any:
    return await pending

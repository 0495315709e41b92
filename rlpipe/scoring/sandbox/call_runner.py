"""Execution of one call in a forked process, which is watched and ended with all that it leaves."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from rlpipe.common.formatting import GIB
from rlpipe.common.temporary_folders import remove_folder
from rlpipe.scoring.processes import PROC, ProcessTree, descendants, end_processes, list_processes
from rlpipe.scoring.sandbox.sandbox_child import Limits, run_child
from rlpipe.scoring.sandbox.seccomp import PR_SET_CHILD_SUBREAPER, PR_SET_DUMPABLE, call_prctl

MAX_ANSWER_BYTES = 2**22
MAX_PROCESSES = 128
"""Most living descendants of a call at the same time."""
CHECK_S = 0.1
"""Seconds between two checks of a call's processes and their memory."""
GONE = "the process that asked for the call is gone"


class CallRunner:
    """A runner of calls, one at a time, in forks of this process, which has one thread.

    A call ends with the connection to the process that asked for it, or when this process's parent ends.
    """

    def __init__(self, connection: Connection, folder: str) -> None:
        self._connection, self._parent, self._folder = connection, os.getppid(), folder
        # This process adopts the orphans of its children, and no other process may inspect it.
        call_prctl(PR_SET_CHILD_SUBREAPER, 1)
        call_prctl(PR_SET_DUMPABLE, 0)
        self._wake, self._wake_end = os.pipe()
        for end in (self._wake, self._wake_end):
            os.set_blocking(end, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_end, warn_on_full_buffer=False)

    def run(
        self,
        function: Callable[..., Any],
        job: bytes,
        limits: Limits,
        *,
        kept_fds: Sequence[int] = (),
        check_s: float = CHECK_S,
    ) -> tuple[str | None, bytes]:
        """Return the reason if the call failed, and its process's answer; ``kept_fds`` stay open in the call.

        Raises ``EOFError`` if the call is not wanted any more.
        """
        read_end, write_end = os.pipe()
        scratch = tempfile.mkdtemp(dir=self._folder)
        pid = os.fork()
        if pid == 0:
            server_fds = [read_end, self._wake, self._wake_end, self._connection.fileno()]
            run_child(function, job, limits, write_end, server_fds, scratch, kept_fds)
        os.close(write_end)
        for fd in kept_fds:
            os.close(fd)
        os.set_blocking(read_end, False)
        try:
            return self._watch(pid, read_end, limits, check_s)
        finally:
            os.close(read_end)
            end_children(pid)
            remove_folder(scratch)

    def check_parent(self) -> None:
        """Raise ``EOFError`` if this process's parent has ended.

        The connection does not report that while a fork of the parent holds its other end open.
        """
        if os.getppid() != self._parent:
            raise EOFError(GONE)

    def _watch(self, pid: int, read_end: int, limits: Limits, check_s: float) -> tuple[str | None, bytes]:
        """Return the reason if the call failed, and the child's answer; a failed child may still be alive."""
        answer = bytearray()
        started = time.monotonic()
        base_bytes = memory_bytes(os.getpid())
        checked, family = started, ProcessTree()
        with DefaultSelector() as selector:
            for source in (read_end, self._wake, self._connection.fileno()):
                selector.register(source, EVENT_READ)
            while True:
                for key, _ in selector.select(max(0.0, min(check_s, started + limits.timeout_s - time.monotonic()))):
                    if key.fd == self._connection.fileno():
                        raise EOFError(GONE)
                    if key.fd == self._wake:
                        os.read(self._wake, 2**16)
                    elif not read_more(read_end, answer):
                        selector.unregister(read_end)
                status = reap(pid)
                if status is not None:
                    read_more(read_end, answer)
                    return describe_end(status, limits), bytes(answer)
                if len(answer) > MAX_ANSWER_BYTES:
                    return f"{limits.process} wrote more than {MAX_ANSWER_BYTES} bytes as its answer", b""
                now = time.monotonic()
                if now - started >= limits.timeout_s:
                    return f"it took longer than {limits.timeout_s:g} seconds (timeout_s){limits.where}", b""
                if now - checked >= check_s:
                    self.check_parent()
                    # Without a sandbox a hundred runners may watch at one time, and a call can do worse than hide.
                    running = descendants([os.getpid()], list_processes()) if limits.is_confined else family.find()
                    if (reason := describe_excess(running, limits, base_bytes)) is not None:
                        return reason, b""
                    checked = time.monotonic()


def raise_priority() -> None:
    """Run before ordinary processes, where that is allowed: hundreds of a call's would leave no time to end them."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def read_more(fd: int, answer: bytearray) -> bool:
    """Append what can be read, up to somewhat more than the longest answer; return False at the end of the file."""
    with suppress(BlockingIOError):
        while len(answer) <= MAX_ANSWER_BYTES:
            chunk = os.read(fd, 2**16)
            if not chunk:
                return False
            answer += chunk
    return True


def reap(pid: int) -> int | None:
    """Reap all children that have ended; return the wait status of ``pid`` if it is among them."""
    status = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
            status = ended[1] if ended[0] == pid else status
    return status


def end_children(first: int) -> None:
    """End and reap every process that the last call has left; ``first`` was started by this process."""
    with suppress(ChildProcessError, ProcessLookupError):
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # raises if it has been reaped
        os.killpg(first, signal.SIGKILL)  # this also ends its process namespace, if it has one
    with suppress(ChildProcessError):
        while True:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                end_processes(lambda: descendants([os.getpid()], list_processes()))
                os.waitpid(-1, 0)


def describe_end(status: int, limits: Limits) -> str | None:
    """Return why a child with that wait status has no answer, or None if it may have one."""
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return None
    if code > 0:
        return f"{limits.process} ended with exit code {code}"
    if -code == signal.SIGXCPU:
        return f"it took more CPU time than {limits.timeout_s:g} seconds (timeout_s){limits.where}"
    hint = f", which may use {limits.memory}," if limits.memory else ""
    return f"{limits.process}{hint} died of {signal.Signals(-code).name}"


def describe_excess(family: Collection[int], limits: Limits, base_bytes: int) -> str | None:
    """Return why the processes of the running call are too many or too large together, or None if they are not.

    The server's ``base_bytes`` are subtracted from each: a process either shares them or is small.
    """
    if len(family) > MAX_PROCESSES:
        return f"it had more than {MAX_PROCESSES} processes at one time{limits.where}"
    memory = limits.memory
    if memory is None:
        return None
    used_bytes = sum(max(0, memory_bytes(pid) - base_bytes) for pid in family)
    return f"its processes used more than {memory} together{limits.where}" if used_bytes > memory.gb * GIB else None


def memory_bytes(pid: int) -> int:
    """Return the bytes of the process's memory that no file backs, or 0 if it has ended."""
    total = 0
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text(errors="replace").splitlines():
            if line.startswith(("RssAnon:", "RssShmem:")):
                total += int(line.split()[1]) * 1024
    return total

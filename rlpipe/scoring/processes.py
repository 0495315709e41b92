"""Processes of this machine: their state, memory and descendants, how to end them, and a reaper for orphans."""

from __future__ import annotations

import os
import resource
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlpipe.common.formatting import GIB

PROC = Path("/proc")
END_TIMEOUT_S = 10.0
"""Seconds after which processes that do not die, such as those in a stuck file system, are left alone."""
CHILD_MARK = "RLPIPE_CHILD_OF"
"""Environment variable that marks the processes that one process of a run started for users' code."""
REAPER_POLL_S = 0.25
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def run_server(
    name: str, *arguments: str, kind: socket.SocketKind = socket.SOCK_STREAM
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a module as a server with few threads, so that it may fork; return it with one end of a pair of sockets.

    Its first argument is the file descriptor of the other end.
    """
    parent_end, child_end = socket.socketpair(socket.AF_UNIX, kind)
    with child_end:
        child_arguments = [str(child_end.fileno()), *arguments]
        return _run_module(name, child_arguments, pass_fds=[child_end.fileno()], environment=ONE_THREAD), parent_end


def _run_module(
    name: str, arguments: Sequence[str], *, pass_fds: Sequence[int] = (), environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start another Python process on a module, with this one's import path, in a session of its own."""
    path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
    return subprocess.Popen(
        [sys.executable, "-m", name, *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=pass_fds,
        env={**os.environ, **(environment or {}), "PYTHONPATH": path},
        start_new_session=True,
    )


@dataclass(slots=True, frozen=True)
class Process:
    """A living process, as /proc shows it."""

    parent: int
    group: int
    started: int
    """Start, in clock ticks since the machine's boot."""


def list_processes() -> dict[int, Process]:
    """Return every living process by its id, without zombies; empty if there is no /proc."""
    return read_processes(process_ids())


def process_ids() -> set[int]:
    """Return the ids of all processes; empty if there is no /proc."""
    return {int(entry) for entry in os.listdir(PROC) if entry.isdigit()} if PROC.is_dir() else set()


def read_processes(pids: Iterable[int]) -> dict[int, Process]:
    """Return those of ``pids`` that are alive, by their ids."""
    return {pid: process for pid in pids if (process := read_process(pid)) is not None}


def read_process(pid: int) -> Process | None:
    """Return the process of an id, or None if it is not alive."""
    try:
        fields = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else Process(int(fields[1]), int(fields[2]), int(fields[19]))


def descendants(roots: Iterable[int], processes: Mapping[int, Process]) -> set[int]:
    """Return the ids of the children of ``roots``, of their children, and so on."""
    children: dict[int, list[int]] = {}
    for pid, process in processes.items():
        children.setdefault(process.parent, []).append(pid)
    pids: set[int] = set()
    waiting = list(roots)
    while waiting:
        new = [child for child in children.get(waiting.pop(), ()) if child not in pids]
        pids.update(new)
        waiting += new
    return pids


class ProcessTree:
    """The descendants of this process, for frequent looks on a machine with many processes.

    A process that was none in two looks is not read again; a living one could only be taken for it if its id were used
    again between two looks.
    """

    def __init__(self) -> None:
        self._strangers: set[int] = set()
        self._once: set[int] = set()

    def find(self) -> set[int]:
        """Return the ids of the living descendants."""
        pids = process_ids()
        self._strangers &= pids
        processes = read_processes(pids - self._strangers)
        family = descendants([os.getpid()], processes)
        # A process whose parent dies during the scan seems unrelated until this process has adopted it.
        strangers = processes.keys() - family - {os.getpid()}
        self._strangers |= strangers & self._once
        self._once = strangers
        return family


def marked(mark: str, pids: Iterable[int]) -> set[int]:
    """Return those of ``pids`` that were started with ``mark``, such as ``NAME=value``, in their environment."""
    matches = set()
    for pid in pids:
        with suppress(OSError):
            if mark.encode() in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                matches.add(pid)
    return matches


def end_processes(find: Callable[[], set[int]]) -> None:
    """Kill the processes that ``find`` returns until there are none; stop all first, so that none starts another."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while (pids := find()) and time.monotonic() < deadline:
        stopped: set[int] = set()
        while (new := pids - stopped) and time.monotonic() < deadline:
            send_signal(new, signal.SIGSTOP)
            stopped |= new
            pids = find()
        send_signal(stopped, signal.SIGKILL)
        time.sleep(0.001)


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
TIMER_SIGNALS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF)
SIGNALS = (
    *TIMER_SIGNALS,
    signal.SIGHUP,
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGPIPE,
    signal.SIGTERM,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGCHLD,
    signal.SIGXCPU,
)
"""Signals whose handlers programs replace."""


class ProcessSnapshot:
    """Snapshot of the process's state before a reward is called, which ``undo`` restores."""

    def __init__(self) -> None:
        self._on_main_thread = threading.current_thread() is threading.main_thread()
        self._folder = working_directory()
        self._timers = {timer: signal.getitimer(timer) for timer in TIMERS}
        self._handlers = {number: signal.getsignal(number) for number in SIGNALS}
        self._blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        self._started = clock_ticks()

    def undo(self) -> None:
        """Restore the snapshot; a reward's alarm that rings meanwhile has no effect, whatever its handler raises."""
        while True:
            try:
                self._undo()
                return
            except BaseException:  # noqa: BLE001 - the handler is user code; timers are off by now, so it ends
                continue

    def _undo(self) -> None:
        for timer in TIMERS:
            signal.setitimer(timer, 0)
        if self._on_main_thread:
            for number, handler in self._handlers.items():
                # Handlers that Python did not install are None, and can't be set from here.
                if handler is not None and signal.getsignal(number) is not handler:
                    if number in TIMER_SIGNALS:  # ignoring a signal discards pending ones, of any thread
                        signal.signal(number, signal.SIG_IGN)
                    signal.signal(number, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._blocked)
        for timer, (remaining_s, interval) in self._timers.items():
            if remaining_s > 0:  # set before the reward was called, and still running
                signal.setitimer(timer, remaining_s, interval)
        if self._folder is not None:
            with suppress(OSError):
                os.chdir(self._folder)

    def end_children(self) -> None:
        """End the processes that were started since the snapshot, and their descendants."""
        ended: set[int] = set()

        def find_new() -> set[int]:
            processes = list_processes()
            new = {pid for pid in descendants([os.getpid()], processes) if processes[pid].started >= self._started}
            ended.update(new)
            return new

        end_processes(find_new)
        for pid in ended:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def working_directory() -> str | None:
    """Return the working directory, or None if it was removed."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def clock_ticks() -> int:
    """Return the clock ticks since the machine's boot, the unit of process starts in /proc; 0 outside Linux."""
    if sys.platform != "linux":
        return 0
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))


MIN_FREE = 0.5
"""Share of the limit that must be free again after a MemoryError; with less, the process is worn out."""


def data_bytes() -> int:
    """Return the bytes of private, writable memory of this process, which RLIMIT_DATA counts.

    Shared memory, such as the object store, is left out; RLIMIT_AS would count it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData")


def set_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Set a resource limit of this process, by default a hard one; what it has inherited stays the most allowed."""
    _, most = resource.getrlimit(kind)
    limits = (soft, soft if hard is None else hard)
    resource.setrlimit(kind, limits if most == resource.RLIM_INFINITY else (min(limits[0], most), min(limits[1], most)))


def lift_memory_limit() -> None:
    """Remove the limit that this process has set or inherited."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


@dataclass(kw_only=True, frozen=True)
class MemoryLimit:
    """Memory that a process may take beyond what it has when the limit is set."""

    option: str
    """Config option that sets the limit."""
    gb: float

    def __str__(self) -> str:
        return f"{self.option}={self.gb:g}"

    def apply(self) -> int:
        """Set the limit for this process and for each that it starts; return the bytes allowed, 0 outside Linux."""
        if sys.platform != "linux":
            return 0
        allowed = data_bytes() + int(self.gb * GIB)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = allowed if hard == resource.RLIM_INFINITY else min(allowed, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        return soft

    def is_exhausted(self, allowed: int) -> bool:
        """Return whether the process holds so much memory that the next call would fail as well."""
        return sys.platform == "linux" and allowed - data_bytes() < MIN_FREE * self.gb * GIB


def start_reaper() -> None:
    """Start a reaper that kills all descendants of this process once it has ended in any way, on Linux.

    It finds them by their process group, which becomes that of this process alone, and by ``CHILD_MARK`` in their
    environment. A process that leaves the group and drops that variable is missed.
    """
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    os.environ[CHILD_MARK] = secrets.token_hex(8)
    _run_module("rlpipe.scoring.processes", [str(os.getpid()), os.environ[CHILD_MARK]]).wait()


def find_survivors(group: int, mark: str, unrelated: AbstractSet[int] = frozenset()) -> set[int]:
    """Return the ids of the group's processes, of those with the mark, and of their descendants, except this one.

    ``unrelated`` are ids of others, which are not looked at.
    """
    processes = read_processes(process_ids() - unrelated)
    roots = {pid for pid, process in processes.items() if process.group == group} | marked(mark, processes)
    return (roots | descendants(roots, processes)) - {os.getpid()}


def reap() -> None:
    group, token = int(sys.argv[1]), sys.argv[2]
    leader = read_process(group)
    # Ray kills a worker's own children first, so the reaper must not be one. A pipe would not report the worker's end,
    # because children that it forks hold the other end open.
    if os.fork() != 0:
        os._exit(0)
    while leader is not None and (now := read_process(group)) is not None and now.started == leader.started:
        time.sleep(REAPER_POLL_S)
    end_processes(lambda: find_survivors(group, f"{CHILD_MARK}={token}"))


if __name__ == "__main__":
    reap()

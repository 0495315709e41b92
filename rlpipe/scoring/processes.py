"""Processes: starting Python on a module, listing processes through /proc, and ending whole trees of them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
END_TIMEOUT_S = 10.0
"""Seconds after which processes that do not die, such as those in a stuck file system, are left alone."""


def run_module(
    name: str,
    arguments: Sequence[str],
    *,
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
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
    found = {}
    for entry in os.listdir(PROC) if PROC.is_dir() else ():
        if entry.isdigit() and (process := read_process(int(entry))) is not None:
            found[int(entry)] = process
    return found


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
    found: set[int] = set()
    waiting = list(roots)
    while waiting:
        new = [child for child in children.get(waiting.pop(), ()) if child not in found]
        found.update(new)
        waiting += new
    return found


def marked(mark: str, pids: Iterable[int]) -> set[int]:
    """Return those of ``pids`` that were started with ``mark``, such as ``NAME=value``, in their environment."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            if mark.encode() in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.add(pid)
    return found


def end_processes(find: Callable[[], set[int]]) -> None:
    """Kill the processes that ``find`` returns until there are none; stop all first, so that none starts another."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while (found := find()) and time.monotonic() < deadline:
        stopped: set[int] = set()
        while (new := found - stopped) and time.monotonic() < deadline:
            send_signal(new, signal.SIGSTOP)
            stopped |= new
            found = find()
        send_signal(stopped, signal.SIGKILL)
        time.sleep(0.001)


def send_signal(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)

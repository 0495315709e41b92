"""A reward that does to its process what the row's column ``how`` names."""

from __future__ import annotations

import asyncio
import mmap
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

HOARD: list[bytearray] = []
MANY_BYTES = 4 * 2**30
REACH = """
import socket, sys
with socket.socket() as client:
    client.settimeout(5)
    client.connect(("127.0.0.1", int(sys.argv[1])))
"""


def behave(completions: list[Any], how: list[str], argument: list[Any], **columns: Any) -> Any:
    """Return 1 for every completion, or the result of the function of this file that ``how`` names."""
    if how[0] != "well":
        return globals()[how[0]](argument[0], len(completions))
    return [1.0] * len(completions)


def each(completions: list[str]) -> list[float]:
    """Score one completion; end the process, hang, or raise, if the completion says so."""
    (text,) = completions
    if text == "hang":
        time.sleep(3600)
    if text == "die":
        os._exit(3)
    if text == "raise":
        raise ValueError("wrong")
    return [1.0]


each.scores_each = True  # type: ignore[attr-defined]


def count_files(argument: Any, size: int) -> list[float]:
    return [float(len(os.listdir(argument)))] * size


def ring(number: int, frame: Any) -> None:
    raise TimeoutError("the alarm rang")


def hang(argument: Any, size: int) -> None:
    time.sleep(3600)


def segfault(argument: Any, size: int) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def abort(argument: Any, size: int) -> None:
    os.abort()


def leave(argument: Any, size: int) -> None:
    os._exit(0)


def sys_exit(argument: Any, size: int) -> None:
    sys.exit("enough")


def interrupt(argument: Any, size: int) -> None:
    raise KeyboardInterrupt


def grow(argument: Any, size: int) -> None:
    kept = []
    while True:
        kept.append(bytearray(2**24))


def hoard(argument: Any, size: int) -> None:
    while True:
        HOARD.append(bytearray(2**24))


def share_memory(argument: Any, size: int) -> None:
    """Fill shared memory, which is charged to no single process."""
    shared = mmap.mmap(-1, MANY_BYTES)
    for start in range(0, MANY_BYTES, mmap.PAGESIZE):
        shared[start] = 1


def nothing_to_show(argument: Any, size: int) -> Any:
    return (1.0 for _ in iter(int, 1))


def use_alarm(argument: Any, size: int) -> list[float]:
    """Interrupt its own sleep with an alarm, as math-verify does."""
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(60)
    except TimeoutError:
        return [1.0] * size
    return [0.0] * size


def leave_alarm(argument: Any, size: int) -> list[float]:
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.3, 0.1)
    os.chdir("/")
    return [1.0] * size


def look_around(argument: Any, size: int) -> list[float]:
    """Wait for leftovers of other calls, and return 1 if alarm handler and working directory are untouched."""
    time.sleep(0.5)
    same = signal.getsignal(signal.SIGALRM) is signal.SIG_DFL and os.getcwd() != "/"
    return [float(same)] * size


def start_children(folder: str | None, size: int) -> None:
    """Start children by fork and by exec, in and out of the process's session; write their ids to ``folder``/pids.

    Programs started by exec have a child of their own.
    """
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=time.sleep, args=(3600,), daemon=True)
    child.start()
    pids = [child.pid]
    for session in (False, True):
        shell = subprocess.Popen(
            ["sh", "-c", "sleep 3600 & echo $!; wait"], start_new_session=session, stdout=subprocess.PIPE, text=True
        )
        assert shell.stdout is not None
        pids += [shell.pid, int(shell.stdout.readline())]
    (place(folder) / "pids").write_text(" ".join(map(str, pids)))


def place(folder: str | None) -> Path:
    """Return the folder, or else the one for temporary files, where a sandboxed call may write."""
    return Path(folder or tempfile.gettempdir())


def start_children_and_hang(folder: str | None, size: int) -> None:
    start_children(folder, size)
    time.sleep(3600)


def start_children_and_die(folder: str, size: int) -> None:
    start_children(folder, size)
    os.kill(os.getpid(), signal.SIGKILL)


def start_children_and_fail(folder: str, size: int) -> None:
    start_children(folder, size)
    raise ValueError("with children")


def start_daemon(folder: str | None, size: int) -> list[float]:
    """Start a process that leaves its parent, session and group."""
    note = place(folder) / "pids"
    daemon = "import os, time; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0); "
    stay = f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(3600)"
    subprocess.run([sys.executable, "-c", daemon + stay], check=True)
    while not note.exists() or not note.read_text():
        time.sleep(0.01)
    return [1.0] * size


def fork_without_end(argument: Any, size: int) -> None:
    for _ in range(2000):
        subprocess.Popen(["sleep", "3600"])
    time.sleep(3600)


def reach(port: int, size: int) -> list[float]:
    with socket.create_connection(("127.0.0.1", port), timeout=5):
        return [1.0] * size


def reach_by_program(port: int, size: int) -> list[float]:
    """Try to connect from a program that another program starts."""
    inner = [sys.executable, "-c", REACH, str(port)]
    outer = f"import subprocess; raise SystemExit(subprocess.run({inner!r}, stderr=subprocess.DEVNULL).returncode)"
    return [float(subprocess.run([sys.executable, "-c", outer]).returncode == 0)] * size


def try_families(argument: Any, size: int) -> list[float]:
    """Return the number of address families, other than AF_UNIX, for which a socket can be created."""
    made = 0
    for family in (socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK, socket.AF_PACKET, socket.AF_VSOCK):
        with suppress(PermissionError):
            socket.socket(family, socket.SOCK_RAW if family == socket.AF_NETLINK else socket.SOCK_DGRAM).close()
            made += 1
    left, right = socket.socketpair()
    left.send(b"x")
    assert right.recv(1) == b"x"
    return [float(made)] * size


def write_nonsense(argument: Any, size: int) -> None:
    for fd in range(3, 64):
        with suppress(OSError):
            os.write(fd, b"\x80\x04nonsense")
    os._exit(0)


def write_without_end(argument: Any, size: int) -> None:
    while True:
        for fd in range(3, 64):
            with suppress(OSError):
                os.write(fd, b"[" * 65536)


def kill_parent(argument: Any, size: int) -> None:
    os.kill(os.getppid(), signal.SIGKILL)


def kill_all(argument: Any, size: int) -> None:
    os.kill(-1, signal.SIGKILL)


def kill_own_group(argument: Any, size: int) -> None:
    os.kill(0, signal.SIGKILL)


def end_own_child(argument: Any, size: int) -> list[float]:
    """Kill the process group of a child, as code that runs programs with a timeout does."""
    child = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    os.killpg(os.getpgid(child.pid), signal.SIGKILL)
    return [float(child.wait() == -signal.SIGKILL)] * size


def raise_limits(argument: Any, size: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_DATA, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def write_file(argument: Any, size: int) -> None:
    with (place(None) / "large").open("wb") as file:
        file.truncate(2**30 + 1)


def write_elsewhere(folder: str, size: int) -> None:
    (Path(folder) / "new").write_text("x")


def fill_folder(argument: Any, size: int) -> None:
    for number in range(64):
        (place(None) / str(number)).write_bytes(bytes(2**24))


def leave_files(argument: Any, size: int) -> list[float]:
    """Leave deep, unreadable folders, and shared memory, where no earlier call may have left any."""
    assert not list(place(None).iterdir())
    assert not Path("/dev/shm/rlpipe-test-left").exists()
    Path("/dev/shm/rlpipe-test-left").write_text("x")
    deep = place(None)
    for _ in range(50):
        deep /= "deep"
        deep.mkdir()
    (deep / "file").touch()
    (place(None) / "deep").chmod(0)
    return [1.0] * size


def share_segment(argument: Any, size: int) -> list[float]:
    """Leave shared memory of System V, where no earlier call may have left any."""
    import ctypes

    library, key, length = ctypes.CDLL(None), 471147, 4096
    assert library.shmget(key, length, 0o666) < 0
    return [float(library.shmget(key, length, 0o1666) >= 0)] * size


def double_without_end(argument: Any, size: int) -> None:
    """Start processes that start others, in sessions of their own, as fast as they can."""
    while True:
        with suppress(OSError):
            if os.fork() == 0:
                os.setsid()


def start_one_after_another(argument: Any, size: int) -> list[float]:
    """Start more processes than may live at one time."""
    for _ in range(600):
        os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
    return [1.0] * size


def look_at_processes(argument: Any, size: int) -> list[float]:
    """Return the number of processes that it sees besides itself and the first of its namespace."""
    return [float(len([entry for entry in os.listdir("/proc") if entry.isdigit()]) - 2)] * size


def find_in_environments(text: str, size: int) -> list[float]:
    """Return the number of processes whose environment it can read and has the text."""
    found = 0
    for file in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            found += text.encode() in file.read_bytes()
    return [float(found)] * size


def make_memory_file(argument: Any, size: int) -> None:
    os.memfd_create("x")


def own_signals(argument: int, size: int) -> None:
    """Ask for the signals of a socket to be sent to another process."""
    import fcntl

    left, _ = socket.socketpair()
    fcntl.fcntl(left, fcntl.F_SETOWN, argument)


def add_key(argument: Any, size: int) -> list[float]:
    import ctypes

    key = ctypes.CDLL(None).syscall(248 if os.uname().machine == "x86_64" else 217, b"user", b"rlpipe", b"x", 1, -4)
    return [float(key)] * size


def draw(argument: Any, size: int) -> list[float]:
    return [float(np.random.random()) for _ in range(size)]


async def waits(completions: list[Any], log_metric: Any, **columns: Any) -> list[float]:
    await asyncio.sleep(0.01)
    log_metric("size", len(completions))
    return [0.5] * len(completions)

"""Namespaces of Linux for one sandboxed call: processes, mounts, shared memory and network of its own.

All processes of a call end with the first process of its process namespace, however many they are, and its file
systems in memory vanish with them.
"""

from __future__ import annotations

import json
import os
import resource
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from glob import escape, glob
from typing import NoReturn

from rlpipe.scoring.processes import set_limit
from rlpipe.scoring.sandbox.seccomp import PR_SET_DUMPABLE, PR_SET_PDEATHSIG, call_prctl, check, libc

NEW_USER = 0x10000000
NEW = {"pid": 0x20000000, "mount": 0x00020000, "ipc": 0x08000000, "net": 0x40000000}
RECURSIVE, PRIVATE = 1 << 14, 1 << 18
NO_SETUID, NO_DEVICES, NO_EXECUTION = 1 << 1, 1 << 2, 1 << 3
SCRATCH_MB, SHARED_MEMORY_MB, MAX_FILES = 512, 256, 65536
PID_MAX = "/proc/sys/kernel/pid_max"
PID_MAX_SINCE = (6, 14)
"""Linux version since which each process namespace has a ``pid_max`` of its own."""
LAST_PID = "/proc/sys/kernel/ns_last_pid"
NUM_RESERVED = 300
"""Ids of a process namespace that are not given again."""
MAX_TASKS = NUM_RESERVED + 256
"""Most processes and threads of a call, by ``pid_max``; 256 once the reserved ids are skipped or used."""
MAX_USER_TASKS = 256
"""The same, by RLIMIT_NPROC, which does not bind root."""


@dataclass(kw_only=True, frozen=True)
class Namespaces:
    """Namespaces that this machine lets a call have; none without flags."""

    flags: int = 0
    has_mounts: bool = False
    """Whether it has its own /proc, and file systems in memory for its temporary files and /dev/shm."""
    limits_tasks: bool = False
    """Whether ``pid_max`` bounds its processes."""

    def describe(self) -> list[str]:
        """Return what they are, for a log."""
        if not self.flags:
            return []
        names = [name for name, flag in NEW.items() if self.flags & flag]
        names += ["user"] if self.flags & NEW_USER else []
        limits = ["temporary files in memory"] if self.has_mounts else []
        limits += [f"at most {MAX_TASKS} processes"] if self.limits_tasks else []
        return [f"namespaces ({', '.join(names)})", *limits]


@cache
def usable_namespaces() -> Namespaces:
    """Try which namespaces this machine allows, in processes that end at once."""
    for flags in (sum(NEW.values()), sum(NEW.values()) | NEW_USER):
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                _try_namespaces(flags, write_end)
            finally:
                os._exit(1)
        os.close(write_end)
        with open(read_end) as file:
            answer = file.read()
        os.waitpid(pid, 0)
        if answer:
            return Namespaces(flags=flags, **json.loads(answer))
    return Namespaces()


def _try_namespaces(flags: int, write_end: int) -> None:
    enter_namespaces(Namespaces(flags=flags), "/")
    steps = {"has_mounts": lambda: _mount_private("/tmp"), "limits_tasks": _limit_tasks}
    succeeded = {}
    for name, step in steps.items():
        try:
            step()
            succeeded[name] = True
        except OSError:
            succeeded[name] = False
    limit_user_tasks(Namespaces(flags=flags))
    pid = os.fork()  # RLIMIT_NPROC counts the whole machine's processes before Linux 5.14
    if pid == 0:
        os.write(write_end, json.dumps(succeeded).encode())
        os._exit(0)
    os.waitpid(pid, 0)


def enter_namespaces(namespaces: Namespaces, scratch: str, unused: Sequence[int] = ()) -> None:
    """Go on in new namespaces, in a new process; this process waits for that one's end, and ends in the same way.

    A third process, between the two, is the first of the process namespace: when it ends, or its parent ends, all in
    the namespace end. ``scratch`` becomes a file system in memory. The two outer processes close ``unused``. Raises
    ``OSError`` on failure.
    """
    if not namespaces.flags:
        return
    _unshare(namespaces.flags)
    read_alive, write_alive = os.pipe()
    status, write_status = os.pipe()
    if os.fork() != 0:
        for fd in (*unused, write_alive, write_status):
            os.close(fd)
        _exit_like(status)
    try:
        call_prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(read_alive)
        os.write(write_alive, b"x")  # fails if the parent ended before it could signal that
        if namespaces.has_mounts:
            _mount_private(scratch)
        if namespaces.limits_tasks:
            _limit_tasks()
        call = os.fork()
    except BaseException:  # noqa: BLE001 - this process must never go on as the call
        os._exit(1)
    if call != 0:
        for fd in unused:
            os.close(fd)
        _reap_until(call, write_status)
    for fd in (write_alive, status, write_status):
        os.close(fd)


def limit_user_tasks(namespaces: Namespaces) -> None:
    """Limit the processes and threads of this user in the call's user namespace, if it has one."""
    if namespaces.flags & NEW_USER:
        set_limit(resource.RLIMIT_NPROC, MAX_USER_TASKS)


def _unshare(flags: int) -> None:
    user, group = os.geteuid(), os.getegid()
    check(libc().unshare(flags))
    if flags & NEW_USER:  # user and group are mapped to themselves
        call_prctl(PR_SET_DUMPABLE, 1)  # otherwise the files of /proc/self belong to root
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    call_prctl(PR_SET_DUMPABLE, 0)


def _mount_private(scratch: str) -> None:
    _mount("none", "/", None, RECURSIVE | PRIVATE)
    _mount("proc", "/proc", "proc", NO_SETUID | NO_DEVICES | NO_EXECUTION)
    for target, megabytes, mode in ((scratch, SCRATCH_MB, 700), ("/dev/shm", SHARED_MEMORY_MB, 1777)):
        if os.path.isdir(target):
            options = f"size={megabytes}m,nr_inodes={MAX_FILES},mode={mode}"
            _mount("tmpfs", target, "tmpfs", NO_SETUID | NO_DEVICES, options)
    for folder in _ray_sockets():
        with suppress(OSError):  # its cluster may end meanwhile
            _mount("tmpfs", folder, "tmpfs", NO_SETUID | NO_DEVICES, "size=4k,nr_inodes=1,mode=500")


def _ray_sockets() -> set[str]:
    """Return the folders of the sockets of this machine's Ray clusters, through which a call could command Ray."""
    roots = [root for root in ("/tmp", os.environ.get("TMPDIR"), os.environ.get("RAY_TMPDIR")) if root]
    return {os.path.realpath(path) for root in roots for path in glob(f"{escape(root)}/ray/session_*/sockets")}


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    check(libc().mount(*encoded, flags, os.fsencode(options)))


def _limit_tasks() -> None:
    release = os.uname().release.split(".")[:2]
    if tuple(int(number) if number.isdigit() else 0 for number in release) < PID_MAX_SINCE:
        raise OSError("pid_max is that of the whole machine")
    with open(PID_MAX, "w") as file:
        file.write(str(MAX_TASKS))
    with suppress(OSError), open(LAST_PID, "w") as file:
        file.write(str(NUM_RESERVED))


def _reap_until(call: int, write_status: int) -> NoReturn:
    """Reap the orphans of the namespace until the call's process has ended; report its wait status."""
    with suppress(ChildProcessError):
        while (ended := os.wait())[0] != call:
            pass
        os.write(write_status, ended[1].to_bytes(4))
    os._exit(0)


def _exit_like(status: int) -> NoReturn:
    """End this process as the call's process ended, whose wait status comes by a pipe."""
    with open(status, "rb") as file:
        reported = file.read()
    code = os.waitstatus_to_exitcode(int.from_bytes(reported)) if reported else -signal.SIGKILL
    if code < 0:
        with suppress(OSError, ValueError):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)

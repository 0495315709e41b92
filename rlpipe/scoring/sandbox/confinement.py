"""Confinement of a sandboxed call, and further of a program that it starts: which files and sockets they reach.

Landlock restricts both. Where the kernel has none, bubblewrap gives each program a file system of its own. Source: the
kernel's ``Documentation/userspace-api/landlock.rst`` and ``include/uapi/linux/landlock.h``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path

from rlpipe.scoring.sandbox.namespaces import usable_namespaces
from rlpipe.scoring.sandbox.seccomp import (
    PR_SET_NO_NEW_PRIVS,
    build_program_filter,
    call_prctl,
    check,
    install_filter,
    libc,
    unsupported,
)

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, which are the same on all architectures."""
VERSION_FLAG, PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEVICE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
ALL_NETWORK, ALL_SCOPES = 0b11, 0b11
"""TCP bind and connect; abstract sockets and signals outside of the confined processes."""
BITS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of the kinds of access to files that a version knows; later versions know those of 5."""
NETWORK_SINCE, SCOPES_SINCE = 4, 6
SHARED_MEMORY = "/dev/shm"
READABLE = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group"),
    *("/etc/nsswitch.conf", "/etc/mime.types", "/dev/zero", "/dev/random", "/dev/urandom"),
)
"""Paths that a program may read besides Python's own."""
BWRAP_NAMESPACES = ("--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts")
"""Namespaces of a program; the network has none, because its setup needs a socket, which the filter refuses."""
BWRAP_TIMEOUT_S = 10.0


class _Ruleset(ctypes.Structure):
    _fields_ = [("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scopes", ctypes.c_uint64)]


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = [("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32)]


@cache
def landlock_version() -> int:
    """Return the version of Landlock on this machine, or 0 if there is none."""
    return max(0, libc().syscall(CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(VERSION_FLAG)))


@cache
def find_bwrap() -> str | None:
    """Return the path of bubblewrap, or None if it is not installed or can't confine a process on this machine."""
    if (path := shutil.which("bwrap")) is None:
        return None
    command = [path, *_bwrap_arguments(os.sep, readable_paths()), "--", sys.executable, "-I", "-c", ""]
    try:
        result = subprocess.run(command, capture_output=True, timeout=BWRAP_TIMEOUT_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return path if result.returncode == 0 else None


def find_obstacle() -> str | None:
    """Return why this machine can't confine what models write, or None if it can."""
    if (reason := unsupported()) is not None:
        return reason
    if landlock_version() == 0 and find_bwrap() is None:
        return (
            "its kernel has no Landlock (Linux 5.13 or later, if it is enabled), and bubblewrap (bwrap) is not "
            "installed or can't create namespaces"
        )
    return None


def describe_confinement() -> str:
    """Return what confines sandboxed calls and their programs on this machine, for a log."""
    version, bwrap = landlock_version(), None if landlock_version() else find_bwrap()
    measures = ["a filter of system calls"]
    measures += [f"Landlock {version}"] if version else []
    measures += [f"bubblewrap ({bwrap}) for programs"] if bwrap else []
    return ", ".join([*measures, *usable_namespaces().describe()])


def readable_paths(more: Iterable[str | Path] = ()) -> set[str]:
    """Return the real paths of what a program may read: the system's and Python's libraries, and ``more``."""
    return {os.path.realpath(path) for path in (*READABLE, sys.prefix, sys.base_prefix, sys.executable, *more)}


def confine_call(scratch: str) -> None:
    """Let this process and all that it starts write only below ``scratch`` and in /dev/shm, for good.

    Without Landlock it does nothing. Raises ``OSError`` on failure.
    """
    if version := landlock_version():
        _restrict(version, readable=["/"], writable=[scratch, SHARED_MEMORY])


def confine_program(folder: str, readable: Iterable[str | Path] = ()) -> tuple[list[str], Callable[[], None]]:
    """Return what to put before a program's command, and a function that its new process calls first.

    The program then writes only below ``folder`` and reads only there, in Python's and the system's libraries, and in
    ``readable``. It reaches no process but those it starts. Under Landlock it opens no sockets but pairs; under
    bubblewrap, local ones, too. The function raises ``OSError`` on failure.
    """
    paths, program_filter = readable_paths(readable), build_program_filter()
    version = landlock_version()
    bwrap = None if version else find_bwrap()

    def confine() -> None:
        call_prctl(PR_SET_NO_NEW_PRIVS, 1)
        if version:
            _restrict(version, readable=paths, writable=[folder])
            install_filter(program_filter)

    return [] if bwrap is None else [bwrap, *_bwrap_arguments(folder, paths), "--"], confine


def _bwrap_arguments(folder: str, readable: Iterable[str]) -> list[str]:
    binds = [argument for path in sorted({*readable, *READABLE[:5]}) for argument in ("--ro-bind-try", path, path)]
    folder_options = [] if folder == os.sep else ["--bind", folder, folder, "--chdir", folder]
    return [*BWRAP_NAMESPACES, "--die-with-parent", "--dev", "/dev", *binds, *folder_options]


def _restrict(version: int, *, readable: Iterable[str], writable: Sequence[str]) -> None:
    handled = (1 << BITS_BY_VERSION.get(version, 16)) - 1
    attributes = _Ruleset(handled, ALL_NETWORK * (version >= NETWORK_SINCE), ALL_SCOPES * (version >= SCOPES_SINCE))
    size = 24 if version >= SCOPES_SINCE else 16 if version >= NETWORK_SINCE else 8
    ruleset = check(libc().syscall(CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), ctypes.c_uint32(0)))
    for path in readable:
        _allow(ruleset, path, handled & READ)
    _allow(ruleset, os.devnull, handled & (READ_FILE | WRITE_FILE | TRUNCATE))
    for path in writable:
        _allow(ruleset, path, handled)
    call_prctl(PR_SET_NO_NEW_PRIVS, 1)
    check(libc().syscall(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)))
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # it is missing, or out of reach anyway
        return
    try:
        kinds = access if stat.S_ISDIR(os.fstat(descriptor).st_mode) else access & FILE_RIGHTS
        rule = _PathBeneath(kinds, descriptor)
        check(
            libc().syscall(
                ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0)
            )
        )
    finally:
        os.close(descriptor)

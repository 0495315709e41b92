"""Confinement of a program by Landlock and namespaces of Linux: which files it reaches, and which processes.

Source: the kernel's ``Documentation/userspace-api/landlock.rst`` and ``include/uapi/linux/landlock.h``.
"""

from __future__ import annotations

import ctypes
import os
import resource
import stat
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

from rlpipe.scoring.sandbox.seccomp import PR_SET_NO_NEW_PRIVS, call_prctl, libc

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""Numbers of the system calls, which are the same on all architectures."""
VERSION_FLAG, PATH_BENEATH = 1, 1
EXECUTE, WRITE_FILE, READ_FILE, READ_DIR, TRUNCATE, IOCTL_DEVICE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14, 1 << 15
OF_FILES = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEVICE
ALL_NETWORK, ALL_SCOPES = 0b11, 0b11
"""TCP bind and connect; abstract sockets and signals outside of the confined processes."""
BITS_BY_VERSION = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""Number of the kinds of access to files that a version knows; later versions know those of 5."""
NETWORK_SINCE, SCOPES_SINCE = 4, 6
NAMESPACES = {"user": 0x10000000, "ipc": 0x08000000, "net": 0x40000000}
MAX_PROCESSES = 64
"""Processes of a program at one time, if it does not run as root."""
READABLE = (
    *("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/etc/passwd", "/etc/group"),
    *("/etc/nsswitch.conf", "/etc/mime.types", "/dev/zero", "/dev/random", "/dev/urandom"),
)


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
def usable_namespaces() -> tuple[str, ...]:
    """Return the names of the namespaces that this process may create, all or none."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if libc().unshare(sum(NAMESPACES.values())) == 0 else 1)
    return tuple(NAMESPACES) if os.waitpid(pid, 0)[1] == 0 else ()


def describe_confinement() -> str:
    """Return what confines programs on this machine, for a log."""
    version, namespaces = landlock_version(), usable_namespaces()
    parts = ["a filter of system calls"]
    parts += [f"Landlock {version}"] if version else []
    parts += [f"namespaces ({', '.join(namespaces)})"] if namespaces else []
    missing = (
        [] if version else ["programs reach the files and processes of this user (Linux 5.13 or later has Landlock)"]
    )
    return "; ".join([", ".join(parts), *missing])


def confinement(folder: str, readable: Iterable[str | Path] = ()) -> Callable[[], None]:
    """Return a function that confines the process that calls it, for good, before it starts a program.

    It may then write only below ``folder``, and read only there, in Python's and the system's libraries, and in
    ``readable``; it reaches no process but those it starts, no network, and no memory that others share. What the
    machine does not have is left out. The function raises ``OSError`` on failure.
    """
    version, namespaces = landlock_version(), usable_namespaces()
    places = {os.path.realpath(path) for path in (*READABLE, sys.prefix, sys.base_prefix, sys.executable, *readable)}

    def confine() -> None:
        call_prctl(PR_SET_NO_NEW_PRIVS, 1)
        if namespaces:
            _check(libc().unshare(sum(NAMESPACES.values())))
            resource.setrlimit(resource.RLIMIT_NPROC, (MAX_PROCESSES, MAX_PROCESSES))
        if version:
            _restrict(version, folder, places)

    return confine


def _restrict(version: int, folder: str, readable: Iterable[str]) -> None:
    handled = (1 << BITS_BY_VERSION.get(version, 16)) - 1
    attributes = _Ruleset(handled, ALL_NETWORK * (version >= NETWORK_SINCE), ALL_SCOPES * (version >= SCOPES_SINCE))
    size = 24 if version >= SCOPES_SINCE else 16 if version >= NETWORK_SINCE else 8
    ruleset = _check(
        libc().syscall(CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(size), ctypes.c_uint32(0))
    )
    for path in readable:
        _allow(ruleset, path, handled & (EXECUTE | READ_FILE | READ_DIR))
    _allow(ruleset, os.devnull, handled & (READ_FILE | WRITE_FILE | TRUNCATE))
    _allow(ruleset, folder, handled)
    _check(libc().syscall(RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)))
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        kinds = access if stat.S_ISDIR(os.fstat(place).st_mode) else access & OF_FILES
        rule = _PathBeneath(kinds, place)
        _check(
            libc().syscall(
                ADD_RULE, ctypes.c_int(ruleset), ctypes.c_int(PATH_BENEATH), ctypes.byref(rule), ctypes.c_uint32(0)
            )
        )
    finally:
        os.close(place)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

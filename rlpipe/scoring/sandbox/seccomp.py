"""System-call filter for the calling process and all that it starts: no network, no access to outside processes.

The filter is a classic BPF program of instructions (code, jump if true, jump if false, constant), which reads the
kernel's ``struct seccomp_data``: the call's number, the architecture, and the arguments.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

Instruction = tuple[int, int, int, int]

LOAD, JUMP_EQUAL, JUMP_GREATER, JUMP_AT_LEAST, RETURN = 0x20, 0x15, 0x25, 0x35, 0x06
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_AT, SECOND_ARGUMENT_AT = 0, 4, 16, 24
ALLOW, KILL, FAIL_WITH = 0x7FFF0000, 0x80000000, 0x00050000
X32_CALLS = 0x40000000
PID_SPACE = 2**32
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 4, 22, 36, 1, 38
FILTER_MODE = 2
CAPABILITY_VERSION = 0x20080522
KEPT_CAPABILITIES = (1 << 1) | (1 << 2)
"""Capabilities that override file permissions, so that root keeps access to its files."""
SET_FILE_CAPABILITIES = 1 << 31


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Audit number of one architecture, and its numbers of system calls."""

    audit: int
    refused: tuple[int, ...]
    """Numbers of ptrace, process_vm_readv and process_vm_writev."""
    sockets: tuple[int, ...]
    """Numbers of socket and socketpair."""
    aimed: tuple[int, ...]
    """Numbers of kill, tkill, tgkill, rt_sigqueueinfo, rt_tgsigqueueinfo, prlimit64, whose first argument is a pid."""
    owners: tuple[tuple[int, tuple[int, ...]], ...]
    """Numbers of fcntl and ioctl, with those commands that name the process which gets a file's signals."""
    missing: tuple[int, ...]
    """Numbers of memfd_create, add_key, request_key and keyctl: memory and secrets that no limit counts."""


OWNER_COMMANDS = ((8, 15), (0x8901, 0x8902))
"""F_SETOWN and F_SETOWN_EX; FIOSETOWN and SIOCSPGRP."""
MACHINES = {
    "x86_64": Machine(
        audit=0xC000003E,
        refused=(101, 310, 311),
        sockets=(41, 53),
        aimed=(62, 200, 234, 129, 297, 302),
        owners=tuple(zip((72, 16), OWNER_COMMANDS, strict=True)),
        missing=(319, 248, 249, 250),
    ),
    "aarch64": Machine(
        audit=0xC00000B7,
        refused=(117, 270, 271),
        sockets=(198, 199),
        aimed=(129, 130, 131, 138, 240, 261),
        owners=tuple(zip((25, 29), OWNER_COMMANDS, strict=True)),
        missing=(279, 217, 218, 219),
    ),
}
REFUSED_EVERYWHERE = (424, 425, 426, 427, 438)
"""Numbers of pidfd_send_signal, io_uring_setup, io_uring_enter, io_uring_register (io_uring can open sockets that the
filter does not see) and pidfd_getfd."""
MISSING_EVERYWHERE = (447,)
"""System-call number of memfd_secret, equal on all architectures."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p)]


class _CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


def unsupported() -> str | None:
    """Return why this machine has no filter, or None if it has one."""
    if sys.platform == "linux" and platform.machine() in MACHINES:
        return None
    return f"it needs Linux on x86_64 or aarch64, but this is {platform.system()} on {platform.machine()}"


def build_filter(own: int, protected: Sequence[int]) -> list[Instruction]:
    """Return the filter for the process of id ``own``.

    Only AF_UNIX sockets can be opened; others fail with EACCES. Signals and limits reach the process itself, its group,
    and processes that began after it, judged by their id, but never ``protected``. Files in memory without a name, and
    the kernel's keys, fail with ENOSYS, as if the kernel were built without them; all else that is refused fails with
    EPERM.
    """
    machine = MACHINES[platform.machine()]
    program = _begin(machine)
    for number in (*machine.refused, *REFUSED_EVERYWHERE):
        program += _for_call(number, [(RETURN, 0, 0, FAIL_WITH | errno.EPERM)])
    for number in (*machine.missing, *MISSING_EVERYWHERE):
        program += _for_call(number, [(RETURN, 0, 0, FAIL_WITH | errno.ENOSYS)])
    for number in machine.sockets:
        program += _for_call(number, _allow_unix_only())
    for number, commands in machine.owners:
        program += _for_call(number, _refuse_commands(commands))
    for number in machine.aimed:
        program += _for_call(number, _allow_younger(own, protected))
    return [*program, (RETURN, 0, 0, ALLOW)]


def build_program_filter() -> list[Instruction]:
    """Return the filter that is added for a model's program, which opens no sockets except pairs."""
    machine = MACHINES[platform.machine()]
    refuse_sockets = _for_call(machine.sockets[0], [(RETURN, 0, 0, FAIL_WITH | errno.EACCES)])
    return [*_begin(machine), *refuse_sockets, (RETURN, 0, 0, ALLOW)]


def _begin(machine: Machine) -> list[Instruction]:
    """Return instructions that refuse calls of other architectures, and load the call's number to compare it."""
    return [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_EQUAL, 1, 0, machine.audit),
        (RETURN, 0, 0, KILL),
        (LOAD, 0, 0, NUMBER_AT),
        (JUMP_AT_LEAST, 0, 1, X32_CALLS),
        (RETURN, 0, 0, FAIL_WITH | errno.ENOSYS),
    ]


def _for_call(number: int, block: list[Instruction]) -> list[Instruction]:
    return [(JUMP_EQUAL, 0, len(block), number), *block]


def _allow_unix_only() -> list[Instruction]:
    return [
        (LOAD, 0, 0, ARGUMENT_AT),
        (JUMP_EQUAL, 0, 1, socket.AF_UNIX),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, FAIL_WITH | errno.EACCES),
    ]


def _refuse_commands(commands: Sequence[int]) -> list[Instruction]:
    checks = [(JUMP_EQUAL, len(commands) - index, 0, command) for index, command in enumerate(commands)]
    refusal = (RETURN, 0, 0, FAIL_WITH | errno.EPERM)
    return [(LOAD, 0, 0, SECOND_ARGUMENT_AT), *checks, (RETURN, 0, 0, ALLOW), refusal]


def _allow_younger(own_pid: int, protected: Sequence[int]) -> list[Instruction]:
    """Return the instructions that check the process in the first argument.

    0 is the process itself or its group; a negative number, which is a large unsigned one here, is another group.
    """
    refused = [number for pid in protected for number in (pid, PID_SPACE - pid)]
    checks: list[Instruction] = [
        *((JUMP_EQUAL, len(refused) - index + 2, 0, number) for index, number in enumerate(refused)),
        (JUMP_AT_LEAST, 0, 2, own_pid),
        (JUMP_GREATER, 1, 0, PID_SPACE - own_pid),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, FAIL_WITH | errno.EPERM),
    ]
    return [(LOAD, 0, 0, ARGUMENT_AT), (JUMP_EQUAL, len(checks) - 2, 0, 0), *checks]


def install_filter(program: Sequence[Instruction]) -> None:
    """Install a filter in this process for good, and bar it from gaining privileges; raise ``OSError`` on failure."""
    packed = b"".join(
        code.to_bytes(2, sys.byteorder) + bytes([true, false]) + constant.to_bytes(4, sys.byteorder)
        for code, true, false, constant in program
    )
    filter_program = _Program(len(program), packed)
    call_prctl(PR_SET_NO_NEW_PRIVS, 1)
    call_prctl(PR_SET_SECCOMP, FILTER_MODE, ctypes.addressof(filter_program))


def call_prctl(option: int, *arguments: int) -> None:
    """Call prctl; raise ``OSError`` on failure."""
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    if libc().prctl(ctypes.c_int(option), *padded) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}): {os.strerror(ctypes.get_errno())}")


def drop_capabilities(*, keep_mapping: bool = False) -> None:
    """Drop root's capabilities, except to read and write all files; raise ``OSError`` on failure.

    ``keep_mapping`` keeps the one without which root can't be mapped into another user namespace.
    """
    header = _CapabilityHeader(CAPABILITY_VERSION, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the same for capabilities 32 and up
    if libc().capget(ctypes.byref(header), sets) == 0:
        capabilities = sets[1] & (KEPT_CAPABILITIES | SET_FILE_CAPABILITIES * keep_mapping)
        sets[:] = [capabilities, capabilities, 0, 0, 0, 0]
        if libc().capset(ctypes.byref(header), sets) == 0:
            return
    raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def check(result: int) -> int:
    """Return the result of a call of the C library; raise ``OSError`` if it failed."""
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


@cache
def libc() -> ctypes.CDLL:
    """Return the C library, whose calls leave their error in ``ctypes.get_errno``."""
    return ctypes.CDLL(None, use_errno=True)

"""The limit of a scoring process's memory."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
MIN_FREE = 0.5
"""Share of the limit that must be free again after a MemoryError, or the process is worn out."""


def data_bytes() -> int:
    """Private, writable memory of this process: what RLIMIT_DATA counts. Shared memory is no part of it, such as the
    object store, which RLIMIT_AS would count."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData")


def lift_memory_limit() -> None:
    """Takes away the limit that this process has set or inherited."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


@dataclass(kw_only=True, frozen=True)
class MemoryLimit:
    """How much a process may take beyond what it has when the limit is set."""

    option: str
    """The option that sets it."""
    gb: float

    def __str__(self) -> str:
        return f"{self.option}={self.gb:g}"

    def apply(self) -> int:
        """Sets it for this process, and for each process that it starts; returns the bytes allowed, on Linux."""
        if sys.platform != "linux":
            return 0
        allowed = data_bytes() + int(self.gb * GIB)
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = allowed if hard == resource.RLIM_INFINITY else min(allowed, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))
        return soft

    def is_worn_out(self, allowed: int) -> bool:
        """Whether the process holds on to so much that the next call would fail as well."""
        return sys.platform == "linux" and allowed - data_bytes() < MIN_FREE * self.gb * GIB

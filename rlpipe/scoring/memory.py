"""Memory limit of a scoring process."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
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

    def is_worn_out(self, allowed: int) -> bool:
        """Return whether the process holds so much memory that the next call would fail as well."""
        return sys.platform == "linux" and allowed - data_bytes() < MIN_FREE * self.gb * GIB

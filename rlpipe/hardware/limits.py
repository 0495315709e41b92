"""How much of the host this process may use: its memory, its cores, by the machine and by the control groups."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


def host_memory_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """The machine's memory, or what the control groups leave of it."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [
        *_read_limits(groups, own, "memory.max", controller=""),
        *_read_limits(groups, own, "memory.limit_in_bytes", controller="memory"),
    ]
    return min([physical, *(int(limit) for limit, *_ in limits if limit.isdecimal())])


def num_cores(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Cores that the process may run on, or as many as the control groups give it the time of."""
    there = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = _read_limits(groups, own, "cpu.max", controller="")  # microseconds of computing in microseconds of time
    shares = [int(quota[0]) / int(quota[1]) for quota in quotas if quota[0].isdecimal()]
    return max(1, math.ceil(min([there, *shares])))


def _read_limits(groups: Path, own: Path, file: str, *, controller: str) -> Iterator[list[str]]:
    """The words of a file in the process's control group and all above it; ``controller`` is empty for version 2."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = groups / controller
            folder = top / path.lstrip("/")
            for place in (folder, *folder.parents):
                if place.is_relative_to(top) and (place / file).is_file():
                    yield (place / file).read_text().split()

"""CPU cores and memory that this process may use, within its control group."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from rlpipe.configs.schema.learner_config import LearnerConfig

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


class _MemoryFiles(NamedTuple):
    limit: str
    used: str
    kept: tuple[str, str]
    """Entries of ``memory.stat`` with the cached files that can be dropped."""


MEMORY_FILES = {
    "": _MemoryFiles("memory.max", "memory.current", ("inactive_file", "active_file")),
    "memory": _MemoryFiles(
        "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
    ),
}
"""Files by controller, whose name is empty for cgroup version 2."""


def host_memory_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return the machine's memory, or the lowest limit of the control groups if that is less."""
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = (_read_number(folder / files.limit) for files, folder in _memory_folders(groups, own))
    return min([physical, *(limit for limit in limits if limit is not None)])


def free_host_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return the bytes of host memory that can still be allocated; cached files count as free."""
    available = [psutil.virtual_memory().available]
    for files, folder in _memory_folders(groups, own):
        if (limit := _read_number(folder / files.limit)) is not None:
            cached = sum(_read_entry(folder / "memory.stat", name) for name in files.kept)
            available.append(limit - (_read_number(folder / files.used) or 0) + cached)
    return max(0, min(available))


def num_cores(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return the number of cores that the process may run on, or that its CPU quota is worth if that is less."""
    num_available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([num_available, *_cpu_shares(groups, own)])))


def _cpu_shares(groups: Path, own: Path) -> Iterator[float]:
    """Yield the cores that the process's control group, and each above it, may use in the mean; none if unlimited."""
    for folder in _folders(groups, own, ""):
        words = (folder / "cpu.max").read_text().split() if (folder / "cpu.max").is_file() else []
        if len(words) == 2 and words[0].isdecimal():  # microseconds of computing in microseconds of time
            yield int(words[0]) / int(words[1])
    for folder in _folders(groups, own, "cpu"):
        quota, period = (_read_number(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota is not None and period:  # a quota of -1 is no limit
            yield quota / period


def _memory_folders(groups: Path, own: Path) -> Iterator[tuple[_MemoryFiles, Path]]:
    for controller, files in MEMORY_FILES.items():
        for folder in _folders(groups, own, controller):
            yield files, folder


def _read_number(file: Path) -> int | None:
    word = file.read_text().strip() if file.is_file() else ""
    return int(word) if word.isdecimal() else None


def _read_entry(file: Path, name: str) -> int:
    lines = file.read_text().splitlines() if file.is_file() else []
    return next((int(line.split()[1]) for line in lines if line.split()[:1] == [name]), 0)


def _folders(groups: Path, own: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the process's control group and all above it; ``controller`` is empty for version 2."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            top = groups / controller
            folder = top / path.lstrip("/")
            yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(top))


def learner_threads(learner: LearnerConfig) -> int:
    """Return the number of threads: as configured, or else the number of CPUs that Ray reserves.

    A rank with a GPU whose weights are updated on the host takes at least its share of the machine's cores, which are
    idle otherwise; the predicted time of that update assumes the same.
    """
    if learner.num_threads is not None:
        return learner.num_threads
    reserved = max(1, int(learner.num_cpus))
    updates_on_host = learner.offload != "none" or (learner.strategy == "zero3" and learner.zero3.offload_optimizer)
    if not learner.num_gpus or not updates_on_host:
        return reserved
    return max(reserved, num_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

"""The processes of a run on this machine, by kind, so that benchmarks and tests can measure, end or freeze them."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

TITLES = {
    "rollout": "ray::RolloutActor",
    "scorer": "ray::ScoringActor",
    "episodes": "ray::EpisodeActor",
    "replay": "ray::ReplayActor",
    "weights": r"ray::\w*WeightsActor",
    "dataset": "ray::DatasetActor",
    "learner": "ray::RayTrainWorker",
    "trainer": "ray::TrainController",
    "environment": r".*rlpipe\.episodes\.isolated_host",
    "server": r".*chaos_episodes\.py server",
    "agent": r".*chaos_episodes\.py agent",
}
"""Titles of the processes of each kind, as the start of a regex; most are Ray's."""


def find_processes(kind: str, root: int | None = None) -> list[int]:
    """Return the process ids of a kind, oldest first, among the descendants of ``root`` (default: this process).

    ``"scorer.start"`` selects the scorers that are in their ``start()`` at the moment.
    """
    kind, dot, method = kind.partition(".")
    title = re.compile(TITLES[kind] + re.escape(dot + method))
    found = []
    for process in psutil.Process(root).children(recursive=True):
        try:
            if title.match(" ".join(process.cmdline())):
                found.append((process.create_time(), process.pid))
        except psutil.Error:  # it has just ended
            continue
    return [pid for _, pid in sorted(found)]


def status_bytes(name: str, pid: int | str = "self") -> int:
    """Return a figure of a process's memory, such as ``VmHWM``, in bytes; 0 once the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:")), 0)

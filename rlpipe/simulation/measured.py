"""Seconds that a run has measured, from its ledger, and those that its groups would have taken alone on an engine."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from rlpipe.configs.compose import load_config
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import DataError

Spans = NDArray[np.float64]  # [groups, 2]: from, until


@dataclass(kw_only=True, frozen=True)
class Measured:
    """Measured seconds by part, in the order of groups and steps; empty if the run has measured nothing yet."""

    on_engines: list[Spans]
    """For each engine: when it received its groups, and when they were generated."""
    score: list[float]
    """Seconds of scoring each group, summed over the pools."""
    train: list[float]
    sync: list[float]


def read_measured(run: Path) -> Measured:
    """Read the ledger of ``run``, even during the run; raise ``DataError`` if there is none, or it can't be read."""
    path = run / "ledger.sqlite"
    if not path.is_file():
        raise DataError(f"{path} does not exist: --from takes the folder of a run")
    try:
        with closing(sqlite3.connect(f"file:{quote(str(path.absolute()))}?mode=ro", uri=True)) as connection:
            generated = connection.execute(
                "SELECT engine, generated_at - generate_s, generated_at FROM groups "
                "WHERE generate_s IS NOT NULL AND generated_at IS NOT NULL ORDER BY group_id"
            ).fetchall()
            scored = connection.execute("SELECT score_s FROM groups WHERE score_s IS NOT NULL ORDER BY group_id")
            score = [seconds for (seconds,) in scored]
            steps = [json.loads(text) for (text,) in connection.execute("SELECT metrics FROM steps ORDER BY step")]
    except (sqlite3.Error, ValueError) as error:
        raise DataError(f"{path} can't be read: {error}") from None
    by_engine: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for engine, received_at, generated_at in generated:
        by_engine[engine].append((received_at, generated_at))
    return Measured(
        on_engines=[np.array(spans, np.float64) for spans in by_engine.values()],
        score=score,
        train=_column(steps, "time/train"),
        sync=_column(steps, "time/sync"),
    )


def read_run_config(run: Path) -> Config | None:
    """Return the config that a run was started with, or None if its folder holds none."""
    path = run / "config.yaml"
    return load_config(file=path, need_files=False) if path.is_file() else None


def work_seconds(spans: Spans, *, groups_at_once: int, slowdown: float) -> list[float]:
    """Return the seconds that groups of one engine would have taken alone: without waiting, and without the others."""
    sampled = _without_wait(spans, groups_at_once)
    begun, ended = np.sort(sampled[:, 0]), np.sort(sampled[:, 1])
    edges = np.unique(sampled)
    running = np.searchsorted(begun, edges, "right") - np.searchsorted(ended, edges, "right")
    stretch = 1 + (slowdown - 1) * np.maximum(running - 1, 0) / max(groups_at_once - 1, 1)
    work = np.concatenate([[0.0], np.cumsum(np.diff(edges) / stretch[:-1])])
    seconds = np.interp(sampled[:, 1], edges, work) - np.interp(sampled[:, 0], edges, work)
    return np.maximum(seconds, 0.0).tolist()


def _without_wait(spans: Spans, groups_at_once: int) -> Spans:
    """Return the spans without the wait: groups begin in the order of receipt, each as soon as a place is free."""
    busy_until: list[float] = []
    sampled = spans[np.argsort(spans[:, 0], kind="stable")].copy()
    for span in sampled:
        if len(busy_until) >= groups_at_once:
            span[0] = min(max(span[0], heappop(busy_until)), span[1])
        heappush(busy_until, span[1])
    return sampled


def _column(steps: Sequence[dict[str, float | None]], metric: str) -> list[float]:
    return [value for step in steps if (value := step.get(metric)) is not None and value >= 0]

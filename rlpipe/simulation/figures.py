"""What a simulation says of a set-up: its throughput, what its parts do, and how stale the groups are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlpipe.simulation.simulator import History


@dataclass(kw_only=True, frozen=True)
class Figures:
    """Over the steps after those that fill the pipeline; shares are of the time, and of all machines of a kind."""

    num_steps: int
    """Those that were trained in all."""
    simulated_s: float
    counted_steps: int
    steps_per_second: float
    groups_per_second: float
    rollouts_per_second: float
    relative_error: float
    """One standard error of the throughput, as a share of it; 0 where one step alone was counted."""
    engines_busy: float
    places_in_use: float
    scorers_busy: Mapping[str, float]
    learner: Mapping[str, float]
    """Share of the time in which it trains, and in which it waits for what."""
    staleness_mean: float
    staleness_max: int
    """Over all steps."""
    buffered_mean: float
    buffered_max: int


def measure(history: History) -> Figures:
    """The figures of a simulation in which a step at least was trained."""
    setup, first, last = history.setup, first_counted(history), history.num_steps
    begin, end = history.marks[first], history.marks[last]
    seconds = end.at_s - begin.at_s
    rate = throughput(history, first, last)
    return Figures(
        num_steps=last,
        simulated_s=history.ended_s,
        counted_steps=last - first,
        steps_per_second=rate,
        groups_per_second=rate * setup.groups_per_step,
        rollouts_per_second=rate * setup.groups_per_step * setup.group_size,
        relative_error=_relative_error(history, first),
        engines_busy=(end.busy_engines - begin.busy_engines) / seconds / setup.num_engines,
        places_in_use=(end.running - begin.running) / seconds / setup.num_engines / setup.groups_per_engine,
        scorers_busy={
            name: (end.busy_scorers[name] - begin.busy_scorers.get(name, 0.0)) / seconds / size
            for name, size in setup.pools.items()
        },
        learner={name: (end.learner[name] - begin.learner.get(name, 0.0)) / seconds for name in end.learner},
        staleness_mean=(end.staleness - begin.staleness) / (last - first) / setup.groups_per_step,
        staleness_max=history.max_staleness,
        buffered_mean=(end.buffered - begin.buffered) / seconds,
        buffered_max=history.max_buffered,
    )


def first_counted(history: History) -> int:
    """The mark from which on steps are counted: the pipeline is full, or half of the steps are trained."""
    return min(history.setup.max_staleness + 1, history.num_steps // 2)


def throughput(history: History, first: int, last: int) -> float:
    """Steps per second between two marks."""
    return (last - first) / (history.marks[last].at_s - history.marks[first].at_s)


def _relative_error(history: History, first: int) -> float:
    seconds = np.diff([mark.at_s for mark in history.marks[first:]])
    return float(seconds.std(ddof=1) / seconds.mean() / math.sqrt(len(seconds))) if len(seconds) > 1 else 0.0

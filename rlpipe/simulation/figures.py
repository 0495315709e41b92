"""Figures of a simulated set-up: its throughput, how busy its parts are, and how stale the groups are."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rlpipe.simulation.simulator import History


@dataclass(kw_only=True, frozen=True)
class Figures:
    """Figures over the steps after those that fill the pipeline; shares are of the time of all machines of a kind."""

    num_steps: int
    """Steps trained in all."""
    simulated_s: float
    counted_steps: int
    steps_per_second: float
    groups_per_second: float
    rollouts_per_second: float
    relative_error: float
    """Standard error of the throughput, as a share of it; 0 if only one step was counted."""
    engines_busy: float
    places_in_use: float
    scorers_busy: Mapping[str, float]
    learner: Mapping[str, float]
    """Shares of the time in which the learner trains, and in which it waits, by cause."""
    staleness_mean: float
    staleness_max: int
    """Maximum over all steps."""
    buffered_mean: float
    buffered_max: int


def measure(history: History) -> Figures:
    """Return the figures of a simulation that trained at least one step."""
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
    """Return the mark from which steps are counted: the pipeline is full, or half of the steps are trained."""
    return min(history.setup.max_staleness + 1, history.num_steps // 2)


def throughput(history: History, first: int, last: int) -> float:
    """Return the steps per second between two marks."""
    return (last - first) / (history.marks[last].at_s - history.marks[first].at_s)


def _relative_error(history: History, first: int) -> float:
    seconds = np.diff([mark.at_s for mark in history.marks[first:]])
    return float(seconds.std(ddof=1) / seconds.mean() / math.sqrt(len(seconds))) if len(seconds) > 1 else 0.0

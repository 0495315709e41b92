"""Study of a config: simulations under several settings, and which one to choose."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace

import numpy as np

from rlpipe.common.imports import without_collection
from rlpipe.errors import InputError
from rlpipe.simulation.setup import Setup
from rlpipe.simulation.simulator import GENERATE, SCORE, SLOT, TRAIN, WEIGHTS, History, simulate


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
    slots_in_use: float
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
        slots_in_use=(end.running - begin.running) / seconds / setup.num_engines / setup.groups_per_engine,
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


MAX_GROUPS = 100_000
"""Groups in each of the compared simulations."""


@dataclass(kw_only=True, frozen=True)
class Advice:
    """Change of the setup, and its effect."""

    change: str
    steps_per_second: float
    gain: float
    """Relative increase of the throughput by the change."""


def advise(base: History, *, seed: int, add: int = 1) -> list[Advice]:
    """Return the possible changes, the most helpful first; ``add`` machines of a kind are added at one time.

    Each change is compared with the unchanged setup over the same steps, those after the pipeline is full.
    """
    fill = base.setup.max_staleness + 2
    last = min(base.num_steps, max(2 * fill, MAX_GROUPS // base.setup.groups_per_step))
    first = min(fill, last // 2)
    base_rate = throughput(base, first, last)
    results = []
    for change, setup in changes(base.setup, add):
        changed_rate = throughput(simulate(setup, seed=seed, limit_s=math.inf, max_steps=last), first, last)
        results.append(Advice(change=change, steps_per_second=changed_rate, gain=changed_rate / base_rate - 1))
    return sorted(results, key=lambda advice: -advice.gain)


def changes(setup: Setup, add: int) -> Iterator[tuple[str, Setup]]:
    """Yield each change in words, with the changed setup."""
    added = "one more" if add == 1 else f"{add} more"
    end = "" if add == 1 else "s"
    times = setup.times
    yield f"{added} engine{end}", replace(setup, num_engines=setup.num_engines + add)
    for pool, size in setup.pools.items():
        processes = f"process{'' if add == 1 else 'es'}"
        yield f"{added} {processes} of {pool}", replace(setup, pools={**setup.pools, pool: size + add})
    faster = times.train.scaled(setup.num_ranks / (setup.num_ranks + add))
    yield (
        f"{added} learner rank{end}",
        replace(setup, num_ranks=setup.num_ranks + add, times=replace(times, train=faster)),
    )
    yield "one more version of staleness", replace(setup, max_staleness=setup.max_staleness + 1)
    yield "half the sync time", replace(setup, times=replace(times, sync=times.sync.scaled(0.5)))


WAITED_FOR = {GENERATE: "generation", SCORE: "scoring", SLOT: "a slot on an engine", WEIGHTS: "weights to be served"}
FEW_STEPS = 10


@dataclass(kw_only=True, frozen=True)
class Study:
    """Simulated setup and its results."""

    setup: Setup
    figures: Figures
    advice: Sequence[Advice]

    def to_json(self) -> str:
        """Return one JSON object: ``setup``, the figures by name, and ``advice``."""
        setup = {name: value for name, value in vars(self.setup).items() if name != "times"}
        times = {name: str(value) for name, value in named_times(self.setup).items()}
        advice = [asdict(entry) for entry in self.advice]
        return json.dumps({"setup": {**setup, "times": times}, **asdict(self.figures), "advice": advice})

    def to_text(self) -> str:
        rows = [*describe_setup(self.setup), ("", ""), *describe_figures(self.setup, self.figures)]
        width = max(len(label) for label, _ in rows)
        lines = [f"{label:<{width}}  {text}".rstrip() for label, text in rows]
        return "\n".join([*lines, "", *describe_advice(self.advice, self.figures)])


def study(setup: Setup, *, seed: int, minutes: float, add: int = 1) -> Study:
    """Simulate the setup for ``minutes`` of virtual time, or until its last step, and then each change to it."""
    with without_collection():  # a simulation makes no cycles, and the search for them takes a third of its time
        history = simulate(setup, seed=seed, limit_s=60 * minutes)
        if not history.num_steps:
            raise InputError(
                f"no step ends within {minutes:g} minutes: increase --minutes, or check that the times are in seconds"
            )
        return Study(setup=setup, figures=measure(history), advice=advise(history, seed=seed, add=add))


def named_times(setup: Setup) -> Mapping[str, object]:
    """Return the distributions by the name of their part."""
    times = setup.times
    scores = {f"score, {pool}": distribution for pool, distribution in times.score.items()}
    return {"generate": times.generate, **scores, "train": times.train, "sync": times.sync}


def describe_setup(setup: Setup) -> Iterator[tuple[str, str]]:
    slower = f", {setup.slowdown:g} times as slow when full" if setup.slowdown != 1 else ""
    yield "engines", f"{setup.num_engines:,}, each with {setup.groups_per_engine:,} groups at a time{slower}"
    for pool, size in setup.pools.items():
        yield pool, f"{size:,} processes"
    yield "ranks", f"{setup.num_ranks:,}"
    yield "step", f"{setup.groups_per_step:,} groups of {setup.group_size:,} rollouts"
    yield "staleness", f"at most {setup.max_staleness}"
    for name, distribution in named_times(setup).items():
        yield name, str(distribution)


def describe_figures(setup: Setup, figures: Figures) -> Iterator[tuple[str, str]]:
    f = figures
    suffix = " (the whole run)" if f.num_steps == setup.num_steps else ""
    yield "seconds", f"{f.simulated_s:.6g}{suffix}"
    yield "steps", f"{f.num_steps:,}, of which the last {f.counted_steps:,} count"
    yield "steps/s", f"{f.steps_per_second:.4g} (± {f.relative_error:.1%}), {1 / f.steps_per_second:.4g} s per step"
    yield "groups/s", f"{f.groups_per_second:,.4g}"
    yield "rollouts/s", f"{f.rollouts_per_second:,.4g}"
    yield "engines", f"busy {f.engines_busy:.1%}, slots in use {f.slots_in_use:.1%}"
    for pool, busy in f.scorers_busy.items():
        yield pool, f"busy {busy:.1%}"
    waits = ", ".join(f"{label} {f.learner[phase]:.1%}" for phase, label in WAITED_FOR.items())
    yield "learner", f"trains {f.learner[TRAIN]:.1%}, waits for {waits}"
    groups = f"{f.num_steps * setup.groups_per_step:,} groups"
    yield "staleness", f"mean {f.staleness_mean:.2f}, at most {f.staleness_max} in {groups}; {bound(setup, figures)}"
    yield "buffer", f"mean {f.buffered_mean:,.1f} scored groups, at most {f.buffered_max:,}"


def bound(setup: Setup, figures: Figures) -> str:
    verdict = "never exceeded" if figures.staleness_max <= setup.max_staleness else "EXCEEDED"
    return f"the bound {setup.max_staleness} was {verdict}"


def describe_advice(advice: Sequence[Advice], figures: Figures) -> Iterator[str]:
    """Yield the gains, the greatest first, and whether the greatest exceeds the random variation."""
    best = advice[0]
    if best.gain > max(figures.relative_error, 1e-3):
        yield f"the largest gain is from {best.change}; throughput with"
    else:
        yield "no change gains more than the random variation; throughput with"
    for entry in advice:
        yield f"  {entry.gain:+8.2%}  {entry.change}"
    if figures.counted_steps < FEW_STEPS:
        yield f"only {figures.counted_steps} steps count: increase --minutes for more reliable figures"

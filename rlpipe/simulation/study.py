"""Study of a set-up: its figures and the advice on changes, as text and as JSON."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rlpipe.errors import InputError
from rlpipe.simulation.advice import Advice, advise
from rlpipe.simulation.figures import Figures, measure
from rlpipe.simulation.setup import Setup
from rlpipe.simulation.simulator import GENERATE, PLACE, SCORE, TRAIN, WEIGHTS, simulate

WAITED_FOR = {GENERATE: "generation", SCORE: "scoring", PLACE: "a place on an engine", WEIGHTS: "weights to be served"}
FEW_STEPS = 10


@dataclass(kw_only=True, frozen=True)
class Study:
    """Simulated set-up and its results."""

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
    """Simulate the set-up for ``minutes`` of virtual time, or until its last step, and then each change to it."""
    with uncollected():
        history = simulate(setup, seed=seed, limit_s=60 * minutes)
        if not history.num_steps:
            raise InputError(f"no step ends within {minutes:g} minutes: give more --minutes, or times in seconds")
        return Study(setup=setup, figures=measure(history), advice=advise(history, seed=seed, add=add))


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's collector of cycles: a simulation makes none, and the search takes a third of its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def named_times(setup: Setup) -> Mapping[str, object]:
    """Return the distributions by the name of their part."""
    times = setup.times
    scores = {f"score, {pool}": distribution for pool, distribution in times.score.items()}
    return {"generate": times.generate, **scores, "train": times.train, "sync": times.sync}


def describe_setup(setup: Setup) -> Iterator[tuple[str, str]]:
    slower = f", {setup.slowdown:g} times as slow when full" if setup.slowdown != 1 else ""
    yield "engines", f"{setup.num_engines:,}, each with {setup.groups_per_engine:,} groups at one time{slower}"
    for pool, size in setup.pools.items():
        yield pool, f"{size:,} processes"
    yield "ranks", f"{setup.num_ranks:,}"
    yield "step", f"{setup.groups_per_step:,} groups of {setup.group_size:,} rollouts"
    yield "staleness", f"at most {setup.max_staleness}"
    for name, distribution in named_times(setup).items():
        yield name, str(distribution)


def describe_figures(setup: Setup, figures: Figures) -> Iterator[tuple[str, str]]:
    f = figures
    whole = " (the whole run)" if f.num_steps == setup.num_steps else ""
    yield "seconds", f"{f.simulated_s:.6g}{whole}"
    yield "steps", f"{f.num_steps:,}, of which the last {f.counted_steps:,} count"
    yield "steps/s", f"{f.steps_per_second:.4g} (± {f.relative_error:.1%}), {1 / f.steps_per_second:.4g} s a step"
    yield "groups/s", f"{f.groups_per_second:,.4g}"
    yield "rollouts/s", f"{f.rollouts_per_second:,.4g}"
    yield "engines", f"busy {f.engines_busy:.1%}, places in use {f.places_in_use:.1%}"
    for pool, busy in f.scorers_busy.items():
        yield pool, f"busy {busy:.1%}"
    waits = ", ".join(f"{what} {f.learner[part]:.1%}" for part, what in WAITED_FOR.items())
    yield "learner", f"trains {f.learner[TRAIN]:.1%}, waits for {waits}"
    groups = f"{f.num_steps * setup.groups_per_step:,} groups"
    yield "staleness", f"mean {f.staleness_mean:.2f}, at most {f.staleness_max} in {groups}; {bound(setup, figures)}"
    yield "buffer", f"mean {f.buffered_mean:,.1f} scored groups, at most {f.buffered_max:,}"


def bound(setup: Setup, figures: Figures) -> str:
    kept = "never passed" if figures.staleness_max <= setup.max_staleness else "PASSED"
    return f"the bound {setup.max_staleness} was {kept}"


def describe_advice(advice: Sequence[Advice], figures: Figures) -> Iterator[str]:
    """Yield the gains, the greatest first, and whether the greatest exceeds the random variation."""
    best = advice[0]
    if best.gain > max(figures.relative_error, 1e-3):
        yield f"most is gained by {best.change}; throughput with"
    else:
        yield "none of these gains more than the draws vary by; throughput with"
    for entry in advice:
        yield f"  {entry.gain:+8.2%}  {entry.change}"
    if figures.counted_steps < FEW_STEPS:
        yield f"only {figures.counted_steps} steps count: give more --minutes for figures that chance does not sway"

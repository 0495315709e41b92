"""Advice on what would raise throughput: the same draws, simulated with one change at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlpipe.simulation.figures import throughput
from rlpipe.simulation.setup import Setup
from rlpipe.simulation.simulator import History, simulate

MAX_GROUPS = 100_000
"""Groups in each of the compared simulations."""


@dataclass(kw_only=True, frozen=True)
class Advice:
    """Change of the set-up, and its effect."""

    change: str
    steps_per_second: float
    gain: float
    """Relative increase of the throughput by the change."""


def advise(base: History, *, seed: int, add: int = 1) -> list[Advice]:
    """Return the possible changes, the most helpful first; ``add`` machines of a kind are added at one time.

    Each change is compared with the unchanged set-up over the same steps, those after the pipeline is full.
    """
    fill = base.setup.max_staleness + 2
    last = min(base.num_steps, max(2 * fill, MAX_GROUPS // base.setup.groups_per_step))
    first = min(fill, last // 2)
    before = throughput(base, first, last)
    found = []
    for change, setup in changes(base.setup, add):
        after = throughput(simulate(setup, seed=seed, limit_s=math.inf, max_steps=last), first, last)
        found.append(Advice(change=change, steps_per_second=after, gain=after / before - 1))
    return sorted(found, key=lambda advice: -advice.gain)


def changes(setup: Setup, add: int) -> Iterator[tuple[str, Setup]]:
    """Yield each change in words, with the changed set-up."""
    more = "one more" if add == 1 else f"{add} more"
    end = "" if add == 1 else "s"
    times = setup.times
    yield f"{more} engine{end}", replace(setup, num_engines=setup.num_engines + add)
    for pool, size in setup.pools.items():
        processes = f"process{'' if add == 1 else 'es'}"
        yield f"{more} {processes} of {pool}", replace(setup, pools={**setup.pools, pool: size + add})
    faster = times.train.scaled(setup.num_ranks / (setup.num_ranks + add))
    yield (
        f"{more} learner rank{end}",
        replace(setup, num_ranks=setup.num_ranks + add, times=replace(times, train=faster)),
    )
    yield "one more version of staleness", replace(setup, max_staleness=setup.max_staleness + 1)
    yield "half the sync time", replace(setup, times=replace(times, sync=times.sync.scaled(0.5)))

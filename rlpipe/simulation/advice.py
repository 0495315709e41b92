"""Where more would help: the same draws, simulated with one more of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from rlpipe.simulation.figures import throughput
from rlpipe.simulation.setup import Setup
from rlpipe.simulation.simulator import History, simulate

MAX_GROUPS = 100_000
"""Groups of each of the simulations that are compared."""


@dataclass(kw_only=True, frozen=True)
class Advice:
    """A change of the set-up, and what it does."""

    change: str
    steps_per_second: float
    gain: float
    """More throughput, as a share of what it is without the change."""


def advise(base: History, *, seed: int, add: int = 1) -> list[Advice]:
    """The changes, the one that helps most first; ``add`` machines of a kind come at one time.

    Each is compared over the same steps, those after the pipeline is full, with the set-up as it is.
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
    """Each change in words, and the set-up with it."""
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

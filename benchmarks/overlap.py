"""Async efficiency: how close a step comes to the longer of generation and training, if both take given times.

Engines and learner sleep (``benchmarks.stand_ins`` lists what is real). ``generate`` is the seconds that the engines
together need for the groups of one step: each serves its share of them at one time, every group takes ``generate``
seconds. ``train`` is the seconds of a learner step. An asynchronous run can do 1/max(generate, train) steps a second, a
synchronous one 1/(generate + train); the efficiency is the share of that which is reached.

The last table draws the seconds of every group from a lognormal distribution with the mean ``generate``. Its bound is
the rate of the same groups if nothing else takes time (``benchmarks.ideal_schedule``), so that stragglers count as
unavoidable.

Run: ``python -m benchmarks.overlap``. ``worst_efficiency`` is that of the asynchronous cells with given times.
"""

from __future__ import annotations

import argparse
import asyncio
import heapq
import json
import math
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray

from benchmarks.ideal_schedule import IdealRun
from benchmarks.stand_ins import (
    COMPLETION_TOKENS,
    StandInEngine,
    StandInReporter,
    StandInWorkers,
    run_pipeline,
    start_workers,
)
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.root_config import Config, ReplayConfig
from rlpipe.types import RolloutGroup

RATIOS = (0.25, 0.5, 0.8, 1.0, 1.25, 2.0, 4.0)
"""Ratios of generation to training time."""
RANDOM_RATIOS = (0.5, 1.0, 2.0)
DECODE_S = 0.01
"""Longest sleep of an engine; like a real one, it takes requests and weights between two decoding steps."""


@dataclass(kw_only=True, frozen=True)
class Work:
    """Parameters of one line of a table; times are in seconds."""

    generate_s: float
    train_s: float
    max_staleness: int
    sigma: float = 0.0
    """Standard deviation of the logarithm of a group's seconds; 0: all take ``generate_s``."""
    num_engines: int
    groups_per_step: int
    group_size: int
    num_steps: int
    """Steps after the warm-up."""
    warmup_steps: int

    @property
    def num_slots(self) -> int:
        """Groups that an engine serves at one time."""
        return -(-self.groups_per_step // self.num_engines)

    def group_seconds(self, group_id: int) -> float:
        if not self.sigma:
            return self.generate_s
        normal = float(np.random.default_rng(group_id).standard_normal())
        return self.generate_s * math.exp(self.sigma * normal - self.sigma**2 / 2)

    def steps_per_second(self, ended: Sequence[float]) -> float:
        """Return the rate after the warm-up, from the times at which the steps ended."""
        return self.num_steps / (ended[self.warmup_steps + self.num_steps - 1] - ended[self.warmup_steps - 1])

    def bound(self) -> float:
        """Return the highest possible steps per second."""
        times = (self.generate_s, self.train_s)
        return self.ideal() if self.sigma else 1 / (max(times) if self.max_staleness else sum(times))

    def ideal(self) -> float:
        """Return the steps per second if nothing but generation and training takes time."""
        run = IdealRun(
            num_engines=self.num_engines,
            num_slots=self.num_slots,
            groups_per_step=self.groups_per_step,
            max_staleness=self.max_staleness,
            num_steps=self.warmup_steps + self.num_steps,
            group_seconds=self.group_seconds,
            train_s=self.train_s,
        )
        return self.steps_per_second(run.run())


class SleepingEngine(StandInEngine):
    """An engine that serves a number of groups at one time, each for its seconds; the others wait for a free slot."""

    def __init__(self, work: Work, name: str) -> None:
        super().__init__(name)
        self._work = work
        self._running: list[tuple[float, int, RolloutGroup]] = []
        """Heap of the running groups, by the time at which each ends."""

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._requests)

    def step(self) -> list[RolloutGroup]:
        now = time.perf_counter()
        free = self._work.num_slots - len(self._running)
        started, self._requests = self._requests[:free], self._requests[free:]
        for request in started:
            end = now + self._work.group_seconds(request.group_id)
            heapq.heappush(self._running, (end, request.group_id, self._answer(request)))
        time.sleep(max(0.0, min(self._running[0][0], now + DECODE_S) - time.perf_counter()))
        now = time.perf_counter()
        finished = []
        while self._running and self._running[0][0] <= now:
            finished.append(heapq.heappop(self._running)[2])
        return finished


def plan(arguments: argparse.Namespace) -> list[Work]:
    """Return all lines of the tables; the longer of generation and training takes ``--seconds``."""

    def work(ratio: float, max_staleness: int, num_steps: int, sigma: float = 0.0) -> Work:
        return Work(
            generate_s=arguments.seconds * min(ratio, 1),
            train_s=arguments.seconds / max(ratio, 1),
            max_staleness=max_staleness,
            sigma=sigma,
            num_engines=arguments.engines,
            groups_per_step=arguments.groups_per_step,
            group_size=arguments.group_size,
            num_steps=num_steps,
            warmup_steps=arguments.warmup_steps,
        )

    steps = arguments.steps
    return [
        *(work(ratio, staleness, steps) for staleness in arguments.max_staleness for ratio in arguments.ratios),
        *(work(ratio, 0, -(-steps // 2)) for ratio in arguments.ratios),
        *(
            work(ratio, staleness, steps, arguments.sigma)
            for staleness in arguments.max_staleness
            for ratio in arguments.random_ratios
        ),
    ]


async def measure(workers: StandInWorkers, work: Work) -> dict[str, float]:
    """Measure one line of a table."""
    config = Config()
    config.algorithm = AlgorithmConfig(
        num_steps=work.warmup_steps + work.num_steps, groups_per_step=work.groups_per_step, group_size=work.group_size
    )
    config.replay = ReplayConfig(max_staleness=work.max_staleness)
    config.rollout.sampling.max_tokens = COMPLETION_TOKENS
    reporter = StandInReporter()
    with tempfile.TemporaryDirectory() as folder:
        make_engine = partial(SleepingEngine, work)
        await run_pipeline(workers, config, Path(folder), reporter, make_engine, train_s=work.train_s)
    rate, bound = work.steps_per_second(reporter.ended), work.bound()
    return {
        "ratio": round(work.generate_s / work.train_s, 4),
        "generate_s": round(work.generate_s, 4),
        "train_s": round(work.train_s, 4),
        "max_staleness": work.max_staleness,
        "sigma": work.sigma,
        "steps_per_second": round(rate, 4),
        "bound": round(bound, 4),
        "efficiency": round(rate / bound, 4),
        "wait_s": round(median(reporter.waited[work.warmup_steps :]), 4),
        "sync_s": round(median(reporter.synced[work.warmup_steps :]), 4),
    }


def summarize(grid: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Return the last line: all cells, and the worst of the asynchronous ones with given times."""
    worst = min((c for c in grid if c["max_staleness"] and not c["sigma"]), key=lambda cell: cell["efficiency"])
    return {"worst_efficiency": worst["efficiency"], "worst": worst, "grid": list(grid)}


async def run(arguments: argparse.Namespace) -> list[dict[str, float]]:
    workers = start_workers(arguments.engines, arguments.scorers)
    print("generate  train  max_staleness  sigma  steps/s  bound  efficiency   wait   sync")
    grid = []
    for work in plan(arguments):
        cell = await measure(workers, work)
        print(
            f"{cell['generate_s']:8.3f} {cell['train_s']:6.3f} {work.max_staleness:14d} {work.sigma:6.2f} "
            f"{cell['steps_per_second']:8.3f} {cell['bound']:6.3f} {cell['efficiency']:11.3f} "
            f"{cell['wait_s']:6.3f} {cell['sync_s']:6.3f}",
            flush=True,
        )
        grid.append(cell)
    return grid


def parse_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=4)
    parser.add_argument("--scorers", type=int, default=2)
    parser.add_argument("--groups-per-step", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="seconds of the longer of generate and train")
    parser.add_argument("--steps", type=int, default=20, help="steps of each line, after the warm-up")
    parser.add_argument("--warmup-steps", type=int, default=4)
    parser.add_argument("--max-staleness", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--ratios", type=float, nargs="+", default=RATIOS, help="ratios of generate to train")
    parser.add_argument("--random-ratios", type=float, nargs="*", default=RANDOM_RATIOS)
    parser.add_argument("--sigma", type=float, default=0.5, help="spread of random times")
    return parser.parse_args(given)


def main() -> None:
    arguments = parse_arguments()
    print(f"load average {os.getloadavg()[0]:.1f}")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    grid = asyncio.run(run(arguments))
    ray.shutdown()
    print(f"load average {os.getloadavg()[0]:.1f}")
    print(json.dumps(summarize(grid)))


if __name__ == "__main__":
    main()

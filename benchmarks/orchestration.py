"""Groups per second through the whole orchestration, with engines, rewards and a learner that take no time.

``benchmarks.stand_ins`` lists what is real. Run: ``python -m benchmarks.orchestration --engines 16``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from pathlib import Path

import psutil
import ray

from benchmarks.stand_ins import (
    COMPLETION_TOKENS,
    PROMPT_TOKENS,
    StandInEngine,
    StandInReporter,
    run_pipeline,
    start_workers,
)
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.root_config import Config, ReplayConfig
from rlpipe.replay.step_queue import StepReport
from rlpipe.types import RolloutGroup


class InstantEngine(StandInEngine):
    """An engine that answers every request in its next step."""

    def step(self) -> list[RolloutGroup]:
        groups = [self._answer(request) for request in self._requests]
        self._requests = []
        return groups


class MemoryReporter(StandInReporter):
    """A reporter that prints the rate at intervals, and records the memory of all processes after the warm-up."""

    def __init__(self, num_steps: int, groups_per_step: int, warmup_steps: int) -> None:
        super().__init__()
        self._num_steps, self._groups_per_step, self._warmup_steps = num_steps, groups_per_step, warmup_steps
        self.rss_mb: list[float] = []
        """Resident memory at the end of every tenth of the run."""

    @property
    def groups_per_second(self) -> float:
        """Rate over the groups after the warm-up."""
        counted = self.ended[max(self._warmup_steps, 1) - 1 :]
        return (len(counted) - 1) * self._groups_per_step / (counted[-1] - counted[0])

    def trained(self, report: StepReport) -> None:
        super().trained(report)
        done = report.step + 1 - self._warmup_steps
        if done * 10 // self._num_steps > len(self.rss_mb):
            self.rss_mb.append(resident_mb())
            rate = f"{self.groups_per_second:6.0f} groups/s, {self.rss_mb[-1]:7.0f} MB"
            print(f"{done * self._groups_per_step:6d} groups, {rate}", flush=True)


def resident_mb() -> float:
    """Return the unshared memory of this process and its descendants, in MiB."""
    me = psutil.Process(os.getpid())
    total = 0
    for process in [me, *me.children(recursive=True)]:
        try:
            memory = process.memory_info()
            total += memory.rss - memory.shared
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


async def run(arguments: argparse.Namespace, folder: Path) -> MemoryReporter:
    num_steps, warmup_steps = (
        groups // arguments.groups_per_step for groups in (arguments.groups, arguments.warmup_groups)
    )
    config = Config()
    config.algorithm = AlgorithmConfig(
        num_steps=warmup_steps + num_steps, groups_per_step=arguments.groups_per_step, group_size=arguments.group_size
    )
    tokens = 2 * arguments.group_size * (PROMPT_TOKENS + COMPLETION_TOKENS)
    config.learner = LearnerConfig(max_tokens_per_microbatch=8 * tokens)
    config.replay = ReplayConfig(max_staleness=arguments.max_staleness)
    config.rollout.sampling.max_tokens = COMPLETION_TOKENS
    reporter = MemoryReporter(num_steps, arguments.groups_per_step, warmup_steps)
    await run_pipeline(start_workers(arguments.engines, arguments.scorers), config, folder, reporter, InstantEngine)
    return reporter


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--groups", type=int, default=20_000)
    parser.add_argument("--warmup-groups", type=int, default=4000, help="groups before the counted ones")
    parser.add_argument("--groups-per-step", type=int, default=128)
    parser.add_argument("--max-staleness", type=int, default=2)
    parser.add_argument("--scorers", type=int, default=2)
    arguments = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    with tempfile.TemporaryDirectory() as folder:
        reporter = asyncio.run(run(arguments, Path(folder)))
        ray.shutdown()
    result = {
        "engines": arguments.engines,
        "group_size": arguments.group_size,
        "groups": arguments.groups,
        "groups_per_second": round(reporter.groups_per_second, 1),
        "rss_growth_mb": round(reporter.rss_mb[-1] - reporter.rss_mb[0], 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Seconds until a run trains: its first step, and the first one after an engine, a rank or the driver was killed.

``python -m benchmarks.startup`` warms the quickstart's policy up once, starts the quickstart from it several times, and
kills each kind of process in turn. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.chaos import Chaos, Driver, Kill
from rlpipe.common import run_files
from rlpipe.tracking.jsonl import read_rows

KINDS = {"engine": "rollout", "rank": "learner", "driver": "driver"}
"""Kinds of processes, by their names in the result."""
STEPS_BETWEEN = 10
IMPORTS = {
    "driver": "rlpipe.run.pipeline",
    "replay": "rlpipe.actors.replay",
    "scorer": "rlpipe.actors.reward",
    "learner": "rlpipe.actors.learner",
    "engine": "rlpipe.rollout.vllm.vllm_engine",
}
"""Module that a process of each kind imports if nothing is preloaded."""
TIMEOUT_S = 600.0


def options(output: Path, policy: Path) -> list[str]:
    return [
        "experiment=quickstart",
        f"output={output}",
        f"model.path={policy}/warmup/policy",
        "checkpoint.every_steps=5",
        "data.held_out.every_steps=0",
        "tracking.progress=plain",
    ]


def warm_up(folder: Path) -> None:
    """Make the policy, unless it exists already; an interrupted warm-up is resumed."""
    from rlpipe.configs.compose import load_config
    from rlpipe.quickstart import warm_up as make

    policy = folder / "warmup" / "policy"
    if not policy.exists():
        make(load_config(["experiment=quickstart", f"output={folder}", f"model.path={policy}"]))


def cpu_seconds(root: int) -> dict[str, float]:
    """Return the CPU seconds so far of a process and its descendants, by their titles."""
    found: Counter[str] = Counter()
    for process in [psutil.Process(root), *psutil.Process(root).children(recursive=True)]:
        with suppress(psutil.Error):
            times = process.cpu_times()
            found[_title(process.cmdline())] += times.user + times.system
    return dict(found)


def _title(command: list[str]) -> str:
    text = " ".join(command)
    if text.startswith("ray::"):
        return text.split()[0].partition(".")[0].removeprefix("ray::")
    if "rlpipe.preload.server" in text:
        return "preloading"
    return "driver" if "rlpipe train" in text else "Ray"


def first_step(output: Path, policy: Path) -> dict[str, Any]:
    """Run a few steps, and return the time to the first step with its phases and CPU seconds."""
    shutil.rmtree(output, ignore_errors=True)
    driver = Driver([*options(output, policy), "algorithm.num_steps=12"], output.with_suffix(".log"))
    driver.start()
    assert driver.process is not None
    cpu: dict[str, float] = {}
    while not _has_stepped(output):
        if driver.poll() is not None:
            raise RuntimeError(f"the run ended before its first step; see {driver.log}")
        for title, seconds in cpu_seconds(driver.process.pid).items():
            cpu[title] = max(cpu.get(title, 0.0), seconds)
        time.sleep(0.1)
    if driver.process.wait(TIMEOUT_S) != 0:
        raise RuntimeError(f"the run failed; see {driver.log}")
    summary = json.loads((output / run_files.SUMMARY).read_text())
    return {
        "first_step_s": summary["first_step_s"],
        "first_step_cpu_s": sum(cpu.values()),
        "phases": summary["startup"],
        "cpu_s": cpu,
    }


def _has_stepped(output: Path) -> bool:
    metrics = output / run_files.METRICS
    return metrics.exists() and any("loss" in row for row in read_rows(metrics))


class Kills(Chaos):
    """A run in which each kind of process is killed in turn, once the run has recovered from the last kill."""

    def kill_each(self, repetitions: int) -> None:
        self._driver.start()
        self._wait_for_steps_after(0.0)
        for _ in range(repetitions):
            for kind in KINDS.values():
                self._wait_for_steps(STEPS_BETWEEN)
                self._kill(kind)
                while self.kills[-1].mended_at is None:
                    self._sleep(0.2)
        assert self._driver.process is not None
        self._driver.process.send_signal(signal.SIGTERM)
        self._driver.process.wait(TIMEOUT_S)

    def _wait_for_steps(self, count: int) -> None:
        for _ in range(count):
            self._wait_for_steps_after(self._watcher.newest_step_at())


def recoveries(kills: list[Kill]) -> dict[str, float]:
    """Return the median seconds from a kill to the end of the first step after the replacement, by kind."""
    found = {}
    for name, kind in KINDS.items():
        seconds = [kill.recovery_s for kill in kills if kill.kind == kind and kill.recovery_s is not None]
        found[name] = round(median(seconds), 2)
    return found


def import_seconds() -> dict[str, float]:
    """Return the CPU seconds of a new interpreter that imports the modules of each kind of process."""
    found = {}
    for kind, module in IMPORTS.items():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found[kind] = round(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, 2)
    return found


def medians(starts: list[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for start in starts for name in start)
    return {name: round(median(start[name] for start in starts if name in start), 2) for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/startup"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    policy, output = arguments.output / "policy", arguments.output / "run"
    warm_up(policy)
    print(f"load average {os.getloadavg()[0]:.1f}", flush=True)
    starts = []
    for _ in range(arguments.repetitions):
        starts.append(first_step(output, policy))
        print(f"first step after {starts[-1]['first_step_s']:.1f} s: {starts[-1]['phases']}", flush=True)
    shutil.rmtree(output, ignore_errors=True)
    chaos = Kills(Driver(options(output, policy), output.with_suffix(".log")), output, minutes=0, seed=0, kinds=[])
    chaos.kill_each(arguments.repetitions)
    for kill in chaos.kills:
        print(f"{kill.kind} killed, recovered after {kill.recovery_s:.1f} s", flush=True)
    result = {
        "first_step_s": round(median(start["first_step_s"] for start in starts), 2),
        "first_step_cpu_s": round(median(start["first_step_cpu_s"] for start in starts), 2),
        "recovery_median_s": recoveries(chaos.kills),
        "phases": medians([start["phases"] for start in starts]),
        "cpu_s": medians([start["cpu_s"] for start in starts]),
        "imports_cpu_s": import_seconds(),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Signals to the processes of a running run, and checks of the run's accounts afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.processes import find_processes
from rlpipe.common.run_files import LEDGER
from rlpipe.replay.ledger.audit import audit
from rlpipe.replay.ledger.run_ledger import GroupState, Ledger

HANGS_S = 300
"""A time limit that no run here reaches, even if runs of two other files share the cores."""


def steps_done(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return sum('"loss"' in line for line in metrics.read_text().splitlines()) if metrics.exists() else 0


@contextmanager
def signals(
    output: Path, plan: Mapping[int, str], number: signal.Signals, also: Callable[[], bool] = lambda: True
) -> Iterator[list[str]]:
    """Send the signal to one process of each kind in ``plan``, and yield the kinds that have received it.

    A signal is sent once the given number of steps is done, a process of the kind runs, and ``also`` holds.
    """
    earlier = {pid for kind in plan.values() for pid in find_processes(kind)}
    hit: list[str] = []
    frozen: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        for step, kind in plan.items():
            while not ended.is_set():
                found = [] if steps_done(output) < step else [pid for pid in find_processes(kind) if pid not in earlier]
                if found and also():
                    os.kill(found[-1], number)
                    hit.append(kind)
                    frozen.extend([found[-1]] if number is signal.SIGSTOP else [])
                    break
                time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield hit
    finally:
        ended.set()
        watcher.join()
        for pid in frozen:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def start_driver(options: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a driver in its own process group, as a terminal does."""
    command = [sys.executable, "-m", "rlpipe", "train", *options]
    with log.open("wb") as file:
        return subprocess.Popen(command, env=environment, stdout=file, stderr=file, start_new_session=True)


def wait_for_step(driver: subprocess.Popen[bytes], metrics: Path, step: int) -> None:
    deadline = time.monotonic() + HANGS_S
    while time.monotonic() < deadline:
        assert driver.poll() is None, "the run ended before it could be stopped"
        if metrics.exists() and any(f'"step": {step},' in line for line in metrics.read_text().splitlines()):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not trained within {HANGS_S} s")


def ledger_of(output: Path) -> Ledger:
    return Ledger(output / LEDGER, read_only=True)


def assert_accounts_add_up(output: Path, *, num_steps: int, groups_per_step: int) -> None:
    resume_state = audit(ledger_of(output))
    assert resume_state.finished
    assert not resume_state.problems
    assert ledger_of(output).counts()[GroupState.TRAINED] == num_steps * groups_per_step

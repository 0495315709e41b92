"""Random kills of a run's processes, including the driver, and their cost.

``python -m benchmarks.chaos --minutes 10 --seed 1`` trains the quickstart's task twice from one warm-up: undisturbed,
and with SIGKILL at random moments to every kind of process for ``--minutes``, after which the run may finish
undisturbed. With ``--episodes`` the runs play episodes, whose processes are killed as well. The last line is one JSON
object; the exit code is 1 if the audit of the ledger finds a problem, if groups were lost or repeated, or if processes
of episodes are left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks import chaos_episodes
from benchmarks.processes import find_processes
from rlpipe.common import run_files
from rlpipe.errors import LedgerError
from rlpipe.replay.ledger.audit import audit
from rlpipe.replay.ledger.run_ledger import Ledger, LedgerEvent

KINDS = ("rollout", "scorer", "replay", "weights", "learner", "trainer", "driver")
KINDS_OF_EPISODES = {"environment": ("episodes", "environment", "server"), "agent": ("episodes", "agent")}
KINDS_OF_ONE_EPISODE = ("environment", "server", "agent")
"""Processes that are only replaced once another episode needs one; the others go on meanwhile."""
STEPS_PER_MINUTE = 100
"""Steps of both runs per minute of killing; undisturbed, the quickstart trains about 180 steps a minute."""
STEPS_OF_EPISODES_PER_MINUTE = 40
MEAN_PAUSE_S = 15.0
"""Mean pause between kills, recovered or not; exponentially distributed, and cut off at three times the mean."""
PATIENCE_S = 300.0
"""Seconds without a step after which the run counts as hanging."""


@dataclass
class Kill:
    """One kill, and when the run recovered from it."""

    kind: str
    at: float
    known: frozenset[int] = frozenset()
    """Process ids of the kind at that moment; the replacement may be an idle process that Ray already had."""
    back_at: float | None = None
    mended_at: float | None = None

    @property
    def recovery_s(self) -> float | None:
        return None if self.mended_at is None else self.mended_at - self.at


@dataclass
class Driver:
    """``rlpipe train`` in a process of its own, started again whenever it dies."""

    options: list[str]
    log: Path
    process: subprocess.Popen[bytes] | None = None
    started_at: float = 0.0
    """Start time, in seconds since 1970."""

    def start(self) -> None:
        command = [sys.executable, "-m", "rlpipe", "train", *self.options]
        self.started_at = time.time()
        with self.log.open("ab") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)

    def poll(self) -> int | None:
        assert self.process is not None
        return self.process.poll()

    def kill(self) -> None:
        """Kill the driver, wait for the run's other processes to end by themselves, and kill those left after 5 s.

        Ray's own processes take up to a minute, and are not waited for.
        """
        assert self.process is not None
        pids = [pid for kind in KINDS if kind != "driver" for pid in find_processes(kind, self.process.pid)]
        others = []
        for pid in pids:
            with suppress(psutil.NoSuchProcess):
                others.append(psutil.Process(pid))
        self.process.kill()
        self.process.wait()
        _, alive = psutil.wait_procs(others, timeout=5)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()


class Watcher:
    """A reader of a run's ledger from outside; the ledger need not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def newest_step_at(self) -> float:
        """Return when the last step ended, in seconds since 1970; 0 before the first."""
        rows = self._ask("SELECT coalesce(max(ended_at), 0) FROM steps")
        return float(rows[0][0]) if rows else 0.0

    def events_after(self, moment: float) -> list[LedgerEvent]:
        try:
            ledger = Ledger(self._path, read_only=True)
        except LedgerError:
            return []
        try:
            return [event for event in ledger.events() if event.time >= moment]
        finally:
            ledger.close()

    def _ask(self, query: str) -> list[tuple[Any, ...]]:
        try:
            ledger = Ledger(self._path, read_only=True)
        except LedgerError:  # the run is only starting
            return []
        try:
            return ledger.rows(query)
        finally:
            ledger.close()


class Chaos:
    """A run whose processes are killed at random for some minutes, and that is then left to end."""

    def __init__(self, driver: Driver, output: Path, *, minutes: float, seed: int, kinds: Sequence[str]) -> None:
        self._driver, self._watcher, self._kinds = driver, Watcher(output / run_files.LEDGER), kinds
        self._random, self._until = random.Random(seed), time.time() + 60 * minutes
        self.kills: list[Kill] = []

    def run(self) -> None:
        """Run until the end, killing on the way; raise ``RuntimeError`` if the run fails or hangs."""
        self._driver.start()
        self._wait_for_steps_after(0.0)
        while time.time() < self._until:
            pause = min(self._random.expovariate(1 / MEAN_PAUSE_S), 3 * MEAN_PAUSE_S)
            self._sleep(pause)
            if self._driver.poll() == 0:
                return
            self._kill(self._random.choice(self._kinds))
        while self._driver.poll() is None:
            self._sleep(1.0)

    def _kill(self, kind: str) -> None:
        if kind == "driver":
            self.kills.append(Kill(kind=kind, at=time.time()))
            self._driver.kill()
            self._driver.start()
            return
        assert self._driver.process is not None
        processes = find_processes(kind, self._driver.process.pid)
        if not processes:  # it is being replaced right now
            return
        self.kills.append(Kill(kind=kind, at=time.time(), known=frozenset(processes)))
        with suppress(ProcessLookupError):
            os.kill(self._random.choice(processes), signal.SIGKILL)

    def _sleep(self, seconds: float) -> None:
        """Sleep, while recording recoveries and checking that the run has neither failed nor hung."""
        deadline = time.time() + seconds
        while True:
            code = self._driver.poll()
            if code not in (None, 0):
                raise RuntimeError(f"the run failed with exit code {code}; see {self._driver.log}")
            self._note_recoveries()
            if code == 0 or time.time() >= deadline:
                return
            time.sleep(min(0.2, max(deadline - time.time(), 0)))

    def _note_recoveries(self) -> None:
        open_kills = [kill for kill in self.kills if kill.mended_at is None]
        newest = self._watcher.newest_step_at()
        for kill in open_kills:
            kill.back_at = kill.back_at or self._back_since(kill)
            if kill.back_at is not None and newest > kill.back_at:
                kill.mended_at = newest
        if open_kills and time.time() - max(newest, open_kills[0].at) > PATIENCE_S:
            raise RuntimeError(f"no step for {PATIENCE_S:g} s after the {open_kills[0].kind} was killed")

    def _back_since(self, kill: Kill) -> float | None:
        """Return when the killed process was replaced, or None; a step that ends later proves that the run recovered.

        All parts of another driver are new, so its first step is proof for them, too.
        """
        assert self._driver.process is not None
        if self._driver.started_at > kill.at:
            return self._driver.started_at
        if kill.kind in KINDS_OF_ONE_EPISODE:
            return kill.at
        if kill.kind == "rollout":
            served = [e.time for e in self._watcher.events_after(kill.at) if "serves again" in e.message]
            return served[0] if served else None
        found = find_processes(kill.kind, self._driver.process.pid) if self._driver.poll() is None else []
        return time.time() if set(found) - kill.known else None

    def _wait_for_steps_after(self, moment: float) -> None:
        while self._watcher.newest_step_at() <= moment:
            self._sleep(0.5)


def options(arguments: argparse.Namespace, output: Path, warm_up: Path) -> list[str]:
    per_minute = STEPS_OF_EPISODES_PER_MINUTE if arguments.episodes else STEPS_PER_MINUTE
    steps = max(round(per_minute * arguments.minutes), 20)
    chosen = [
        "experiment=quickstart",
        f"output={output}",
        f"model.path={warm_up}/warmup/policy",
        f"algorithm.num_steps={steps}",
        f"data.held_out.every_steps={steps}",
        "checkpoint.every_steps=20",
        f"seed={arguments.seed}",
        "tracking=quiet",
        f"rollout.num_engines={arguments.engines}",
        f"rollout.num_cpus={1 / arguments.engines}",
        "rollout.num_threads=1",
    ]
    if arguments.episodes:
        chosen += chaos_episodes.options(arguments.episodes)
    if arguments.ranks > 1:
        chosen += [
            "learner=fsdp2",
            f"learner.num_ranks={arguments.ranks}",
            "learner.num_cpus=0.5",
            "learner.num_threads=1",
        ]
    return [*chosen, *arguments.set]


def run_undisturbed(arguments: argparse.Namespace, output: Path, warm_up: Path) -> dict[str, Any]:
    driver = Driver(options(arguments, output, warm_up), output.with_suffix(".log"))
    driver.start()
    assert driver.process is not None
    if driver.process.wait() != 0:
        raise RuntimeError(f"the undisturbed run failed; see {driver.log}")
    return read_summary(output)


def read_summary(output: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((output / run_files.SUMMARY).read_text())
    return summary


def summarize(kills: list[Kill], output: Path, accuracy: float, undisturbed: float) -> dict[str, Any]:
    ledger = Ledger(output / run_files.LEDGER, read_only=True)
    resume_state = audit(ledger)
    recoveries = sorted(kill.recovery_s for kill in kills if kill.recovery_s is not None)
    repeated = ledger.rows("SELECT coalesce(sum(times - 1), 0) FROM steps")[0][0]
    in_two_steps = ledger.rows(
        "SELECT count(*) FROM (SELECT 1 FROM groups WHERE step IS NOT NULL GROUP BY epoch, position, reroll"
        " HAVING count(*) > 1)"
    )[0][0]
    lost = ledger.rows("SELECT count(*) FROM groups WHERE state NOT IN ('TRAINED', 'DISCARDED')")[0][0]
    trained = ledger.rows("SELECT count(*) FROM groups WHERE state = 'TRAINED'")[0][0]
    return {
        "kills": dict(Counter(kill.kind for kill in kills)),
        "groups_trained": trained,
        "groups_lost": lost,
        "groups_repeated": in_two_steps,
        "steps_trained_again": repeated,
        "audit": [finding.claim for finding in resume_state.problems],
        "recovery_median_s": round(statistics.median(recoveries), 1) if recoveries else None,
        "recovery_worst_s": round(recoveries[-1], 1) if recoveries else None,
        "recovery_s_by_kind": {
            kind: round(statistics.median(times), 1)
            for kind in dict.fromkeys(kill.kind for kill in kills)
            if (times := [k.recovery_s for k in kills if k.kind == kind and k.recovery_s is not None])
        },
        "accuracy": accuracy,
        "accuracy_undisturbed": undisturbed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="minutes during which processes are killed")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="learner ranks; above 1 with fsdp2")
    parser.add_argument("--episodes", choices=KINDS_OF_EPISODES, help="play episodes of an environment or a program")
    parser.add_argument("--set", nargs="*", default=[], metavar="OPTION=VALUE", help="further options of both runs")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks/chaos"))
    arguments = parser.parse_args()
    warm_up = arguments.output / "policy"
    runs = {name: arguments.output / name for name in ("undisturbed", "disturbed")}
    for run in runs.values():
        shutil.rmtree(run, ignore_errors=True)
        run.with_suffix(".log").unlink(missing_ok=True)
    arguments.output.mkdir(parents=True, exist_ok=True)
    undisturbed = run_undisturbed(arguments, runs["undisturbed"], warm_up)
    print(
        f"undisturbed: accuracy {undisturbed['eval_accuracy_start']} -> {undisturbed['eval_accuracy_end']}", flush=True
    )
    disturbed = runs["disturbed"]
    driver = Driver(options(arguments, disturbed, warm_up), disturbed.with_suffix(".log"))
    kinds = (*KINDS, *KINDS_OF_EPISODES.get(arguments.episodes, ()))
    chaos = Chaos(driver, disturbed, minutes=arguments.minutes, seed=arguments.seed, kinds=kinds)
    try:
        chaos.run()
    finally:
        if driver.poll() is None:
            driver.kill()
        for kill in chaos.kills:
            after = "never" if kill.recovery_s is None else f"after {kill.recovery_s:.1f} s"
            print(f"{kill.at - chaos.kills[0].at:6.1f} s: {kill.kind} killed, recovered {after}", flush=True)
    result = summarize(
        chaos.kills, disturbed, read_summary(disturbed)["eval_accuracy_end"], undisturbed["eval_accuracy_end"]
    )
    left = count_left()
    print(json.dumps({"minutes": arguments.minutes, "seed": arguments.seed, **result, "processes_left": left}))
    sys.exit(1 if result["audit"] or result["groups_lost"] or result["groups_repeated"] or left else 0)


def count_left() -> int:
    """Return how many processes of episodes that began after this one are alive, 10 seconds after the run at most."""
    began_at = psutil.Process().create_time()
    for _ in range(50):
        lines = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.create_time() > began_at:
                    lines.append(" ".join(process.cmdline()))
        left = sum("isolated_host" in line or f"{chaos_episodes.FILE} " in line for line in lines)
        if not left:
            return 0
        time.sleep(0.2)
    return left


if __name__ == "__main__":
    main()

"""Diagnosis of how a run ended, and why, from the files in its folder."""

from __future__ import annotations

import shutil
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from rlpipe import errors
from rlpipe.common import run_files
from rlpipe.common.atomic_io import RESERVE, is_held
from rlpipe.common.formatting import duration, gib
from rlpipe.configs.compose import load_config
from rlpipe.doctor.observations import Observation, examine, ok, problem, skipped, warning
from rlpipe.errors import DataError, InputError, RlpipeError
from rlpipe.hardware.cgroup import GROUPS
from rlpipe.learner.checkpoint_files import damaged, list_checkpoints, read_extra
from rlpipe.replay.ledger.query import find_ledger, reading
from rlpipe.tracking.health import HealthFinding, HealthWatch
from rlpipe.tracking.jsonl import read_rows
from rlpipe.tracking.outcome import FAILED, FINISHED, INTERRUPTED, RUNNING, RunOutcome, read_outcome

AGAIN = "the same command continues from the newest checkpoint"
EACH_FAILURE = "rlpipe inspect RUN --state DISCARDED shows each failure"
FIXES = {
    "RewardFailed": f"fix the reward; {EACH_FAILURE}; then {AGAIN}",
    "EnvironmentFailed": f"fix the environment; rlpipe episode plays one episode; then {AGAIN}",
    "LearnerFailed": "if losses are not finite: a lower learner.optimizer.lr, or model.dtype=float32. If processes "
    "died: rlpipe plan shows the memory that they need",
    "EngineFailed": "rlpipe plan shows the memory of an engine; a lower rollout.max_model_len needs less",
    "WeightsMismatch": "have the same versions of rlpipe, vLLM and torch on every host; model.dtype=float32 tells "
    "whether it is a matter of precision",
    "WaitTimeout": "raise the named option if the part only needs more time; else read its log under "
    "/tmp/ray/session_latest/logs",
    "HeadLost": f"start the cluster again; {AGAIN}",
    "Unhealthy": "read the rule in docs/health.md; continue from an earlier checkpoint with other options",
    "Interrupted": AGAIN,
    "LedgerDamaged": f"rlpipe audit RUN shows the damage; {AGAIN}, with the copy of the ledger in it",
}
"""Fixes of errors, by the names of their classes."""
OUT_OF_MEMORY = ("out of memory", "OutOfMemory", "memory usage", "killed by the kernel", "SIGKILL")
MANY_FAILED = 0.2
MAX_SUBJECTS = 5
"""Subjects of events that are shown."""
STUCK, STUCK_LONGEST, LEAST_STUCK_S = 10, 2, 300.0
"""Medians of a step's time, longest steps and seconds, all without a step, after which a run seems to hang.

Evaluations and checkpoints take longer than most steps.
"""


def diagnose(run: Path, *, reads_contents: bool = True) -> Iterator[Observation]:
    """Yield how the run ended, and then everything in its folder that may be the cause.

    With ``reads_contents``, the newest checkpoint is also compared with its digests, unless the run goes on: reading it
    takes as long as a resumed run does. Raises ``DataError`` if the folder is not that of a run.
    """
    if not (run / run_files.CONFIG).is_file():
        raise DataError(f"{run} is not the folder of a run: it has no {run_files.CONFIG}")
    rows = list(read_rows(run / run_files.METRICS))
    steps = [row for row in rows if "loss" in row]
    yield from examine(
        {
            "ending": lambda: _describe_end(run, steps),
            "ledger": lambda: _describe_ledger(run),
            "health": lambda: _describe_health(run, rows),
            "disk": lambda: _describe_disk(run),
            "checkpoints": lambda: _describe_checkpoints(run, reads_contents=reads_contents),
        }
    )


def _describe_end(run: Path, steps: list[dict[str, Any]]) -> Iterator[Observation]:
    outcome, done = read_outcome(run), f"{steps[-1]['step']} steps" if steps else "no step"
    # A lock of another host can't be seen on some shared file systems.
    has_news = bool(steps) and time.time() - steps[-1]["time"] < LEAST_STUCK_S
    is_elsewhere = outcome is not None and outcome.state == RUNNING and outcome.host != socket.gethostname()
    if is_held(run) or (is_elsewhere and has_news):
        yield from _describe_running(steps, done, began_at=0.0 if outcome is None else outcome.began_at)
    elif outcome is None:
        yield skipped("ending", f"{done}; how the run ended was not recorded")
    elif outcome.state == FINISHED:
        yield ok("ending", f"the run has finished after {done}")
    elif outcome.state == INTERRUPTED:
        yield warning("ending", f"after {done}: {outcome.message or 'interrupted'}", AGAIN)
    elif outcome.state == FAILED:
        yield problem("ending", f"after {done}, {outcome.error}: {outcome.message}", _fix(outcome))
    elif outcome.state == RUNNING:
        yield from _describe_killed(outcome, done)


def _fix(outcome: RunOutcome) -> str:
    message = outcome.message or ""
    if "No space left" in message or "can't be written" in message:
        return f"free space on that disk; then {AGAIN}"
    if (fix := FIXES.get(outcome.error or "")) is not None:
        return fix
    kind = getattr(errors, outcome.error or "", None)
    if isinstance(kind, type) and issubclass(kind, RlpipeError):
        return "the message says what to change" if issubclass(kind, InputError) else AGAIN
    return f"where it was raised is in the command's output, with a traceback; {AGAIN}"


def _describe_running(steps: list[dict[str, Any]], done: str, *, began_at: float) -> Iterator[Observation]:
    times = [row["time/step"] for row in steps if row.get("time/step") is not None]
    has_new_steps = bool(steps) and steps[-1]["time"] > began_at  # else the command has resumed a run, and starts
    since = time.time() - steps[-1]["time"] if has_new_steps else 0.0
    if times and since > max(STUCK * median(times), STUCK_LONGEST * max(times), LEAST_STUCK_S):
        yield warning(
            "ending",
            f"it runs, but {done} were done {duration(since)} ago, and a step takes {duration(median(times))}",
            "the run itself ends after cluster.step_timeout_s, and then names the part that hangs",
        )
    elif began_at and not has_new_steps:
        yield ok("ending", f"it is still running, after {done}; it began {duration(time.time() - began_at)} ago")
    else:
        yield ok("ending", f"it is still running, after {done}")


def _describe_killed(outcome: RunOutcome, done: str) -> Iterator[Observation]:
    """Describe the end of a driver that could not record it: it was killed, or its machine went down."""
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(outcome.began_at))
    text = (
        f"after {done}: process {outcome.pid} on {outcome.host}, which began at {began}, was killed or lost its machine"
    )
    if outcome.host == socket.gethostname() and (kills := _memory_kills()):
        text += f"; since this container started, the kernel has ended {kills} of its processes for lack of memory"
    where = "" if outcome.host == socket.gethostname() else f" on {outcome.host}"
    yield problem("ending", text, f"dmesg{where} shows whether memory ran out (rlpipe plan shows the need); {AGAIN}")


def _memory_kills() -> int:
    with suppress(OSError, ValueError, StopIteration):
        lines = (GROUPS / "memory.events").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("oom_kill ")))
    return 0


def _describe_checkpoints(run: Path, *, reads_contents: bool) -> Iterator[Observation]:
    folder = run / run_files.CHECKPOINTS
    if not folder.is_dir():
        yield skipped("checkpoints", "none was written yet")
        return
    is_running, complete = is_held(run), list_checkpoints(folder)
    newest = read_extra(complete[-1]).step if complete else 0
    problems = damaged(folder, newer_than=newest - int(reads_contents and not is_running))
    for path, text in problems.items():
        if path.exists() or not is_running:  # a run removes old ones
            yield problem("checkpoints", f"{path} is damaged: {text}", "the run sets it aside and takes the one before")
    whole = [path for path in complete if path not in problems]
    yield ok("checkpoints", f"{len(whole)} complete, the newest is {whole[-1].name}" if whole else "none complete")


def _describe_ledger(run: Path) -> Iterator[Observation]:
    """Describe the events of the ledger, or of the log of a run without one, and the groups that failed."""
    try:
        path = find_ledger(run)
    except DataError as error:
        yield from _describe_events(
            [(row["kind"], row["subject"], row["message"]) for row in read_rows(run / run_files.EVENTS)]
        )
        yield skipped("ledger", str(error))
        return
    with reading(path) as ledger:
        events = [(event.kind, event.subject, event.message) for event in ledger.events()]
        failed = ledger.failures()
        num_groups = ledger.rows("SELECT count(*) FROM groups WHERE state != 'ADMITTED'")[0][0]
    yield from _describe_events(events)
    num_failed = sum(number for _, number in failed)
    if num_groups and num_failed > MANY_FAILED * num_groups:
        reason, number = failed[0]
        text = f"{num_failed} of {num_groups} groups failed, {number} of them with: {reason}"
        yield problem("groups", text, _fix_of_groups(reason))
    else:
        yield ok("ledger", f"{num_groups} groups, {num_failed} of them failed")


def _fix_of_groups(reason: str) -> str:
    if "episodes failed" in reason:
        return FIXES["EnvironmentFailed"]
    return FIXES["RewardFailed"] if reason.startswith("reward ") else f"{EACH_FAILURE}; {AGAIN}"


def _describe_events(events: Sequence[tuple[str, str, str]]) -> Iterator[Observation]:
    """Describe events, each a kind, a subject and a message, in the order in which they happened."""
    recoveries = [message for kind, _, message in events if kind == "recovery"]
    losses = Counter((kind, subject) for kind, subject, _ in events if kind not in ("health", "recovery", "model"))
    last = {(kind, subject): message for kind, subject, message in events}
    # Deaths come before what the run got over at once, as a failed write of a checkpoint.
    ordered = sorted(losses.most_common(), key=lambda entry: entry[0][0] != "death")
    for (kind, subject), number in ordered[:MAX_SUBJECTS]:
        message = last[kind, subject]
        lacked = any(word in message for word in OUT_OF_MEMORY)
        fix = "rlpipe plan shows the memory that the run needs" if lacked else ""
        yield warning("events", f"{subject}, {number} x: {message}", fix)
    if len(ordered) > MAX_SUBJECTS:
        text = f"{len(ordered) - MAX_SUBJECTS} more subjects have events"
        yield warning("events", text, "rlpipe inspect RUN --events shows all of them")
    if recoveries:
        yield ok("events", f"{len(recoveries)} recoveries, the last one: {recoveries[-1]}")


def _describe_health(run: Path, rows: list[dict[str, Any]]) -> Iterator[Observation]:
    """Apply the health rules to the run's metrics, and describe those that are tripped at its end."""
    # Trackers of the run's machine may be missing on this one.
    overrides = ["tracking.wandb=false", "tracking.mlflow=false", "tracking.trackio=false"]
    try:
        config = load_config(overrides, file=str(run / run_files.CONFIG), need_files=False)
    except InputError as error:
        yield skipped("health", f"this version of rlpipe can't read the run's {run_files.CONFIG}: {error}")
        return
    watch = HealthWatch(config)
    since: dict[tuple[str, str], tuple[int, HealthFinding]] = {}
    for row in rows:
        since |= {finding.key: (row["step"], finding) for finding in watch.update(row)}
    still = watch.tripped
    tripped = [(step, finding) for step, finding in since.values() if finding.key in still]
    for step, finding in tripped:
        yield warning("health", f"from step {step} on, {finding.message.removeprefix('warning ')}")
    if not tripped:
        yield ok("health", f"no rule trips on the metrics of {len(rows)} steps and evaluations")


def _describe_disk(run: Path) -> Iterator[Observation]:
    free = shutil.disk_usage(run).free
    if free < RESERVE:
        yield problem("disk", f"{gib(free)} are free for {run}", "free space, or move the run to another disk")
    else:
        yield ok("disk", f"{gib(free)} are free for {run}")

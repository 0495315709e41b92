"""`rlpipe doctor RUN`: the cause of each dead run is named, with its evidence and what to do."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from ledger_cases import Run

from rlpipe.cli import main
from rlpipe.common.atomic_io import DIGESTS, held, seal
from rlpipe.common.run_files import EVENTS, LEDGER, OUTCOME
from rlpipe.configs.compose import load_config
from rlpipe.configs.options import to_yaml
from rlpipe.doctor.diagnosis import diagnose
from rlpipe.errors import (
    ConfigError,
    EngineFailed,
    HeadLost,
    Interrupted,
    LearnerFailed,
    RewardFailed,
    RunError,
    Unhealthy,
    WaitTimeout,
    WeightsMismatch,
)
from rlpipe.learner.checkpoint_files import RECORD
from rlpipe.replay.ledger.run_ledger import Ledger, LedgerEvent
from rlpipe.tracking.jsonl import StepLog
from rlpipe.tracking.outcome import RUNNING, RunOutcome, read_outcome, record_error, recorded_outcome

STEP_S = 2.0


def row(step: int, **metrics: float) -> dict[str, float]:
    return {"step": step, "time": time.time() - 6 + step, "loss": 0.1, "time/step": STEP_S, **metrics}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return the folder of a run of six steps, with a ledger, that has not said how it ended."""
    folder = tmp_path / "run"
    made = Run(folder)
    made.train_all()
    made.ledger.close()
    write_metrics(folder, [row(step) for step in range(1, 7)])
    (folder / "config.yaml").write_text(to_yaml(load_config(["experiment=quickstart"])))
    return folder


def write_metrics(folder: Path, rows: list[dict[str, float]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in rows))


def end(folder: Path, error: BaseException | None) -> None:
    """Record how the run ended, as ``train`` does."""
    with suppress(type(error) if error is not None else RunError), recorded_outcome(folder):
        if error is not None:
            raise error


def diagnosis(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], str]:
    """Return what is said, by subject and status."""
    assert main(["doctor", "--json", str(folder)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {(line["subject"], line["status"]): f"{line['text']}; {line['fix']}" for line in found}


DEATHS: dict[str, tuple[BaseException, str]] = {
    "a reward fails": (
        RewardFailed("8 groups in a row failed, the last one with: sums: ZeroDivisionError"),
        r"after 6 steps, RewardFailed: 8 groups in a row .*ZeroDivisionError; fix the reward; .*--state DISCARDED",
    ),
    "losses are not finite": (
        LearnerFailed("step 5: the loss or gradient was not finite in 3 steps in a row"),
        r"LearnerFailed: step 5: .*; if losses are not finite: a lower learner\.optimizer\.lr",
    ),
    "engines die": (
        EngineFailed("engine rollout-0 died 4 times without finishing a group (cluster.max_engine_failures=3); ..."),
        r"EngineFailed: .*; rlpipe plan shows the memory of an engine",
    ),
    "a part hangs": (
        WaitTimeout("no step has ended for cluster.step_timeout_s=3600 seconds"),
        r"WaitTimeout: no step .*; raise the named option .*session_latest/logs",
    ),
    "the head is lost": (HeadLost("Ray's head has not answered for 45 s"), r"HeadLost: .*; start the cluster again"),
    "weights differ": (
        WeightsMismatch("engine rollout-0 does not serve weights version 3: its digest is a, the published one b"),
        r"WeightsMismatch: .*same versions",
    ),
    "a health rule": (Unhealthy("health.kl.stop was reached"), r"Unhealthy: health\.kl\.stop .*docs/health\.md"),
    "a full disk": (
        RunError("outputs/run can't be written: [Errno 28] No space left on device; the same command continues"),
        r"RunError: .*No space left on device.*; free space on that disk",
    ),
    "a wrong option": (ConfigError("model.path: no such folder"), r"no such folder; the message says what to change"),
    "a fault of the code": (ZeroDivisionError("division by zero"), r"division by zero; where it was raised is in"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_the_error_that_ended_a_run_is_said(death: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    error, says = DEATHS[death]
    end(run, error)
    assert re.search(says, diagnosis(run, capsys)["ending", "PROBLEM"])


def test_an_interrupted_run_is_no_problem(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end(run, Interrupted("stopped by SIGTERM"))
    said = diagnosis(run, capsys)
    assert re.search(r"after 6 steps: stopped by SIGTERM; the same command continues", said["ending", "warning"])
    assert not [status for _, status in said if status == "PROBLEM"]


def test_a_run_that_was_killed_is_distinguished_from_one_that_is_running(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    running = RunOutcome(state="running", host="elsewhere", pid=4321, began_at=time.time() - 7000)
    (run / OUTCOME).write_text(json.dumps(asdict(running)))
    write_metrics(run, [{**row(step), "time": time.time() - 3600} for step in range(1, 7)])
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\n")
    monkeypatch.setattr("rlpipe.doctor.diagnosis.GROUPS", tmp_path)
    said = diagnosis(run, capsys)["ending", "PROBLEM"]
    assert re.search(r"process 4321 on elsewhere, which began at .*, was killed or lost its machine", said)
    assert "the kernel has ended" not in said, "that is known of this machine alone"
    assert "dmesg on elsewhere" in said
    (run / OUTCOME).write_text(json.dumps(asdict(replace(running, host=socket.gethostname()))))
    said = diagnosis(run, capsys)["ending", "PROBLEM"]
    assert "the kernel has ended 2 of its processes for lack of memory" in said
    with held(run):
        assert "6 steps were done" in diagnosis(run, capsys)["ending", "warning"]
        slow = [{**row(step), "time": time.time() - 3600, "time/step": 2000.0 * (step == 4)} for step in range(1, 7)]
        write_metrics(run, slow)
        assert "still running" in diagnosis(run, capsys)["ending", "ok"], "another checkpoint may take as long"
        write_metrics(run, [{**row(step), "time": time.time() - 60} for step in range(1, 7)])
        assert "still running" in diagnosis(run, capsys)["ending", "ok"], "the first evaluation may take a minute"
        (run / OUTCOME).write_text(json.dumps(asdict(replace(running, began_at=time.time() - 30))))
        said = diagnosis(run, capsys)["ending", "ok"]
        assert "still running, after 6 steps; it began 30" in said, "it was resumed, and has done no step since"


def test_a_run_on_another_host_whose_lock_is_not_seen_is_running_while_it_does_steps(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    running = RunOutcome(state="running", host="elsewhere", pid=4321, began_at=time.time() - 100)
    (run / OUTCOME).write_text(json.dumps(asdict(running)))

    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with held(run):
        monkeypatch.setattr("fcntl.flock", no_locks)
        assert "still running, after 6 steps" in diagnosis(run, capsys)["ending", "ok"]
        write_metrics(run, [{**row(step), "time": time.time() - 3600} for step in range(1, 7)])
        assert "process 4321 on elsewhere" in diagnosis(run, capsys)["ending", "PROBLEM"]


def write_checkpoint(folder: Path, step: int) -> Path:
    """Write a checkpoint of one file that is as long as it should be, but has changed."""
    path = folder / "checkpoints" / f"step_{step:06}"
    path.mkdir(parents=True)
    (path / "weights").write_text("abc")
    record = {"step": step, "num_bad_steps": 0, "bad_steps_in_row": 0, "extra": {}, "files": {"weights": 3}}
    (path / RECORD).write_text(seal(record | {DIGESTS: {"weights": "another"}}))
    return path


def test_contents_are_read_of_the_newest_checkpoint_alone_and_not_while_the_run_goes_on(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end(run, None)
    for step in (2, 4):
        write_checkpoint(run, step)
    assert re.search("step_000004 is damaged: weights has changed", diagnosis(run, capsys)["checkpoints", "PROBLEM"])
    assert "1 complete, the newest is step_000002" in diagnosis(run, capsys)["checkpoints", "ok"]
    assert not [line for line in diagnose(run, reads_contents=False) if line.status.value == "PROBLEM"]
    with held(run):
        assert "2 complete, the newest is step_000004" in diagnosis(run, capsys)["checkpoints", "ok"]


def test_the_health_of_a_run_needs_no_tracker_and_is_not_judged_by_another_config(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    end(run, None)
    _collapse(run)
    config = load_config(["experiment=quickstart", "tracking.wandb=true", "health.entropy_low.warn=1e-9"])
    (run / "config.yaml").write_text(to_yaml(config))
    monkeypatch.setattr("rlpipe.configs.constraints.find_spec", lambda name: None)
    assert "no rule trips" in diagnosis(run, capsys)["health", "ok"]
    (run / "config.yaml").write_text(to_yaml(config) + "option_of_next_year: 1\n")
    assert re.search("can't read the run's config.yaml: .*next_year", diagnosis(run, capsys)["health", "skipped"])


def test_a_finished_run_is_well(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end(run, None)
    outcome = read_outcome(run)
    assert outcome is not None
    assert (outcome.state, outcome.pid) == ("finished", os.getpid())
    said = diagnosis(run, capsys)
    assert "the run has finished after 6 steps" in said["ending", "ok"]
    assert "no rule trips" in said["health", "ok"]


def _collapse(folder: Path) -> None:
    write_metrics(folder, [row(step, entropy=0.5 / step**3) for step in range(1, 30)])


def _damage_ledger(folder: Path) -> None:
    path = folder / "ledger.sqlite"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def _damage_checkpoint(folder: Path) -> None:
    (folder / "checkpoints" / "step_000004").mkdir(parents=True)


def _lose_engines(folder: Path) -> None:
    made = Run(folder)
    for _ in range(3):
        made.ledger.note("engine", "rollout-0", "engine rollout-0 died: its process was killed (memory usage)")
    made.ledger.close()


OTHERS: Mapping[str, tuple[Callable[[Path], Any], str, str, str]] = {
    "the policy collapsed": (_collapse, "health", "warning", r"from step \d+ on, \(entropy_low\): .*Try: "),
    "the ledger is damaged": (_damage_ledger, "ledger", "PROBLEM", r"ledger\.sqlite"),
    "a checkpoint is damaged": (_damage_checkpoint, "checkpoints", "PROBLEM", r"step_000004 is damaged"),
    "engines were lost": (_lose_engines, "events", "warning", r"rollout-0, 3 x: .*memory usage.*rlpipe plan"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_else_went_wrong_is_said(name: str, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plant, subject, status, says = OTHERS[name]
    end(run, RunError("something"))
    plant(run)
    assert re.search(says, diagnosis(run, capsys)[subject, status])


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("reward 'sums' failed: ValueError: '{}'", "fix the reward"),
        ("3 of 4 episodes failed, the first with: KeyError: {}", "fix the environment"),
        ("turn 2: too many images: {}", "rlpipe inspect RUN"),
    ],
)
def test_all_groups_that_failed_are_counted(
    reason: str, fix: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end(run, RunError("something"))
    with closing(Ledger(run / LEDGER)) as ledger:
        ids = [number for (number,) in ledger.rows("SELECT group_id FROM groups WHERE state != 'ADMITTED'")]
        ledger.discard({number: reason.format(place) for place, number in enumerate(ids)})
        failures = ledger.failures()
    (text, most), total = failures[0], sum(number for _, number in failures)
    assert total > most
    files = sorted(run.iterdir())
    said = diagnosis(run, capsys)["groups", "PROBLEM"]
    assert f"{total} of {len(ids)} groups failed, {most} of them with: {text}; {fix}" in said
    assert sorted(run.iterdir()) == files, "reading leaves no files"


def test_recoveries_do_not_crowd_out_deaths(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    end(run, None)
    made = Run(run)
    for number in range(8):
        for kind in ("recovery", "checkpoint", "recovery", "checkpoint"):
            made.ledger.note(kind, f"part-{number}", f"{kind} of part-{number}")
    made.ledger.note("death", "rollout-0", "engine rollout-0 died")
    made.ledger.close()
    assert main(["doctor", "--json", str(run)]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    first, *others, more, last = [(line["status"], line["text"]) for line in found if line["subject"] == "events"]
    assert first == ("warning", "rollout-0, 1 x: engine rollout-0 died")
    assert last == ("ok", "16 recoveries, the last one: recovery of part-7")
    assert others == [("warning", f"part-{number}, 2 x: checkpoint of part-{number}") for number in range(4)]
    assert more == ("warning", "4 more subjects have events")


@pytest.mark.parametrize("kind", ["sft", "preference", "reward_model"])
def test_deaths_of_a_run_without_a_ledger_are_said(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text(f"name: run\nalgorithm: {{kind: {kind}}}\n")
    write_metrics(tmp_path, [row(step) for step in range(1, 7)])
    end(tmp_path, None)
    assert not [subject for subject, _ in diagnosis(tmp_path, capsys) if subject == "events"]
    log = StepLog(tmp_path / EVENTS, 0)
    for number, text in enumerate(["its process was killed (memory usage)", "CUDA out of memory"]):
        message = f"rank 1 died: {text}"
        log.append(3, [asdict(LedgerEvent(number=number, time=5.0, kind="death", subject="rank 1", message=message))])
    event = LedgerEvent(number=2, time=6.0, kind="recovery", subject="rank 1", message="from step 2")
    log.append(3, [asdict(event), asdict(replace(event, kind="health"))])
    said = diagnosis(tmp_path, capsys)
    assert re.search(r"rank 1, 2 x: rank 1 died: CUDA out of memory; rlpipe plan", said["events", "warning"])
    assert said["events", "ok"].startswith("1 recoveries, the last one: from step 2")
    assert f"algorithm.kind={kind}, which keeps no ledger" in said["ledger", "skipped"]


def test_other_folders_and_old_records_are_refused_or_passed_over(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "is not the folder of a run" in capsys.readouterr().err
    assert main(["doctor", str(tmp_path / "tpyo")]) == 2
    assert f"there is no run {tmp_path / 'tpyo'}" in capsys.readouterr().err
    for damaged in ("", "[]", '{"state": 1}', "{" * 100_000):
        (run / OUTCOME).write_text(damaged)
        assert "was not recorded" in diagnosis(run, capsys)["ending", "skipped"]


def test_an_error_that_ends_the_process_at_once_is_recorded(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record_error(run, HeadLost("not of a command that runs"))
    assert read_outcome(run) is None
    with recorded_outcome(run):
        record_error(run, HeadLost("the head is gone"))
        found = diagnosis(run, capsys)
    assert any("HeadLost: the head is gone" in text for text in found.values())
    outcome = RunOutcome(state=RUNNING, host="here", pid=os.getpid() + 1, began_at=0.0)
    (run / OUTCOME).write_text(json.dumps(asdict(outcome)))
    record_error(run, HeadLost("of another process"))
    assert read_outcome(run) == outcome

"""Tests that a run whose driver was killed resumes from its checkpoint, and ends like an undisturbed one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch
from run_cases import REWARDS_FILE, SIX_STEPS, read_adapter, read_jsonl, run_options, supervised_options, trained_steps
from signal_cases import HANGS_S, ledger_of, signals, start_driver, wait_for_step

import rlpipe
from benchmarks.processes import find_processes
from rlpipe import cli
from rlpipe.common.run_files import LEDGER
from rlpipe.errors import LedgerDamaged
from rlpipe.learner.step import WINDOW
from rlpipe.replay.ledger.run_ledger import GroupState
from rlpipe.run.controller import ROW_CHANGED

pytestmark = pytest.mark.ray


def actor_names() -> Iterator[str]:
    return (entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True))


def wait_until_gone(name: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while name in actor_names():
        assert time.monotonic() < deadline, f"actor {name} has outlived its driver by {timeout_s} s"
        time.sleep(0.1)


def test_a_killed_run_continues_and_ends_the_same(
    cluster_environment: dict[str, str],
    undisturbed_run: Path,
    tiny_policy: Path,
    prompts_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    options = run_options(tiny_policy, prompts_file, output, *SIX_STEPS, "tracking.log_completions=1")
    driver = start_driver(options, cluster_environment, log)
    wait_for_step(driver, output / "metrics.jsonl", 3)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert (output / "checkpoints" / "step_000002" / "learner.json").exists()
    assert not (output / "summary.json").exists()
    wait_until_gone("rollout-0", timeout_s=30)
    newest = max(int(path.name.removeprefix("step_")) for path in (output / "checkpoints").glob("step_*"))

    assert cli.main(["train", *options, "algorithm.group_size=8", "learner.optimizer.lr=0.5"]) == 2
    refusal = capsys.readouterr().err
    assert "algorithm.group_size: 4 -> 8; learner.optimizer.lr: 0.01 -> 0.5" in refusal

    resumed = start_driver(options, cluster_environment, log)
    assert resumed.wait(timeout=HANGS_S) == 0, log.read_text()
    rows = read_jsonl(output / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    steps = {row["step"] for row in read_jsonl(output / "completions.jsonl")}
    assert steps >= {1, 2, 3, *range(newest + 1, 7)}, "those of steps that are trained again are written again"
    for mine, theirs in zip(trained_steps(output), trained_steps(undisturbed_run), strict=True):
        assert (mine["reward"], mine["loss"]) == (theirs["reward"], theirs["loss"])
    expected, adapter = read_adapter(undisturbed_run / "policy"), read_adapter(output / "policy")
    assert adapter.keys() == expected.keys()
    assert all(torch.equal(adapter[name], expected[name]) for name in expected)
    assert json.loads((output / "summary.json").read_text())["steps"] == 6


@pytest.mark.slow
def test_a_supervised_run_that_had_met_its_target_trains_no_more(
    local_ray: None, tiny_policy: Path, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    options = supervised_options(tiny_policy, tmp_path / "rows.jsonl", output, "algorithm.stop_loss=1000")
    assert rlpipe.train(rlpipe.load_config(options))["steps"] == WINDOW
    shutil.rmtree(output / "policy")  # as if it had been killed while it wrote this
    (output / "summary.json").unlink()
    assert rlpipe.train(rlpipe.load_config(options))["steps"] == WINDOW
    assert (output / "policy").is_dir()
    assert [row["step"] for row in trained_steps(output)] == [*range(1, WINDOW + 1)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "is_local"), [(signal.SIGINT, True), (signal.SIGTERM, False), (signal.SIGTERM, True)]
)
def test_a_run_that_is_told_to_end_writes_a_checkpoint_and_continues(
    cluster_environment: dict[str, str],
    undisturbed_run: Path,
    tiny_policy: Path,
    prompts_file: Path,
    tmp_path: Path,
    number: signal.Signals,
    is_local: bool,
) -> None:
    environment = cluster_environment
    if is_local:  # its processes are children of the driver, whose whole group gets the signal
        environment = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    output, log = tmp_path / "run", tmp_path / "log.txt"
    options = run_options(tiny_policy, prompts_file, output, *SIX_STEPS, "checkpoint.every_steps=0")
    driver = start_driver(options, environment, log)
    wait_for_step(driver, output / "metrics.jsonl", 2)
    os.kill(driver.pid, number)  # `timeout` signals the process, and then its group
    os.killpg(driver.pid, number)
    assert driver.wait(timeout=120) == 130
    said = log.read_text()
    assert f"rlpipe: error: stopped by {number.name}; the same command continues from the checkpoint" in said
    assert "Traceback" not in said
    (checkpoint,) = (output / "checkpoints").iterdir()
    assert checkpoint.name in ("step_000002", "step_000003", "step_000004")
    assert not (output / "policy").exists()

    resumed = start_driver(options, environment, log)
    assert resumed.wait(timeout=HANGS_S) == 0, log.read_text()
    expected, adapter = read_adapter(undisturbed_run / "policy"), read_adapter(output / "policy")
    assert all(torch.equal(adapter[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_second_signal_ends_the_run_at_once(
    cluster_environment: dict[str, str], tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    driver = start_driver(run_options(tiny_policy, prompts_file, output, *SIX_STEPS), cluster_environment, log)
    wait_for_step(driver, output / "metrics.jsonl", 1)
    learner = find_processes("learner")[-1]
    os.kill(learner, signal.SIGSTOP)
    try:
        driver.send_signal(signal.SIGTERM)
        time.sleep(3)
        assert driver.poll() is None, "a frozen learner can't end its step"
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(timeout=60) == 130
    finally:
        with suppress(ProcessLookupError):
            os.kill(learner, signal.SIGKILL)
    assert "rlpipe: interrupted" in log.read_text()


@pytest.mark.slow
def test_a_run_that_is_told_to_end_while_ray_starts_ends_at_once(
    cluster_environment: dict[str, str], tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    environment = {name: value for name, value in cluster_environment.items() if name != "RAY_ADDRESS"}
    output, log = tmp_path / "run", tmp_path / "log.txt"
    driver = start_driver(run_options(tiny_policy, prompts_file, output), environment, log)
    while "starting Ray" not in log.read_text():
        assert driver.poll() is None, log.read_text()
        time.sleep(0.01)
    os.kill(driver.pid, signal.SIGTERM)
    os.killpg(driver.pid, signal.SIGTERM)
    assert driver.wait(timeout=60) == 130
    assert "rlpipe: interrupted" in log.read_text()
    assert "Traceback" not in log.read_text()


@pytest.mark.slow
def test_a_run_that_is_told_to_end_while_it_starts_ends_at_once(
    cluster_environment: dict[str, str], tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    earlier = find_processes("learner")
    with signals(output, {0: "rollout"}, signal.SIGSTOP) as frozen:
        driver = start_driver(run_options(tiny_policy, prompts_file, output, *SIX_STEPS), cluster_environment, log)
        while not frozen or find_processes("learner") == earlier:  # the engine can't start; the learner is starting
            assert driver.poll() is None, log.read_text()
            time.sleep(0.1)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(timeout=60) == 130
    said = log.read_text()
    assert "rlpipe: error: stopped by SIGTERM" in said
    assert "Traceback" not in said
    assert not (output / "policy").exists()


@pytest.mark.slow
def test_an_asynchronous_run_whose_driver_dies_keeps_its_accounts(
    cluster_environment: dict[str, str], tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    options = run_options(tiny_policy, prompts_file, output, *SIX_STEPS, "replay.max_staleness=2")
    for step in (1, 3):
        driver = start_driver(options, cluster_environment, log)
        wait_for_step(driver, output / "metrics.jsonl", step)
        driver.send_signal(signal.SIGKILL)
        driver.wait()
        wait_until_gone("rollout-0", timeout_s=30)
    last = start_driver(options, cluster_environment, log)
    assert last.wait(timeout=HANGS_S) == 0, log.read_text()
    assert [row["step"] for row in read_jsonl(output / "metrics.jsonl") if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert cli.main(["audit", str(output)]) == 0


def num_generated(output: Path) -> int:
    """Return how many groups wait for their scores; none while the ledger is being made."""
    with suppress(LedgerDamaged):
        if (output / LEDGER).exists():
            return ledger_of(output).counts().get(GroupState.GENERATED, 0)
    return 0


@pytest.mark.slow
def test_completions_of_rows_that_have_changed_are_not_scored_against_the_new_ones(
    cluster_environment: dict[str, str], tiny_policy: Path, tmp_path: Path
) -> None:
    output, log, rows, hold = tmp_path / "run", tmp_path / "log.txt", tmp_path / "rows.jsonl", tmp_path / "hold"
    hold.touch()
    rows.write_text("".join(json.dumps({"prompt": f"{number}+1="}) + "\n" for number in range(8)))
    reward = (f"scoring.rewards.digits.path={REWARDS_FILE}:held_digits", f"scoring.rewards.digits.kwargs.hold={hold}")
    sizes = ("algorithm.num_steps=1", "algorithm.groups_per_step=8", "replay.max_staleness=0")
    options = run_options(tiny_policy, rows, output, *reward, *sizes, "tracking.log_completions=100")
    driver = start_driver(options, cluster_environment, log)
    deadline = time.monotonic() + HANGS_S
    while num_generated(output) < 8:
        assert driver.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.1)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    wait_until_gone("rollout-0", timeout_s=30)

    lines = rows.read_text().splitlines()
    kept = [entry["prompt"] for entry in map(json.loads, lines[::2])]
    rows.write_text("".join(f"{line}\n" for line in lines).replace("1+1=", "1+2=").replace("3+1=", "3+2="))
    hold.unlink()
    again = start_driver(options, cluster_environment, log)
    assert again.wait(timeout=HANGS_S) == 0, log.read_text()
    changed = ledger_of(output).rows("SELECT prompt_id, reason FROM groups WHERE state = 'DISCARDED'")
    assert sorted(prompt_id for prompt_id, reason in changed if reason == ROW_CHANGED) == [1, 3]
    assert cli.main(["audit", str(output)]) == 0
    said = {row["prompt"][-1]["content"] for row in read_jsonl(output / "completions.jsonl")}
    assert not said & {"1+1=", "3+1="}
    assert said >= set(kept)


@pytest.mark.slow
def test_a_run_that_is_told_to_end_in_its_last_evaluation_ends(
    cluster_environment: dict[str, str], tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    output, log, held_out = tmp_path / "run", tmp_path / "log.txt", tmp_path / "held_out.jsonl"
    held_out.write_text('{"prompt": "1+2=", "hangs": true}\n')
    options = run_options(
        tiny_policy,
        prompts_file,
        output,
        f"data.held_out.path={held_out}",
        f"scoring.rewards.digits.path={REWARDS_FILE}:digits_but_for_the_end",
    )
    driver = start_driver(options, cluster_environment, log)
    wait_for_step(driver, output / "metrics.jsonl", 3)
    time.sleep(3)
    assert driver.poll() is None, log.read_text()
    driver.send_signal(signal.SIGTERM)
    assert driver.wait(timeout=60) == 130
    assert "rlpipe: error: stopped by SIGTERM" in log.read_text()
    assert "Traceback" not in log.read_text()

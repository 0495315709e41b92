"""Tests of rewards in Ray Serve: dead replicas lose nothing, hanging ones cost their group, and none outlives a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from ray import serve
from run_cases import REWARDS_FILE, diagnosed, make_config, run_options, trained_steps
from signal_cases import ledger_of

import rlpipe
from rlpipe.replay.ledger.audit import audit

pytestmark = pytest.mark.ray
WAIT_S = 300


def served(name: str, reward: str, *, replicas: int = 2, timeout_s: float = 30, **kwargs: object) -> str:
    given = ", ".join(f"{key}: '{value}'" for key, value in kwargs.items())
    options = f"serve: {{replicas: {replicas}, batch_wait_s: 0.05}}, num_cpus: 0.1, timeout_s: {timeout_s}"
    return f"+scoring.rewards.{name}={{path: '{REWARDS_FILE}:{reward}', {options}, kwargs: {{{given}}}}}"


def wait_for(found: object, what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not found():  # type: ignore[operator]
        assert time.monotonic() < deadline, f"{what} did not come within {WAIT_S} s"
        time.sleep(0.05)


def processes(folder: Path) -> list[int]:
    return [int(path.stem) for path in folder.glob("*.batches")]


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_a_replica_that_is_killed_loses_nothing(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    output, folder = tmp_path / "run", tmp_path / "replicas"
    folder.mkdir()
    config = make_config(
        tiny_policy,
        prompts_file,
        output,
        served("nap", "Napping", folder=folder),
        "algorithm.num_steps=12",
        "replay.max_staleness=1",
    )
    killed: list[int] = []

    def kill_one() -> None:
        wait_for(lambda: processes(folder), "a group")
        metrics = output / "metrics.jsonl"
        wait_for(lambda: metrics.exists() and len(metrics.read_text().splitlines()) >= 2, "a step")
        killed.append(processes(folder)[0])
        os.kill(killed[0], signal.SIGKILL)

    killer = threading.Thread(target=kill_one)
    killer.start()
    rlpipe.train(config)
    killer.join()

    steps = trained_steps(output)
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert [row["groups/failed"] for row in steps] == [0] * 12
    assert {*steps[-1]} >= {"rewards/nap/mean", "rewards/digits/mean"}
    assert not audit(ledger_of(output)).problems
    assert len(processes(folder)) >= 2, "both replicas have scored"
    batches = [int(size) for path in folder.glob("*.batches") for size in path.read_text().split()]
    assert max(batches) > 1, "requests are put together"
    assert not any(map(is_alive, processes(folder)))


@pytest.mark.slow
def test_a_replica_that_hangs_costs_its_group(
    local_ray: None, tiny_policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    child = tmp_path / "child"
    hanging, behaving = (
        {"prompt": "say nothing", "how": "sleep", "child": str(child)},
        {"prompt": "say", "how": "behave"},
    )
    rows.write_text("".join(f"{json.dumps(row)}\n" for row in [hanging, *[behaving] * 14]))
    output = tmp_path / "run"
    config = make_config(
        tiny_policy, rows, output, served("judge", "misbehave", replicas=1, timeout_s=1), "data.shuffle=false"
    )
    rlpipe.train(config)
    assert [row["step"] for row in trained_steps(output)] == [1, 2, 3]
    assert trained_steps(output)[-1]["groups/failed"] == 1
    shown = capsys.readouterr()
    assert "reward 'judge' failed: a replica of run-judge-" in shown.out + shown.err
    assert "took longer than" in shown.out + shown.err
    wait_for(lambda: not is_alive(int(child.read_text())), "the end of what the reward started")


@pytest.mark.slow
def test_replicas_do_not_outlive_a_driver_that_is_killed(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "replicas"
    folder.mkdir()
    options = run_options(
        tiny_policy,
        prompts_file,
        tmp_path / "run",
        served("nap", "Napping", replicas=1, folder=folder, seconds=0.5),
        "algorithm.num_steps=1000",
        f"cluster.address={os.environ.get('RAY_ADDRESS') or address_of_local_ray()}",
    )
    driver = subprocess.Popen(
        [sys.executable, "-m", "rlpipe", "train", *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"RAY_AUTH_MODE": "token"},  # as the cluster of this process has
    )
    try:
        wait_for(lambda: processes(folder), "a replica")
    finally:
        driver.kill()
        driver.wait()
    wait_for(lambda: not any(map(is_alive, processes(folder))), "the end of the replicas")
    wait_for(lambda: not serve.status().applications, "the end of the application")
    serve.shutdown()


def address_of_local_ray() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


@pytest.mark.slow
def test_replicas_that_cannot_start_end_the_run(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_policy, prompts_file, tmp_path / "run", served("ruin", "Ruined", replicas=1))
    with pytest.raises(rlpipe.RunError, match=r"the replicas of ruin can't start: .*no such model"):
        rlpipe.train(config)
    assert re.search("the replicas of ruin can't start: .*no such model", diagnosed(tmp_path / "run"))
    assert not serve.status().applications

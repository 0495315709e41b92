"""A run whose driver was killed goes on from its checkpoint, and ends where an undisturbed one does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch
from run_cases import SIX_STEPS, read_adapter, read_jsonl, run_options, trained_steps

from rlpipe import cli

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.fixture
def cluster_environment(local_ray: None) -> dict[str, str]:
    """Lets another process join the tests' cluster."""
    address = ray.get_runtime_context().gcs_address
    return {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}


def start_driver(options: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "rlpipe", "train", *options], env=environment, stdout=file, stderr=file
        )


def wait_for_step(driver: subprocess.Popen[bytes], metrics: Path, step: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        assert driver.poll() is None, "the run ended before it could be stopped"
        if metrics.exists() and any(f'"step": {step},' in line for line in metrics.read_text().splitlines()):
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not trained within {timeout_s} s")


def actor_names() -> Iterator[str]:
    return (entry["name"] for entry in ray.util.list_named_actors(all_namespaces=True))


def wait_until_gone(name: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while name in actor_names():
        assert time.monotonic() < deadline, f"actor {name} has outlived its driver by {timeout_s} s"
        time.sleep(0.1)


def test_a_killed_run_goes_on_and_ends_the_same(
    cluster_environment: dict[str, str],
    undisturbed_run: Path,
    tiny_policy: Path,
    prompts_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output, log = tmp_path / "run", tmp_path / "log.txt"
    options = run_options(tiny_policy, prompts_file, output, *SIX_STEPS)
    driver = start_driver(options, cluster_environment, log)
    wait_for_step(driver, output / "metrics.jsonl", 3, timeout_s=120)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert (output / "checkpoints" / "step_000002" / "learner.json").exists()
    assert not (output / "summary.json").exists()
    wait_until_gone("rollout-0", timeout_s=30)

    assert cli.main(["train", *options, "algorithm.group_size=8", "learner.optimizer.lr=0.5"]) == 2
    refusal = capsys.readouterr().err
    assert "algorithm.group_size: 4 -> 8; learner.optimizer.lr: 0.01 -> 0.5" in refusal

    resumed = start_driver(options, cluster_environment, log)
    assert resumed.wait(timeout=180) == 0, log.read_text()
    rows = read_jsonl(output / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    for mine, theirs in zip(trained_steps(output), trained_steps(undisturbed_run), strict=True):
        assert (mine["reward"], mine["loss"]) == (theirs["reward"], theirs["loss"])
    expected, adapter = read_adapter(undisturbed_run / "policy"), read_adapter(output / "policy")
    assert adapter.keys() == expected.keys()
    assert all(torch.equal(adapter[name], expected[name]) for name in expected)
    assert json.loads((output / "summary.json").read_text())["steps"] == 6

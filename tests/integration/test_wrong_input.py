"""Tests of wrong input as a user meets it: one line on standard error, exit code 2, and no Ray started."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from run_cases import REWARDS_FILE, run_options

NO_CLUSTER = "127.0.0.1:1"
"""An address without Ray, so that a run that gets as far as joining a cluster fails with another message."""

CASES = {
    "unknown key": (["algorithm.grop_size=3"], r"algorithm\.grop_size: .* did you mean algorithm\.group_size\?"),
    "out of range": (["algorithm.loss.clip_high=-1"], r"algorithm\.loss\.clip_high: -1.* at least 0"),
    "contradiction": (["learner.num_ranks=2"], r"learner\.num_ranks: 2, but learner\.strategy=single"),
    "missing file": (["data.path=nowhere.jsonl"], r"data\.path: there is no file \S*nowhere\.jsonl"),
    "no such model": (["model.path=./no_model"], r"model\.path: there is no folder \S*no_model"),
    "hub id offline": (
        ["model.path=some-org/some-model"],
        r"model\.path: .*some-org/some-model.* hub can't be reached",
    ),
    "wrong reward": (
        [f"scoring.rewards.digits.path={REWARDS_FILE}:digit"],
        r"reward '\S+:digit' can't be imported: .* did you mean digits\?",
    ),
}


def fails(options: list[str], environment: dict[str, str], exit_code: int = 2, notice: str = "") -> str:
    """Return the one line on standard error, after the ``notice``, of a command that ends with the exit code."""
    done = subprocess.run(
        [sys.executable, "-m", "rlpipe", "train", *options],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == exit_code, done.stderr
    *notices, error = done.stderr.splitlines()
    assert error.startswith("rlpipe: error: ")
    assert len(notices) == bool(notice)
    assert all(notice in line for line in notices)
    assert "Traceback" not in done.stdout
    return error


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case == "hub id offline")) for case in CASES]
)
def test_wrong_input_is_one_line(tiny_policy: Path, prompts_file: Path, tmp_path: Path, case: str) -> None:
    overrides, message = CASES[case]
    options = run_options(tiny_policy, prompts_file, tmp_path, *overrides)
    assert re.search(message, fails(options, {"RAY_ADDRESS": NO_CLUSTER}))


def test_a_row_without_its_column_is_named(tiny_policy: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in [{"prompt": "a"}, {"prompt": "b"}, {"question": "c"}]))
    options = run_options(tiny_policy, rows, tmp_path)
    assert f"{rows}, line 3: no column 'prompt'" in fails(options, {"RAY_ADDRESS": NO_CLUSTER})


@pytest.mark.slow
def test_a_ray_that_does_not_start_is_one_line(tiny_policy: Path, prompts_file: Path, tmp_path: Path) -> None:
    options = run_options(tiny_policy, prompts_file, tmp_path / "run")
    environment = {"RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(prompts_file)}
    error = fails(options, environment, exit_code=1)
    assert "Ray did not start on this machine" in error
    assert "Not a directory" in error


@pytest.mark.ray
def test_more_gpus_than_the_cluster_has(local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path) -> None:
    options = run_options(tiny_policy, prompts_file, tmp_path, "learner=single_gpu", "rollout.num_gpus=1")
    options.append("cluster.schedule_timeout_s=1")
    environment = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "RAY_AUTH_MODE": "token"}
    error = fails(options, environment, notice="waiting up to cluster.schedule_timeout_s=1 seconds for further hosts")
    assert "the run needs 2 GPU (rollout-0 1, learner-0 1) but the cluster has 0" in error

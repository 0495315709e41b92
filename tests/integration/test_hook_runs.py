"""Tests that a user's hook sees every scored group, and that a bad hook costs the run nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from run_cases import REWARDS_FILE, make_config, trained_steps

import rlpipe

pytestmark = pytest.mark.ray


def test_the_hook_sees_every_scored_group(
    local_ray: None,
    tiny_policy: Path,
    prompts_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    hook = f"scoring.on_rollouts_scored='{REWARDS_FILE}:record_groups'"
    rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path / "run", hook))
    lines = [line.split(" ", 1) for line in (tmp_path / "hook.txt").read_text().splitlines()]
    assert len({number for number, _ in lines}) == len(lines) == 16, "three steps of four groups, and those of the pass"
    assert all(len(json.loads(rewards)) == 4 for _, rewards in lines)
    assert "core_worker" not in capfd.readouterr().err, "Ray's core has nothing to say about the actors"


@pytest.mark.slow
def test_a_bad_hook_costs_nothing(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hook = f"scoring.on_rollouts_scored='{REWARDS_FILE}:fail_hook'"
    rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path / "run", hook, "algorithm.num_steps=6"))
    steps = trained_steps(tmp_path / "run")
    assert [row["step"] for row in steps] == list(range(1, 7))
    assert steps[-1]["hook/failed"] > 0
    assert steps[-1]["groups/failed"] == 0
    shown = capsys.readouterr()
    assert "scoring.on_rollouts_scored failed on" in shown.out + shown.err


def test_a_hook_that_is_not_there_is_refused(tiny_policy: Path, prompts_file: Path, tmp_path: Path) -> None:
    hook = f"scoring.on_rollouts_scored='{REWARDS_FILE}:no_hook'"
    with pytest.raises(rlpipe.InputError, match=r"scoring.on_rollouts_scored .* has no 'no_hook'"):
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path / "run", hook))

"""`rlpipe doctor` with real processes: the step that it tries, and runs that died."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from run_cases import REWARDS_FILE, SIX_STEPS, run_options
from signal_cases import start_driver, wait_for_step

from rlpipe.cli import main

pytestmark = pytest.mark.ray
RAISING = f"scoring.rewards.digits.path={REWARDS_FILE}:always_raises"


def said(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], str]:
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    return {(line["subject"], line["status"]): f"{line['text']}; {line['fix']}" for line in found}


def test_one_step_is_tried_and_leaves_nothing(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = run_options(tiny_policy, prompts_file, tmp_path / "run", "data.held_out.size=4")
    assert main(["doctor", "--json", *options]) == 0
    found = said(capsys)
    assert "trained in" in found["trial step", "ok"]
    assert "generating" in found["trial step", "ok"]
    assert "(reward " in found["completion", "ok"]
    assert not list(tmp_path.iterdir())


def test_hosts_of_a_cluster_are_asked(
    cluster_environment: dict[str, str],
    tiny_policy: Path,
    prompts_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", cluster_environment["RAY_ADDRESS"])
    assert main(["doctor", "--quick", "--json", *run_options(tiny_policy, prompts_file, tmp_path / "run")]) == 0
    found = said(capsys)
    assert f"1 hosts see {tmp_path}, their clocks agree, and the run fits on them" in found["hosts", "ok"]
    assert f"{cluster_environment['RAY_ADDRESS']} answers" in found["network", "ok"]


ACTOR = """
import rlpipe


class Broken(rlpipe.RewardActor):
    def score(self, group):
        raise ValueError("never works")
"""


@pytest.mark.slow
def test_a_reward_that_fails_is_found_before_the_step_or_by_it(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--json", *run_options(tiny_policy, prompts_file, tmp_path / "run", RAISING)]) == 1
    found = said(capsys)
    assert "never works" in found["reward calls", "PROBLEM"]
    assert "the problems above come first" in found["trial step", "skipped"]
    (tmp_path / "broken.py").write_text(ACTOR)  # an actor may need what only the run has
    broken = f"scoring.rewards.digits.path={tmp_path / 'broken.py'}:Broken"
    assert main(["doctor", "--json", *run_options(tiny_policy, prompts_file, tmp_path / "run", broken)]) == 1
    assert "groups in a row failed" in said(capsys)["trial step", "PROBLEM"]


@pytest.mark.slow
def test_a_run_whose_reward_fails_says_so_afterwards(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *run_options(tiny_policy, prompts_file, tmp_path / "run", RAISING)]) == 1
    capsys.readouterr()
    assert main(["doctor", "--json", str(tmp_path / "run")]) == 0
    found = said(capsys)
    assert "after no step, RewardFailed: " in found["ending", "PROBLEM"]
    assert " of them with: reward 'digits' failed: ValueError: never works" in found["groups", "PROBLEM"]


@pytest.mark.slow
def test_a_killed_driver_is_distinguished_from_a_failed_run(
    cluster_environment: dict[str, str],
    tiny_policy: Path,
    prompts_file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "run"
    driver = start_driver(
        run_options(tiny_policy, prompts_file, output, *SIX_STEPS), cluster_environment, tmp_path / "log"
    )
    wait_for_step(driver, output / "metrics.jsonl", 1)
    assert main(["doctor", "--json", str(output)]) == 0
    assert "it is still running" in said(capsys)["ending", "ok"]
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert main(["doctor", "--json", str(output)]) == 0
    assert f"process {driver.pid} on " in said(capsys)["ending", "PROBLEM"]

"""Two minutes of random process deaths during the quickstart, with the real vLLM engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.slow]
NOISE = 0.2
"""Four standard errors of the difference between two accuracies on 200 prompts."""


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["answers", "environment"])
def test_random_deaths_lose_nothing(kind: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.chaos", "--minutes", "2", "--seed", "1", "--output", str(tmp_path)]
    command += ["--episodes", kind] * (kind != "answers")
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert sum(result["kills"].values()) >= 3
    assert (result["groups_lost"], result["groups_repeated"], result["audit"]) == (0, 0, [])
    assert result["processes_left"] == 0
    assert result["accuracy"] == pytest.approx(result["accuracy_undisturbed"], abs=NOISE)

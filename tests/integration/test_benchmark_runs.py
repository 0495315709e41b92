"""Every benchmark that takes less than a minute runs as its page says, only smaller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
COMMANDS = {
    "lora_sync": ("--adapter-mb", "2", "--engines", "2", "--repetitions", "2"),
    "orchestration": ("--engines", "2", "--groups", "256", "--warmup-groups", "128"),
    "overlap": ("--ratios", "1", "--random-ratios", "1", "--max-staleness", "1", "--seconds", "0.1", "--steps", "2"),
}
KEYS = {
    "lora_sync": {"adapter_mb", "engines", "object_store_s", "file_s", "ratio"},
    "orchestration": {"engines", "group_size", "groups_per_second", "rss_growth_mb"},
    "overlap": {"worst_efficiency", "grid"},
}


@pytest.mark.parametrize(
    "name",
    [pytest.param("lora_sync", marks=pytest.mark.vllm), "orchestration", "overlap"],
)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", *COMMANDS[name]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result.keys() >= KEYS[name]

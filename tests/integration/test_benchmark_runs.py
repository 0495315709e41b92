"""Tests that every benchmark that takes less than a minute runs as its page says, at a smaller size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
COMMANDS = {
    "episodes": ("--episodes", "64", "--repeats", "1", "--concurrency", "32"),
    "examples": ("sft", "--set", "algorithm.num_steps=2", "learner.schedule.warmup_steps=0"),
    "host_adam": ("--elements", "65536", "--steps", "3", "--sides", "torch"),
    "kernels": (
        *("--cases", "head", "rows", "lora", "features", "--sides", "rlpipe", "trl", "peft"),
        *("--tokens", "64", "--vocabulary", "512", "--hidden", "32", "--chunk-tokens", "16", "--layer", "32"),
        *("--sequence", "16", "--turns", "2"),
    ),
    "learner_memory": ("--tokens", "4096", "--vocabulary", "32768", "--chunk-tokens", "128"),
    "learner_speed": ("--steps", "4"),
    "lora_sync": ("--adapter-mb", "2", "--engines", "2", "--repetitions", "2"),
    "merge_memory": ("--shards", "8"),
    "offload_search": ("--blocks", "8", "--chunks", "30", "--repeats", "1"),
    "orchestration": ("--engines", "2", "--groups", "256", "--warmup-groups", "128"),
    "overlap": ("--ratios", "1", "--random-ratios", "1", "--max-staleness", "1", "--seconds", "0.1", "--steps", "2"),
    "shared_prefixes": ("--steps", "1"),
    "viewer": ("--groups", "2000", "--repeats", "1"),
    "scoring": ("--groups", "16", "--repeats", "1", "--processes", "1", "2", "--micro-batch-tokens", "1024"),
}
FEWER_TOKENS = {"compacted": 0.25, "rewritten": 0.8, "tree": 0.5}
"""Least share of tokens that the learner need not compute, by how the histories of agents share prefixes."""
KEYS = {
    "episodes": {"episodes", "environment", "http", "gateway_ms", "schedule"},
    "examples": {"quiet", "examples"},
    "host_adam": {f"{key}_{dtype}" for key in ("torch", "deepspeed", "ratio") for dtype in ("float32", "bfloat16")},
    "kernels": {"device", "seconds", "linear_logprob", "selective_logprob", "lora_linear", "feature_rewards", "groups"},
    "learner_memory": {"device", "ranks", "peak_mb", "logits_mb", "share", "publish_extra_mb", "extra_buckets"},
    "learner_speed": {"device", "tokens_per_second", "tokens_per_second_trainer", "ratio", "mfu"},
    "lora_sync": {"adapter_mb", "engines", "object_store_s", "file_s", "ratio"},
    "merge_memory": {"shards", "largest_shard_mb", "adapter_mb", "peak_mb", "ratio"},
    "offload_search": {"blocks", "chunks", "seconds"},
    "orchestration": {"engines", "group_size", "groups_per_second", "rss_growth_mb"},
    "overlap": {"worst_efficiency", "grid"},
    "shared_prefixes": {"device", *FEWER_TOKENS},
    "viewer": {"rollouts", "first_view_s", "filter_s"},
    "scoring": {
        "groups_per_second",
        "overhead_ms_per_rollout",
        "served_groups_per_second",
        "served_ratio",
        "feature_groups_per_second",
    },
}
OFFLOAD = {
    "device": str,
    "tokens_per_second": float,
    "ratio_zero3_offload": float,
    "ratio_fsdp2_offload": float,
    "over_roof": float,
    "peak_error": float,
    "time_error": float,
}
BOUNDS = {"learner_memory": {"share": 0.4, "extra_buckets": 2.0}, "merge_memory": {"ratio": 1.1}}
"""The memory bounds that the documentation promises."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.vllm] * (name in ("episodes", "lora_sync"))) for name in KEYS]
)
def test_a_benchmark_runs(name: str, tmp_path: Path) -> None:
    result = run_benchmark(name, *COMMANDS[name], folder=tmp_path)
    assert result.keys() >= KEYS[name]
    assert "error" not in result.get("examples", {}).get("sft", {}), result
    assert all(result[key] <= bound for key, bound in BOUNDS.get(name, {}).items()), result
    if name == "shared_prefixes":
        assert all(result[shape]["fewer_tokens"] >= least for shape, least in FEWER_TOKENS.items()), result


def test_offload_is_measured_alongside_others(tmp_path: Path) -> None:
    names = ("tiny", "tiny-lora")
    result = run_benchmark("offload", "--cases", *names, "--updates", "2", "--out", "report", folder=tmp_path)
    assert {key: type(result[key]) for key in OFFLOAD} == OFFLOAD
    assert tuple(result["cases"]) == names
    assert abs(result["peak_error"]) < 0.1
    ours = [result["cases"][name]["rlpipe"] for name in names]
    assert all(each["knobs"]["num_persistent"] < each["num_chunks"] for each in ours), "nothing was offloaded"
    assert json.loads((tmp_path / "report" / "offload.json").read_text()) == result
    assert len((tmp_path / "report" / "offload.md").read_text().splitlines()) == 6


def run_benchmark(name: str, *options: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", f"benchmarks.{name}", *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}  # other tests have the other cores
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result

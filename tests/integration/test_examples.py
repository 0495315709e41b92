"""Every example and experiment that needs no GPU or hub runs two steps from a random tiny policy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rlpipe.cli import main

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("local_ray", "in_the_repository")]

TWO_SMALL_STEPS = (
    "algorithm.num_steps=2",
    "algorithm.groups_per_step=4",
    "learner.num_cpus=1",
    "learner.num_threads=1",
    "learner.schedule.warmup_steps=0",
    "tracking=quiet",
    "cluster.schedule_timeout_s=300",
)
SMALL_GROUPS = ("algorithm.group_size=4", "rollout.num_threads=1")
ON_THE_CPU = (
    "rollout.num_gpus=0",
    "learner.num_gpus=0",
    "model.dtype=float32",
    "model.gradient_checkpointing=false",
    "rollout.num_cpus=1",
    "scoring.num_processes=1",
    "rollout.sampling.max_tokens=8",
)


@pytest.fixture
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run(output: Path, policy: Path, *arguments: str) -> list[dict[str, float]]:
    """Runs ``rlpipe train`` in this process, and returns the metrics of its trained steps."""
    assert main(["train", *arguments, *TWO_SMALL_STEPS, f"model.path={policy}", f"output={output}"]) == 0
    return trained_steps(output)


def trained_steps(output: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def engine_of(output: Path) -> str:
    return json.loads((output / "summary.json").read_text())["engine"]


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("experiment", "engine"),
    [("full_finetuning", "vllm"), ("rloo", "hf"), ("gspo", "hf"), ("dr_grpo", "hf"), ("dapo", "vllm")],
)
def test_algorithm(experiment: str, engine: str, tiny_policy: Path, tmp_path: Path) -> None:
    steps = run(
        tmp_path, tiny_policy, f"experiment={experiment}", *SMALL_GROUPS, f"rollout={engine}", "data.held_out.size=4"
    )
    assert [step["step"] for step in steps] == [1, 2]
    assert engine_of(tmp_path) == engine
    saved = "model.safetensors" if experiment == "full_finetuning" else "adapter_model.safetensors"
    assert (tmp_path / "policy" / saved).is_file()


@pytest.mark.vllm
def test_custom_reward(tiny_policy: Path, tmp_path: Path) -> None:
    steps = run(tmp_path, tiny_policy, "--config", "examples/custom_reward/run.yaml", *SMALL_GROUPS, "rollout=vllm")
    assert all(0 < step["rewards/novelty/mean"] <= 1 for step in steps)
    assert all("rewards/alphabet/mean" in step for step in steps)
    assert len(steps) == 2


def test_custom_reward_in_python(tiny_policy: Path, tmp_path: Path) -> None:
    overrides = [*TWO_SMALL_STEPS, *SMALL_GROUPS, f"model.path={tiny_policy}", f"output={tmp_path}", "rollout=hf"]
    script = ROOT / "examples" / "custom_reward" / "run.py"
    ended = subprocess.run(
        [sys.executable, str(script), *overrides], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("reward ")
    assert all({"rewards/alphabet/mean", "rewards/Novelty/mean"} <= step.keys() for step in trained_steps(tmp_path))


def test_own_data(tiny_policy: Path, tmp_path: Path) -> None:
    steps = run(tmp_path, tiny_policy, "--config", "examples/own_data/run.yaml", *SMALL_GROUPS, "rollout=hf")
    assert [step["step"] for step in steps] == [1, 2]
    assert "rewards/accuracy/mean" in steps[-1]


def test_sft(tiny_policy: Path, tmp_path: Path) -> None:
    steps = run(tmp_path, tiny_policy, "--config", "examples/sft/run.yaml")
    assert steps[1]["loss"] < steps[0]["loss"]


@pytest.mark.vllm
def test_gsm8k_on_made_rows(tiny_policy: Path, tmp_path: Path) -> None:
    steps = run(
        tmp_path,
        tiny_policy,
        "experiment=gsm8k",
        "data.source=jsonl",
        "data.name=null",
        "data.path=examples/gsm8k/rows.jsonl",
        "data.held_out.split=null",
        "data.held_out.size=2",
        *SMALL_GROUPS,
        *ON_THE_CPU,
    )
    assert [step["step"] for step in steps] == [1, 2]
    assert {"rewards/accuracy/mean", "rewards/format/mean"} <= steps[-1].keys()
    assert not any(step.get("groups/failed") for step in steps)
    sampled = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_text().splitlines()]
    assert {message["role"] for message in sampled[0]["prompt"]} == {"system", "user"}

"""Tests that every example and experiment that needs no GPU or hub runs two steps from a random tiny policy."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from real_cases import real_model, require_real_model
from run_cases import read_jsonl

from rlpipe.cli import main

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("local_ray", "in_the_repository")]

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
    """Run ``rlpipe train`` in this process, and return the metrics of its trained steps."""
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
@pytest.mark.slow
def test_algorithm(experiment: str, engine: str, tiny_policy: Path, tmp_path: Path) -> None:
    steps = run(
        tmp_path, tiny_policy, f"experiment={experiment}", *SMALL_GROUPS, f"rollout={engine}", "data.held_out.size=4"
    )
    assert [step["step"] for step in steps] == [1, 2]
    assert engine_of(tmp_path) == engine
    saved = "model.safetensors" if experiment == "full_finetuning" else "adapter_model.safetensors"
    assert (tmp_path / "policy" / saved).is_file()


@pytest.mark.vllm
def test_the_quickstart_samples_with_the_log_probs_that_it_trains(tiny_policy: Path, tmp_path: Path) -> None:
    given = ["experiment=quickstart", f"model.path={tiny_policy}", f"output={tmp_path}", "data.held_out.size=4"]
    small = [option for option in TWO_SMALL_STEPS if not option.startswith("algorithm.num_steps")]
    assert main(["train", *given, *small, *SMALL_GROUPS, "algorithm.num_steps=12"]) == 0
    assert "dtype: float32" in (tmp_path / "config.yaml").read_text()
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["engine"], summary["steps"]) == ("vllm", 12)
    assert summary["max_logprob_difference"] <= 1e-3


@pytest.mark.slow
@pytest.mark.vllm
def test_custom_reward(tiny_policy: Path, tmp_path: Path) -> None:
    steps = run(tmp_path, tiny_policy, "--config", "examples/custom_reward/run.yaml", *SMALL_GROUPS, "rollout=vllm")
    assert all(0 < step["rewards/novelty/mean"] <= 1 for step in steps)
    assert all("rewards/alphabet/mean" in step for step in steps)
    assert len(steps) == 2


@pytest.mark.slow
def test_custom_reward_in_python(tiny_policy: Path, tmp_path: Path) -> None:
    overrides = [*TWO_SMALL_STEPS, *SMALL_GROUPS, f"model.path={tiny_policy}", f"output={tmp_path}", "rollout=hf"]
    script = ROOT / "examples" / "custom_reward" / "run.py"
    ended = subprocess.run(
        [sys.executable, str(script), *overrides], cwd=tmp_path, capture_output=True, text=True, timeout=500
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith("reward ")
    assert all({"rewards/alphabet/mean", "rewards/Novelty/mean"} <= step.keys() for step in trained_steps(tmp_path))


ENVIRONMENTS = {
    **dict.fromkeys(("guess", "tictactoe", "calculator", "frozen_lake"), ()),
    "guess, as an agent": ("environment.path=null", "environment.agent=examples/guess/agent.py:solve"),
    "guess, with the template's history": ("environment.history=template", "weights.on_update=inflight"),
}
"""Options by example, which the name begins with."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_environments(name: str, tiny_policy: Path, tmp_path: Path) -> None:
    example = f"examples/{name.partition(',')[0]}/run.yaml"
    options = [*SMALL_GROUPS, "rollout=hf", "data.held_out.size=4", *ENVIRONMENTS[name]]
    steps = run(tmp_path, tiny_policy, "--config", example, *options)
    assert [step["episodes/failed"] for step in steps] == [0, 0]
    assert all(np.isfinite(step["reward"]) for step in steps)


@pytest.mark.slow
def test_own_data(tiny_policy: Path, tmp_path: Path) -> None:
    steps = run(tmp_path, tiny_policy, "--config", "examples/own_data/run.yaml", *SMALL_GROUPS, "rollout=hf")
    assert [step["step"] for step in steps] == [1, 2]
    assert "rewards/accuracy/mean" in steps[-1]


@pytest.mark.slow
def test_sft(tiny_policy: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    loud = [option for option in TWO_SMALL_STEPS if option != "tracking=quiet"]
    options = ["--config", "examples/sft/run.yaml", "data.max_prompt_tokens=44", f"model.path={tiny_policy}"]
    assert main(["train", *options, *loud, f"output={tmp_path}"]) == 0
    first, second = trained_steps(tmp_path)
    assert second["loss"] < first["loss"]
    said = capfd.readouterr().out
    assert said.count("loss mask: generation blocks") == 1
    assert "more than data.max_prompt_tokens=44" in said


@pytest.mark.slow
@pytest.mark.vllm
def test_images(tmp_path: Path) -> None:
    """Check that a model with random weights learns to name colours, which vLLM then samples from the pictures."""
    learned = tmp_path / "sft"
    quiet = ("tracking=quiet", "learner.num_cpus=1", "cluster.schedule_timeout_s=300")
    assert main(["train", "--config", "examples/images/sft.yaml", *quiet, f"output={learned}"]) == 0
    summary = json.loads((learned / "summary.json").read_text())
    assert summary["eval_loss_end"] < 0.3 < summary["eval_loss_start"]
    options = ("--config", "examples/images/run.yaml", *SMALL_GROUPS, "rollout=vllm", "data.held_out.size=16")
    steps = run(tmp_path / "rl", learned / "policy", *options)
    assert all(step["reward"] > 0.5 for step in steps)
    assert all(step["sampling/logp_difference/max"] < 1e-3 for step in steps[:1])
    assert engine_of(tmp_path / "rl") == "vllm"


@pytest.mark.slow
def test_ebft_on_prompts_with_answers(tiny_policy: Path, tmp_path: Path) -> None:
    few = ("data.held_out.size=4", "data.held_out.every_steps=1", *SMALL_GROUPS)
    steps = run(tmp_path, tiny_policy, "--config", "examples/ebft/run.yaml", *few)
    assert [np.isfinite(row["ebft/cfm_loss"]) for row in steps] == [True, True]
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert sum("eval/ebft/cfm_loss" in row for row in rows) == 3
    assert all(row["eval/accuracy"] == row["eval/rewards/exact/mean"] for row in rows if "eval/accuracy" in row)


@pytest.mark.slow
def test_ebft_on_raw_text(tiny_policy: Path, tmp_path: Path) -> None:
    """Check a run with evaluations at every step, and that one resumed after its first step ends in the same way."""
    few = ("data.held_out.size=4", "data.held_out.every_steps=1", "algorithm.group_size=2")
    options = ("--config", "examples/ebft_strided/run.yaml", *few)
    whole = run(tmp_path / "whole", tiny_policy, *options)
    assert [row["ebft/num_blocks"] > 0 for row in whole] == [True, True]
    losses = [row["eval/loss"] for row in read_jsonl(tmp_path / "whole" / "metrics.jsonl") if "eval/loss" in row]
    assert len(losses) == 3
    assert json.loads((tmp_path / "whole" / "summary.json").read_text())["eval_loss_end"] == losses[-1]
    assert (tmp_path / "whole" / "loss.png").is_file()
    assert (tmp_path / "whole" / "policy" / "adapter_model.safetensors").is_file()
    first = ("checkpoint.every_steps=1", "resume_changes=allow")
    run(tmp_path / "halves", tiny_policy, *options, *first, "data.held_out.every_steps=2")
    half = tmp_path / "halves" / "checkpoints" / "step_000001"
    again = run(tmp_path / "again", tiny_policy, *options, *first, f"resume={half}")
    assert again[-1]["ebft/alignment"] == pytest.approx(whole[-1]["ebft/alignment"], abs=1e-5)
    assert again[-1]["ebft/ce_loss"] == pytest.approx(whole[-1]["ebft/ce_loss"], abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("example", "reward"), [("reward_model", "preference"), ("process_reward", "steps")])
def test_reward_model(example: str, reward: str, tiny_policy: Path, tmp_path: Path) -> None:
    """Check a reward model, itself trained for two steps, with Ray Serve serving it."""
    training = ("algorithm.num_steps=2", "algorithm.groups_per_step=4", "data.held_out.size=4", "tracking=quiet")
    config = ("--config", f"examples/{example}/train.yaml", f"output={tmp_path / 'reward_model'}")
    assert main(["train", *config, *training, "learner.num_cpus=1", "learner.schedule.warmup_steps=0"]) == 0
    steps = run(
        tmp_path / "run",
        tiny_policy,
        "--config",
        f"examples/{example}/run.yaml",
        f"scoring.rewards.{reward}.kwargs.model={tmp_path / 'reward_model' / 'policy'}",
        "data.held_out.size=4",
        *SMALL_GROUPS,
        "rollout=hf",
    )
    assert [step["step"] for step in steps] == [1, 2]
    assert all(step[f"rewards/{reward}/std"] > 0 for step in steps)
    assert steps[-1]["groups/failed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("example", "reward"), [("math", "accuracy"), ("code", "tests")])
def test_verified_answers(example: str, reward: str, tiny_policy: Path, tmp_path: Path) -> None:
    steps = run(
        tmp_path,
        tiny_policy,
        "--config",
        f"examples/{example}/run.yaml",
        "data.held_out.size=4",
        *SMALL_GROUPS,
        "rollout=hf",
    )
    assert [step["step"] for step in steps] == [1, 2]
    assert f"rewards/{reward}/mean" in steps[-1]
    assert steps[-1]["groups/failed"] == 0


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(
    ("example", "rewards"),
    [
        (["experiment=smollm2"], {"accuracy", "closeness"}),
        (["--config", "examples/words/run.yaml"], {"accuracy", "instruction"}),
    ],
)
def test_on_a_real_model(example: list[str], rewards: set[str], tmp_path: Path) -> None:
    require_real_model()
    steps = run(tmp_path, real_model(), *example, *SMALL_GROUPS, "data.held_out.size=4")
    assert [step["step"] for step in steps] == [1, 2]
    assert {f"rewards/{reward}/mean" for reward in rewards} <= steps[-1].keys()
    assert 0 <= steps[0]["sampling/logp_difference/max"] <= 1e-3
    assert not any(step.get("groups/failed") for step in steps)
    assert engine_of(tmp_path) == "vllm"

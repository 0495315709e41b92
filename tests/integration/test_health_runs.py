"""Health rules in whole runs: they stop one with a checkpoint, name what is ill, and read metrics that runs have."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from health_cases import metrics_read_by
from run_cases import REWARDS_FILE, diagnosed, make_config, read_jsonl, supervised_options, trained_steps
from signal_cases import ledger_of

import rlpipe
from rlpipe.errors import Unhealthy
from rlpipe.tracking.health_rules import RULES

pytestmark = pytest.mark.ray
RUN = ("algorithm.num_steps=13", "algorithm.groups_per_step=2", "health.truncated.warn=0.2")


def test_a_run_is_stopped_with_a_checkpoint_and_continues(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    stopping = make_config(tiny_policy, prompts_file, tmp_path, *RUN, "health.truncated.stop=0.3")
    with pytest.raises(Unhealthy, match=r"health\.truncated\.stop was reached"):
        rlpipe.train(stopping)
    assert "Unhealthy: health.truncated.stop was reached" in diagnosed(tmp_path)
    assert "read the rule in docs/health.md" in diagnosed(tmp_path)
    (checkpoint,) = (tmp_path / "checkpoints").iterdir()
    assert checkpoint.name in ("step_000010", "step_000011", "step_000012")
    assert "of the completions are cut off at the limit" in capfd.readouterr().out
    events = [event for event in ledger_of(tmp_path).events() if event.kind == "health"]
    assert [event.subject for event in events] == ["truncated"]
    assert "health.truncated.stop is 0.3" in events[0].message

    rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *RUN))
    assert [row["step"] for row in trained_steps(tmp_path)] == list(range(1, 14))
    assert "cut off at the limit" not in capfd.readouterr().out, "it was told already"


@pytest.mark.slow
def test_a_supervised_run_is_stopped_too(local_ray: None, tiny_policy: Path, tmp_path: Path) -> None:
    options = supervised_options(tiny_policy, tmp_path / "rows.jsonl", tmp_path / "run", "health.gradient_norm.stop=0")
    with pytest.raises(Unhealthy, match=r"health\.gradient_norm\.stop was reached"):
        rlpipe.train(rlpipe.load_config(options))
    assert "Unhealthy: health.gradient_norm.stop was reached" in diagnosed(tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").iterdir())
    assert len(read_jsonl(tmp_path / "run" / "metrics.jsonl")) < 60
    events = read_jsonl(tmp_path / "run" / "events.jsonl")
    assert [event["kind"] for event in events if event["subject"] == "gradient_norm"] == ["health"]


def write_rows(file: Path, rows: Iterable[dict[str, Any]]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def metrics_of(output: Path) -> set[str]:
    """Return the names of all metrics that have been a number in a run."""
    rows = read_jsonl(output / "metrics.jsonl")
    return {name for row in rows for name, value in row.items() if isinstance(value, int | float)}


EBFT = (
    *("algorithm=ebft", "algorithm.ebft.truth_column=answer", "algorithm.ebft.features.num_cpus=0.1"),
    "scoring.rewards.digits.weight=0",
)


@pytest.mark.slow
def test_runs_have_every_metric_that_rules_read(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    pairs = write_rows(
        tmp_path / "pairs.jsonl", ({"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": str(n)} for n in range(40))
    )
    held_out = "data.held_out.size=4"
    configs = {
        "rl": make_config(tiny_policy, prompts_file, tmp_path / "rl", held_out, "replay=async"),
        "ebft": make_config(tiny_policy, prompts_file, tmp_path / "ebft", *EBFT),
        "dpo": make_config(tiny_policy, pairs, tmp_path / "dpo", "algorithm=dpo"),
        "sft": rlpipe.load_config(
            supervised_options(
                tiny_policy, tmp_path / "rows.jsonl", tmp_path / "sft", held_out, "algorithm.num_steps=3"
            )
        ),
    }
    emitted = set[str]()
    for name, config in configs.items():
        rlpipe.train(config)
        emitted |= metrics_of(tmp_path / name)
    missing = {rule.name: metrics_read_by(rule) - emitted for rule in RULES}
    assert {name: names for name, names in missing.items() if names} == {}


def rules_that_warned(output: Path) -> set[str]:
    """Return the names of the rules of which a run's events have a warning."""
    if (log := output / "events.jsonl").exists():  # of runs without a ledger
        events = [(event["kind"], event["subject"], event["message"]) for event in read_jsonl(log)]
    else:
        events = [(event.kind, event.subject, event.message) for event in ledger_of(output).events()]
    return {subject for kind, subject, message in events if kind == "health" and message.startswith("warning")}


A_TO_Z = [*range(17, 43)]
"""Tokens of the tiny policy at which completions end early, so that they can become longer."""
OWN_HOSTS = ("rollout.resources={engine_host: 1}", "learner.resources={learner_host: 1}", "algorithm.num_steps=22")
SLOW_LEARNER = (*OWN_HOSTS, "algorithm.num_epochs_per_step=30", "learner.optimizer.lr=1e-6")
REINFORCE = ("algorithm.advantage.name=reinforce", "algorithm.num_steps=14")
FAST = ("model=full", "learner.optimizer.lr=0.05", "algorithm.num_steps=20", "algorithm.groups_per_step=4")
OLD = (*FAST, "replay=async", "replay.max_staleness=4", "algorithm.num_steps=30")
TOP_K = ("rollout.sampling.top_k=2", "algorithm.num_steps=12")
ILL: dict[str, tuple[str, tuple[str, ...]]] = {
    "equal_rewards": ("patient", ("algorithm.num_steps=11",)),
    "no_reward": ("nothing", ("algorithm.num_steps=21",)),
    "low_reward": ("first_of_group", ("algorithm.num_steps=51", "algorithm.group_size=8")),
    "failed_groups": ("raises_for_some", ("algorithm.num_steps=12",)),
    "length_drift": (
        "length",
        (
            *("algorithm.num_steps=70", "algorithm.groups_per_step=8", "algorithm.group_size=8"),
            *("rollout.sampling.max_tokens=32", f"rollout.sampling.stop_token_ids={A_TO_Z}"),
            *("model=full", "learner.optimizer.lr=1e-3", "health.length_drift.warn=1.3"),
        ),
    ),
    "learner_waits": ("slower_digits", (*OWN_HOSTS, "replay.max_staleness=1", "algorithm.groups_per_step=1")),
    "engines_wait": ("digits", (*SLOW_LEARNER, "replay.max_staleness=1")),
    "gradient_norm": ("digits", ("scoring.rewards.digits.weight=1000", *REINFORCE)),
    "skipped_updates": ("huge", ("learner.max_bad_steps=50", *REINFORCE)),
    "entropy_low": ("first_of_group", ("rollout.sampling.temperature=0.01", "algorithm.num_steps=8")),
    "entropy_high": (
        "first_of_group",
        (
            *("rollout.sampling.temperature=0.1", "algorithm.loss.entropy_coef=1", "algorithm.num_steps=40"),
            *("model=full", "learner.optimizer.lr=2e-3", "learner.schedule.warmup_steps=40"),
        ),
    ),
    "clipping": ("first_of_group", (*FAST, "algorithm.num_epochs_per_step=8")),
    "kl": ("digits", (*FAST, "algorithm.loss.beta=1e-6")),
    "logprob_difference": ("digits", TOP_K),
    "importance_mean": ("digits", TOP_K),
    "importance_min": ("variety", OLD),
    "effective_samples": ("variety", OLD),
    "staleness": (
        "digits",
        (*SLOW_LEARNER, "algorithm.num_epochs_per_step=200", "algorithm.num_steps=26", "replay.max_staleness=2"),
    ),
    "ebft_alignment": ("digits", (*EBFT, "rollout.sampling.temperature=0.01", "algorithm.num_steps=21")),
    "ebft_diversity": ("digits", (*EBFT, "rollout.sampling.temperature=0.01", "algorithm.num_steps=11")),
    "truncated": ("digits", ("rollout.sampling.max_tokens=2", "algorithm.num_steps=11")),
}
"""Reward functions and options of runs that are ill, by the rule that must warn."""


@pytest.mark.slow
@pytest.mark.parametrize("rule", ILL)
def test_an_ill_run_is_warned_of(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, rule: str
) -> None:
    reward, options = ILL[rule]
    path = f"scoring.rewards.digits.path={REWARDS_FILE}:{reward}"
    rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, "algorithm.groups_per_step=2", path, *options))
    assert rule in rules_that_warned(tmp_path)


@pytest.mark.slow
def test_a_reward_that_a_huge_learning_rate_ruins_is_warned_of(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    reward = f"scoring.rewards.digits.path={REWARDS_FILE}:variety"
    options = (reward, "rollout.sampling.max_tokens=32", "model=full")
    for num_steps, learning_rate in ((12, 1e-6), (26, 0.3)):
        changes = (f"algorithm.num_steps={num_steps}", f"learner.optimizer.lr={learning_rate}", "resume_changes=allow")
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *options, *changes))
        assert ("reward_falls" in rules_that_warned(tmp_path)) == (num_steps == 26)


@pytest.mark.slow
def test_columns_of_preferences_that_are_swapped_are_warned_of(
    local_ray: None, tiny_policy: Path, tmp_path: Path
) -> None:
    """CPO compares the log-probs of whole completions, of which the policy prefers short ones from the start."""
    pairs = ({"prompt": f"{n}+1=", "chosen": str(n + 1), "rejected": f"it may be {n}"} for n in range(40))
    rows = write_rows(tmp_path / "pairs.jsonl", pairs)
    options = ("algorithm=cpo", "algorithm.num_steps=21", "learner.optimizer.lr=1e-6")
    swapped = ("data.chosen_column=rejected", "data.rejected_column=chosen")
    for name, columns in (("right", ()), ("swapped", swapped)):
        rlpipe.train(make_config(tiny_policy, rows, tmp_path / name, *options, *columns))
    assert "wrong_preferences" not in rules_that_warned(tmp_path / "right")
    assert "wrong_preferences" in rules_that_warned(tmp_path / "swapped")


@pytest.mark.slow
def test_rows_that_are_learned_by_heart_are_warned_of(local_ray: None, tiny_policy: Path, tmp_path: Path) -> None:
    rows, rng = tmp_path / "random.jsonl", random.Random(0)
    options = supervised_options(
        *(tiny_policy, rows, tmp_path / "run", "algorithm.num_steps=100"),
        *("model=full", "data.held_out.size=10", "data.held_out.every_steps=10"),
    )
    write_rows(rows, ({"prompt": f"{n}+1=", "completion": str(rng.randrange(1000, 9999))} for n in range(40)))
    rlpipe.train(rlpipe.load_config(options))
    assert "overfitting" in rules_that_warned(tmp_path / "run")


@pytest.mark.slow
def test_held_out_prompts_that_get_worse_are_warned_of(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    held_out = write_rows(tmp_path / "held_out.jsonl", ({"prompt": f"{n}+1=", "answer": "words"} for n in range(20)))
    options = (
        *(f"scoring.rewards.digits.path={REWARDS_FILE}:as_asked", f"data.held_out.path={held_out}"),
        *("data.held_out.every_steps=5", "algorithm.num_steps=40", "algorithm.groups_per_step=4"),
        *("model=full", "learner.optimizer.lr=0.01"),
    )
    rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path / "run", *options))
    assert "held_out_falls" in rules_that_warned(tmp_path / "run")

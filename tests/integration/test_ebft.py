"""Whole runs of structured EBFT: features of a copy and of the learner, conversations of several turns, and deaths."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest
from run_cases import make_config, read_jsonl, trained_steps
from signal_cases import assert_accounts_add_up, ledger_of, signals

import rlpipe

pytestmark = pytest.mark.ray

EBFT = (
    "algorithm=ebft",
    "algorithm.ebft.truth_column=answer",
    "algorithm.ebft.features.num_cpus=0.1",
    "scoring.rewards.digits.weight=0",
    "data.held_out.size=3",
)
METRICS = ("alignment", "diversity", "cfm_loss", "reward", "rl_loss", "advantages_std")


@pytest.mark.slow
def test_features_of_the_learner_and_of_a_copy_train_alike(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    runs = []
    for weights in ("own", "learner"):
        options = [*EBFT, f"algorithm.ebft.features.weights={weights}", "algorithm.ebft.ce_coef=0.1"]
        summary = rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path / weights, *options))
        assert summary["steps"] == 3
        rows = read_jsonl(tmp_path / weights / "metrics.jsonl")
        runs.append(sorted(rows, key=lambda row: (row["step"], "loss" in row)))  # the order of evaluations varies
    own, learner = (
        [{name: value for name, value in row.items() if name.startswith(("ebft/", "eval/"))} for row in rows]
        for rows in runs
    )
    assert sum("eval/ebft/cfm_loss" in row for row in own) == 2
    for mine, theirs in zip(own, learner, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in mine.items():
            if value is not None:  # a single completion has no diversity
                assert theirs[name] == pytest.approx(value, abs=1e-5), name
    alone = rlpipe.evaluate(make_config(tiny_policy, prompts_file, tmp_path / "alone", *options))
    assert alone["eval/ebft/cfm_loss"] == pytest.approx(learner[0]["eval/ebft/cfm_loss"], abs=1e-5)
    for row in trained_steps(tmp_path / "own"):
        assert all(np.isfinite(row[f"ebft/{name}"]) for name in METRICS)
        assert row["ebft/ce_loss"] > 0
        assert row["loss"] == pytest.approx(row["ebft/rl_loss"] + 0.1 * row["ebft/ce_loss"], abs=1e-5)
        assert row["reward"] == pytest.approx(row["ebft/reward"], abs=1e-5)


@pytest.mark.slow
def test_ranks_that_score_are_replaced_in_an_asynchronous_run_over_several_turns(
    local_ray: None, tiny_policy: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    further = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "so"}]
    rows.write_text(
        "".join(
            json.dumps({"prompt": f"{n}?", "answer": f"it is {n}", "remaining_turns": further[: 2 * (n % 2)]}) + "\n"
            for n in range(24)
        )
    )
    options = [
        *EBFT,
        "algorithm.ebft.features.weights=learner",
        "algorithm.num_steps=6",
        "checkpoint.every_steps=2",
        "replay.max_staleness=2",
        "learner=fsdp2",
        "rollout.sampling.max_tokens=24",  # so that some answers of the random policy end with an end token
    ]
    output = tmp_path / "run"
    with signals(output, {2: "learner", 4: "replay"}, signal.SIGKILL) as killed:
        rlpipe.train(make_config(tiny_policy, rows, output, *options))
    assert killed == ["learner", "replay"]
    assert_accounts_add_up(output, num_steps=6, groups_per_step=4)
    assert all("ebft/cfm_loss" in row for row in trained_steps(output))
    ledger = ledger_of(output)
    (ids,) = zip(*ledger.rows("SELECT group_id FROM groups WHERE state = 'TRAINED'"), strict=True)
    rollouts = [rollout for group in ledger.load(ids) for rollout in group]
    num_turns = [int((np.diff(rollout.loss_mask.astype(int)) == 1).sum()) for rollout in rollouts]
    assert set(num_turns) == {1, 2}
    said = "\n".join(event.message for event in ledger_of(output).events())
    assert "the learner group died: rank" in said
    assert "the replay actor died; another one has read the ledger" in said

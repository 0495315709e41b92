"""Tests that what `rlpipe doctor` makes of a run's config, for its one step, is a config."""

from __future__ import annotations

from pathlib import Path

import pytest
from covering import one_in

from rlpipe.configs.compose import list_groups, load_config
from rlpipe.doctor.trial_step import shrink

KTO = ["algorithm=kto", "data=jsonl", "data.path=rows.jsonl", "model.path=org/policy"]
EXPERIMENTS = {name: [f"experiment={name}"] for name in list_groups()["experiment"]}


@pytest.mark.parametrize("name", one_in(3, ["kto", *EXPERIMENTS]))
def test_every_experiment_can_be_tried(name: str, tmp_path: Path) -> None:
    overrides = {**EXPERIMENTS, "kto": KTO}[name]
    run = load_config(overrides, need_files=False)
    small = shrink(run, tmp_path)
    assert small.algorithm.num_steps == 1
    assert small.data.held_out.every_steps == 0
    assert small.output == f"{tmp_path}/run"
    assert small.model.path == run.model.path


@pytest.mark.parametrize("name", ["reward_model", "process_reward"])
def test_models_below_the_output_are_those_of_the_run(name: str, tmp_path: Path) -> None:
    run = load_config([], file=f"examples/{name}/run.yaml")
    small = shrink(run, tmp_path)
    assert any(run.output in str(reward.kwargs.get("model")) for reward in run.scoring.rewards.values())
    assert small.scoring.rewards == run.scoring.rewards

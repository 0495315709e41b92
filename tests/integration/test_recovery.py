"""Tests that kill every part of a running run, which then ends as an undisturbed one does, or gives the reason."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from run_cases import (
    HOLDS_LOGP_TO,
    SIX_STEPS,
    diagnosed,
    make_config,
    read_adapter,
    read_jsonl,
    supervised_options,
    trained_steps,
)
from signal_cases import assert_accounts_add_up, ledger_of, signals, steps_done

import rlpipe
from benchmarks.processes import find_processes
from rlpipe.common.run_files import LEDGER
from rlpipe.errors import EngineFailed, LearnerFailed
from rlpipe.replay.ledger.audit import audit
from rlpipe.replay.ledger.run_ledger import Ledger
from rlpipe.run.cluster import placement_groups

pytestmark = pytest.mark.ray

NUM_STEPS, GROUPS_PER_STEP = 6, 4


def test_a_run_whose_every_process_is_killed_ends_as_an_undisturbed_one(
    local_ray: None, undisturbed_run: Path, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    plan = {1: "rollout", 2: "weights", 3: "replay", 4: "learner", 5: "scorer"}
    with signals(tmp_path, plan, signal.SIGKILL) as killed:
        summary = rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *SIX_STEPS))
    assert killed == list(plan.values())
    assert summary["steps"] == NUM_STEPS
    assert [row["step"] for row in trained_steps(tmp_path)] == list(range(1, NUM_STEPS + 1))
    expected, adapter = read_adapter(undisturbed_run / "policy"), read_adapter(tmp_path / "policy")
    assert all(torch.equal(adapter[name], expected[name]) for name in expected)
    assert_accounts_add_up(tmp_path, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    said = "\n".join(event.message for event in ledger_of(tmp_path).events())
    for words in ("engine rollout-0 died: ", "engine rollout-0 serves again", "the learner group died: rank 0"):
        assert words in said
    assert "the replay actor died; another one has read the ledger" in said
    assert "process scorer-0 died while it scored" in said


@pytest.mark.slow
def test_an_asynchronous_run_with_two_engines_and_two_ranks_keeps_its_accounts(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    overrides = [*SIX_STEPS, "replay.max_staleness=2", "rollout.num_engines=2", "learner=fsdp2"]
    plan = {1: "rollout", 2: "learner", 3: "trainer", 4: "replay"}
    held = placement_groups()
    with signals(tmp_path, plan, signal.SIGKILL) as killed:
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *overrides))
    assert killed == list(plan.values())
    assert placement_groups() <= held, "the dead controller's place is free again"
    assert_accounts_add_up(tmp_path, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    stale = ledger_of(tmp_path).rows("SELECT max(step - oldest_version) FROM groups WHERE state = 'TRAINED'")
    assert stale[0][0] <= 2
    said = [event.message for event in ledger_of(tmp_path).events()]
    assert any("the learner group died: Ray Train's controller: its process died" in text for text in said)


@pytest.mark.slow
@pytest.mark.vllm
def test_processes_that_hand_weights_over_directly_are_replaced(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    overrides = [*SIX_STEPS, "rollout.engine=vllm", "rollout.num_engines=2", "model=full", "model.dtype=float32"]
    sharing = ["learner=fsdp2", "weights=nccl", "weights.timeout_s=20", "learner.optimizer.lr=1e-4"]
    plan = {1: "rollout", 3: "weights", 4: "learner"}
    with signals(tmp_path, plan, signal.SIGKILL) as killed:
        summary = rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *overrides, *sharing))
    assert killed == list(plan.values())
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    assert_accounts_add_up(tmp_path, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["rollout", "scorer", "learner"])
def test_a_process_that_is_killed_at_its_start_is_replaced(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, kind: str
) -> None:
    with signals(tmp_path, {0: kind}, signal.SIGKILL) as killed:
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path))
    assert killed == [kind]
    assert_accounts_add_up(tmp_path, num_steps=3, groups_per_step=GROUPS_PER_STEP)


@pytest.mark.slow
def test_a_ledger_that_stayed_on_a_lost_machine_comes_from_the_checkpoint(
    local_ray: None, undisturbed_run: Path, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    disk, output = tmp_path / "disk", tmp_path / "run"
    config = make_config(tiny_policy, prompts_file, output, *SIX_STEPS, f"ledger.folder={disk}", "name=moved")

    def lose_the_disk() -> None:
        while steps_done(output) < 3:
            time.sleep(0.02)
        disk.rename(tmp_path / "lost")
        os.kill(find_processes("replay")[-1], signal.SIGKILL)

    failure = threading.Thread(target=lose_the_disk)
    failure.start()
    rlpipe.train(config)
    failure.join()
    expected, adapter = read_adapter(undisturbed_run / "policy"), read_adapter(output / "policy")
    assert all(torch.equal(adapter[name], expected[name]) for name in expected)
    resume_state = audit(Ledger(disk / "moved" / LEDGER, read_only=True))
    assert resume_state.finished
    assert not resume_state.problems


@pytest.mark.slow
def test_a_supervised_run_survives_its_dataset_actor_and_its_learner(
    local_ray: None, tiny_policy: Path, tmp_path: Path
) -> None:
    def train(output: Path, plan: Mapping[int, str]) -> dict[str, torch.Tensor]:
        config = rlpipe.load_config(supervised_options(tiny_policy, tmp_path / "rows.jsonl", output))
        with signals(output, plan, signal.SIGKILL) as killed:
            rlpipe.train(config)
        assert killed == list(plan.values())
        assert [row["step"] for row in trained_steps(output)] == list(range(1, 61))
        return read_adapter(output / "policy")

    expected = train(tmp_path / "undisturbed", {})
    adapter = train(tmp_path / "disturbed", {5: "dataset", 20: "learner"})
    assert all(torch.equal(adapter[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_learner_that_always_dies_ends_the_run_with_the_cause(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_policy, prompts_file, tmp_path, *SIX_STEPS, "learner.max_failures=0")
    with signals(tmp_path, {1: "learner"}, signal.SIGKILL), pytest.raises(LearnerFailed) as caught:
        rlpipe.train(config)
    assert "died 1 time without a new step (learner.max_failures): rank 0: its process died" in str(caught.value)
    assert f"PROBLEM: after 1 steps, LearnerFailed: {caught.value}; " in diagnosed(tmp_path)
    assert "If processes died: rlpipe plan shows the memory that they need" in diagnosed(tmp_path)


@pytest.mark.slow
def test_without_engines_the_run_checkpoints_and_stops(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    overrides = [*SIX_STEPS, "checkpoint.every_steps=0", "cluster.max_outage_s=0.02"]
    config = make_config(tiny_policy, prompts_file, tmp_path, *overrides)
    with signals(tmp_path, {3: "rollout"}, signal.SIGKILL), pytest.raises(EngineFailed) as caught:
        rlpipe.train(config)
    assert "no engine has served for cluster.max_outage_s=0.02 seconds: " in str(caught.value)
    assert f"EngineFailed: {caught.value}; rlpipe plan shows the memory of an engine" in diagnosed(tmp_path)
    checkpoint = sorted((tmp_path / "checkpoints").iterdir())[-1]
    assert int(checkpoint.name.removeprefix("step_")) >= 3
    assert read_jsonl(tmp_path / "metrics.jsonl")

"""Tests with every part of a run frozen, at its start or later: the run goes on without it, or names it."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
import torch
from run_cases import REWARDS_FILE, SIX_STEPS, diagnosed, make_config, read_adapter, supervised_options
from signal_cases import assert_accounts_add_up, ledger_of, signals

import rlpipe
from rlpipe.errors import RlpipeError, WaitTimeout
from rlpipe.replay.ledger.run_ledger import GroupState
from rlpipe.run.cluster import placement_groups

pytestmark = pytest.mark.ray

NUM_STEPS, GROUPS_PER_STEP = 6, 4


@pytest.mark.slow
def test_a_frozen_scorer_is_replaced_and_named(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    overrides = [*SIX_STEPS, "scoring.rewards.digits.timeout_s=2"]
    with signals(tmp_path, {2: "scorer"}, signal.SIGSTOP) as frozen:
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *overrides))
    assert frozen == ["scorer"]
    said = [event.message for event in ledger_of(tmp_path).events() if event.subject == "scorer-0"]
    assert len(said) == 1
    assert said[0].startswith("process scorer-0 took longer than")
    assert_accounts_add_up(tmp_path, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)


AT_START: dict[str, tuple[str, str]] = {
    "rollout.start": (  # earlier, before Ray has reached the process, Ray would give it up and replace it
        "cluster.start_timeout_s=20",
        "actor rollout-0 has not started within cluster.start_timeout_s=20 seconds",
    ),
    "scorer.start": (
        "cluster.start_timeout_s=40",
        "actor scorer-0 has not started within cluster.start_timeout_s=40 seconds",
    ),
    "learner": (
        "cluster.step_timeout_s=20",
        "no step has ended for cluster.step_timeout_s=20 seconds: .*'learner_ranks': 'not heard of yet'",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", AT_START)
def test_a_process_that_is_frozen_at_its_start_is_named(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, kind: str
) -> None:
    limit, message = AT_START[kind]
    config = make_config(tiny_policy, prompts_file, tmp_path, *SIX_STEPS, limit)
    places = placement_groups()
    with signals(tmp_path, {0: kind}, signal.SIGSTOP) as frozen, pytest.raises(WaitTimeout, match=message):
        rlpipe.train(config)
    assert frozen == [kind]
    assert re.search(f"PROBLEM: after no step, WaitTimeout: .*{message}.*; raise the named option", diagnosed(tmp_path))
    assert placement_groups() <= places, "the others have given their places back"


SUPERVISED: dict[str, tuple[int, str, str]] = {
    "at its start": (
        0,
        "cluster.start_timeout_s=20",
        "actor dataset has not started within cluster.start_timeout_s=20 seconds",
    ),
    "while it runs": (
        5,
        "cluster.call_timeout_s=8",
        r"waited .* seconds \(cluster.call_timeout_s\) for the dataset actor to .*; it has not answered",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", SUPERVISED)
def test_a_frozen_dataset_actor_is_named(local_ray: None, tiny_policy: Path, tmp_path: Path, case: str) -> None:
    step, limit, message = SUPERVISED[case]
    options = supervised_options(tiny_policy, tmp_path / "rows.jsonl", tmp_path / "run", limit)
    hang = signals(tmp_path / "run", {step: "dataset"}, signal.SIGSTOP)
    with hang as frozen, pytest.raises(WaitTimeout, match=message):
        rlpipe.train(rlpipe.load_config(options))
    assert frozen == ["dataset"]
    assert re.search(f"WaitTimeout: .*{message}.*; raise the named option", diagnosed(tmp_path / "run"))


@pytest.mark.slow
def test_a_frozen_controller_of_ray_train_is_named_once_it_should_end(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_policy, prompts_file, tmp_path, *SIX_STEPS, "cluster.step_timeout_s=30")
    message = "'learner_group': 'has reported its last step, but Ray Train has not ended it'"
    with signals(tmp_path, {2: "trainer"}, signal.SIGSTOP) as frozen, pytest.raises(WaitTimeout, match=message):
        rlpipe.train(config)
    assert frozen == ["trainer"]
    assert re.search(f"WaitTimeout: .*{message}.*; raise the named option", diagnosed(tmp_path))
    assert_accounts_add_up(tmp_path, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)


FROZEN: dict[str, tuple[str, list[str], type[RlpipeError], str]] = {
    "replay": (
        "replay",
        ["cluster.call_timeout_s=8"],
        WaitTimeout,
        r"waited .* seconds \(cluster.call_timeout_s\) for the replay actor to .*; it has not answered",
    ),
    "weights": (
        "weights",
        ["cluster.call_timeout_s=8"],
        WaitTimeout,
        r"waited .* seconds \(cluster.call_timeout_s\) for .*the weights actor.*; it has not answered",
    ),
    "learner": (
        "learner",
        ["cluster.step_timeout_s=30"],
        WaitTimeout,
        r"no step has ended for cluster.step_timeout_s=30 .*'learner_ranks': {0: 'in step .* heard of [2-9]\d s ago",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FROZEN)
def test_a_frozen_process_is_named_within_the_timeout(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, case: str
) -> None:
    kind, overrides, error, message = FROZEN[case]
    config = make_config(tiny_policy, prompts_file, tmp_path, *SIX_STEPS, "algorithm.num_steps=60", *overrides)
    with signals(tmp_path, {2: kind}, signal.SIGSTOP) as frozen, pytest.raises(error, match=message):
        rlpipe.train(config)
    assert frozen == [kind]
    assert re.search(f"{error.__name__}: .*{message}.*; raise the named option", diagnosed(tmp_path))


@pytest.mark.slow
def test_a_frozen_engine_is_named_and_replaced(
    local_ray: None, undisturbed_run: Path, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    overrides = [*SIX_STEPS, "cluster.suspect_after_s=2", "cluster.dead_after_s=4"]
    with signals(tmp_path, {2: "rollout"}, signal.SIGSTOP) as frozen:
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *overrides))
    assert frozen == ["rollout"]
    said = [event.message for event in ledger_of(tmp_path).events()]
    assert any("engine rollout-0 died: it has not answered for 4 s (cluster.dead_after_s)" in text for text in said)
    expected, adapter = read_adapter(undisturbed_run / "policy"), read_adapter(tmp_path / "policy")
    assert all(torch.equal(adapter[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_frozen_rank_is_named_and_the_group_begins_again(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    overrides = [*SIX_STEPS, "learner=fsdp2", "learner.collective_timeout_s=15"]
    with signals(tmp_path, {2: "learner"}, signal.SIGSTOP) as frozen:
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *overrides))
    assert frozen == ["learner"]
    assert_accounts_add_up(tmp_path, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    said = [event.message for event in ledger_of(tmp_path).events()]
    assert any(re.search(r"the learner group died: .*; rank \d was last heard of \d+ s ago", text) for text in said), (
        said
    )


@pytest.mark.slow
def test_a_frozen_engine_that_should_load_weights_is_named(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    slower = f"scoring.rewards.digits.path={REWARDS_FILE}:slower_digits"
    overrides = [*SIX_STEPS, slower, "algorithm.num_steps=4", "weights.timeout_s=3", "cluster.dead_after_s=100"]

    def engine_waits() -> bool:
        counts = ledger_of(tmp_path).counts()
        generated = counts.get(GroupState.GENERATED, 0)
        is_third_step = counts.get(GroupState.TRAINED) == 2 * GROUPS_PER_STEP
        return is_third_step and 0 < generated == GROUPS_PER_STEP - counts.get(GroupState.SCORED, 0)

    with signals(tmp_path, {2: "rollout"}, signal.SIGSTOP, also=engine_waits) as frozen:
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *overrides))
    assert frozen == ["rollout"]
    said = [event.message for event in ledger_of(tmp_path).events()]
    assert any("engine rollout-0 died: it has not loaded weights version" in text for text in said)

"""Every part of a run is killed, or frozen, while it runs: the run ends as an undisturbed one, or says what hangs."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from run_cases import SIX_STEPS, make_config, read_adapter, read_jsonl, trained_steps

import rlpipe
from benchmarks.processes import find_processes
from rlpipe.errors import EngineFailed, LearnerFailed, RlpipeError, WaitTimeout
from rlpipe.replay.audit import audit
from rlpipe.replay.database import NAME
from rlpipe.replay.ledger import GroupState, Ledger

pytestmark = [pytest.mark.ray, pytest.mark.slow]

NUM_STEPS, GROUPS_PER_STEP = 6, 4


def steps_done(output: Path) -> int:
    metrics = output / "metrics.jsonl"
    return sum('"loss"' in line for line in metrics.read_text().splitlines()) if metrics.exists() else 0


@contextmanager
def signals(output: Path, plan: Mapping[int, str], number: signal.Signals) -> Iterator[list[str]]:
    """Sends the signal to one process of a kind as soon as so many steps are done; yields the kinds that got theirs."""
    hit: list[str] = []
    frozen: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        for step, kind in plan.items():
            while steps_done(output) < step and not ended.is_set():
                time.sleep(0.02)
            if ended.is_set():
                return
            pid = find_processes(kind)[-1]
            os.kill(pid, number)
            hit.append(kind)
            frozen.extend([pid] if number is signal.SIGSTOP else [])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield hit
    finally:
        ended.set()
        watcher.join()
        for pid in frozen:
            end(pid)


def end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def ledger_of(output: Path) -> Ledger:
    return Ledger(output / NAME, read_only=True)


def assert_accounts_add_up(output: Path, *, num_steps: int, groups_per_step: int) -> None:
    accounts = audit(ledger_of(output))
    assert accounts.finished
    assert not accounts.problems
    assert ledger_of(output).counts()[GroupState.TRAINED] == num_steps * groups_per_step


def test_a_run_whose_every_part_is_killed_ends_as_an_undisturbed_one(
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


def test_an_asynchronous_run_with_two_engines_and_two_ranks_keeps_its_accounts(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    overrides = [*SIX_STEPS, "replay.max_staleness=2", "rollout.num_engines=2", "learner=fsdp2"]
    plan = {1: "rollout", 2: "learner", 3: "trainer", 4: "replay"}
    with signals(tmp_path, plan, signal.SIGKILL) as killed:
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *overrides))
    assert killed == list(plan.values())
    assert_accounts_add_up(tmp_path, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    stale = ledger_of(tmp_path).rows("SELECT max(step - oldest_version) FROM groups WHERE state = 'TRAINED'")
    assert stale[0][0] <= 2
    said = [event.message for event in ledger_of(tmp_path).events()]
    assert any("the learner group died: Ray Train's controller: its process died" in text for text in said)


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
    accounts = audit(Ledger(disk / "moved" / NAME, read_only=True))
    assert accounts.finished
    assert not accounts.problems


def test_a_supervised_run_survives_its_dataset_actor_and_its_learner(
    local_ray: None, tiny_policy: Path, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    pairs = ((f"{number}+1=", str(number + 1)) for number in range(40))
    rows.write_text("".join(json.dumps({"prompt": p, "completion": c}) + "\n" for p, c in pairs))

    def train(output: Path, plan: Mapping[int, str]) -> dict[str, torch.Tensor]:
        config = rlpipe.load_config(
            [
                "algorithm=sft",
                "algorithm.num_steps=60",
                "algorithm.groups_per_step=12",
                f"model.path={tiny_policy}",
                "model.dtype=float32",
                "data.source=jsonl",
                f"data.path={rows}",
                "learner.num_threads=1",
                "learner.optimizer.lr=1e-2",
                "checkpoint.every_steps=8",
                "tracking=quiet",
                f"output={output}",
            ]
        )
        with signals(output, plan, signal.SIGKILL) as killed:
            rlpipe.train(config)
        assert killed == list(plan.values())
        assert [row["step"] for row in trained_steps(output)] == list(range(1, 61))
        return read_adapter(output / "policy")

    expected = train(tmp_path / "undisturbed", {})
    adapter = train(tmp_path / "disturbed", {5: "dataset", 20: "learner"})
    assert all(torch.equal(adapter[name], expected[name]) for name in expected)


def test_a_frozen_scorer_is_replaced_and_named(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    overrides = [*SIX_STEPS, "scoring.rewards.digits.timeout_s=2"]
    with signals(tmp_path, {2: "scorer"}, signal.SIGSTOP) as frozen:
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *overrides))
    assert frozen == ["scorer"]
    assert "scoring: process scorer-0 took longer than" in caplog.text
    assert_accounts_add_up(tmp_path, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)


FROZEN: dict[str, tuple[str, list[str], type[RlpipeError], str]] = {
    "replay": (
        "replay",
        ["cluster.call_timeout_s=4"],
        WaitTimeout,
        r"waited .* seconds \(cluster.call_timeout_s\) for .* from the replay actor; it has not answered",
    ),
    "weights": (
        "weights",
        ["cluster.call_timeout_s=4"],
        WaitTimeout,
        r"waited .* seconds \(cluster.call_timeout_s\) for .*the weights actor.*; it has not answered",
    ),
    "learner": (
        "learner",
        ["cluster.step_timeout_s=12"],
        WaitTimeout,
        r"no step has ended for cluster.step_timeout_s=12 seconds: .*'learner_ranks': {0: 'in step .* last heard of 1",
    ),
}


@pytest.mark.parametrize("case", FROZEN)
def test_a_frozen_part_is_named_within_the_timeout(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path, case: str
) -> None:
    kind, overrides, error, message = FROZEN[case]
    config = make_config(tiny_policy, prompts_file, tmp_path, *SIX_STEPS, "algorithm.num_steps=60", *overrides)
    with signals(tmp_path, {2: kind}, signal.SIGSTOP) as frozen, pytest.raises(error, match=message):
        rlpipe.train(config)
    assert frozen == [kind]


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


def test_a_frozen_engine_that_should_load_weights_is_named(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    overrides = [*SIX_STEPS, "weights.timeout_s=3", "cluster.dead_after_s=100"]
    with signals(tmp_path, {2: "rollout"}, signal.SIGSTOP):
        rlpipe.train(make_config(tiny_policy, prompts_file, tmp_path, *overrides))
    said = [event.message for event in ledger_of(tmp_path).events()]
    assert any("engine rollout-0 died: it has not loaded weights version" in text for text in said)


def test_a_learner_that_always_dies_ends_the_run_with_the_cause(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    config = make_config(tiny_policy, prompts_file, tmp_path, *SIX_STEPS, "learner.max_failures=0")
    with signals(tmp_path, {1: "learner"}, signal.SIGKILL), pytest.raises(LearnerFailed) as caught:
        rlpipe.train(config)
    assert "died 1 time without a new step (learner.max_failures): rank 0: its process died" in str(caught.value)


def test_without_engines_the_run_checkpoints_and_stops(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path: Path
) -> None:
    overrides = [*SIX_STEPS, "checkpoint.every_steps=0", "cluster.max_outage_s=1"]
    config = make_config(tiny_policy, prompts_file, tmp_path, *overrides)
    with signals(tmp_path, {3: "rollout"}, signal.SIGKILL), pytest.raises(EngineFailed) as caught:
        rlpipe.train(config)
    assert "no engine has served for cluster.max_outage_s=1 seconds: " in str(caught.value)
    checkpoint = sorted((tmp_path / "checkpoints").iterdir())[-1]
    assert int(checkpoint.name.removeprefix("step_")) >= 3
    assert read_jsonl(tmp_path / "metrics.jsonl")

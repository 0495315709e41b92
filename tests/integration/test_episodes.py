"""Tests of runs that play episodes: their tokens, their accounts, and the death of every part."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_cases import HOLDS_LOGP_TO, diagnosed, largest_difference, make_config, read_adapter, trained_steps
from signal_cases import assert_accounts_add_up, ledger_of, signals

import rlpipe
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import EnvironmentFailed
from rlpipe.types import RolloutGroup

pytestmark = pytest.mark.ray

NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE, NUM_TURNS = 6, 4, 4, 3
FILE = Path(__file__).parents[1] / "helpers" / "environment_cases.py"
SLOW = "environment.kwargs.pause_s=0.1"
Make = Callable[..., Config]


def episode_options(kind: str) -> list[str]:
    return [
        f"environment.path={FILE}:{kind}",
        "environment.num_cpus=0.1",
        f"algorithm.num_steps={NUM_STEPS}",
        "checkpoint.every_steps=2",
        "data.max_prompt_tokens=100",
    ]


@pytest.fixture
def make(local_ray: None, tiny_policy: Path, prompts_file: Path) -> Make:
    """Return a function that makes the config of a run in a folder."""

    def of(output: Path, *overrides: str, kind: str = "Talk") -> Config:
        return make_config(tiny_policy, prompts_file, output, *episode_options(kind), *overrides)

    return of


@pytest.fixture(scope="session")
def undisturbed_episodes(
    local_ray: None, tiny_policy: Path, prompts_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return the output folder of a run that nothing disturbed."""
    output = tmp_path_factory.mktemp("episodes")
    options = [*episode_options("Talk"), SLOW, "environment.num_processes=2"]
    summary = rlpipe.train(make_config(tiny_policy, prompts_file, output, *options))
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    return output


def trained_groups(output: Path) -> list[RolloutGroup]:
    ledger = ledger_of(output)
    rows = ledger.rows("SELECT group_id FROM groups WHERE state = 'TRAINED' ORDER BY group_id")
    return list(ledger.load(row[0] for row in rows))


def by_step(groups: Sequence[RolloutGroup]) -> list[Sequence[RolloutGroup]]:
    return [groups[start : start + GROUPS_PER_STEP] for start in range(0, len(groups), GROUPS_PER_STEP)]


def test_every_turn_is_trained_and_kept(undisturbed_episodes: Path) -> None:
    assert_accounts_add_up(undisturbed_episodes, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    ledger = ledger_of(undisturbed_episodes)
    assert ledger.get("schema") == 2
    groups = trained_groups(undisturbed_episodes)
    assert len(groups) == NUM_STEPS * GROUPS_PER_STEP
    for rollout in (rollout for group in groups for rollout in group):
        assert rollout.episode is not None
        assert rollout.turns is not None
        assert {*rollout.turns[rollout.loss_mask].tolist()} == {*range(NUM_TURNS)}
        assert [message["role"] for message in rollout.episode.messages] == ["assistant", "user"] * 2 + ["assistant"]
        assert rollout.rewards["environment"] == pytest.approx(sum(rollout.episode.turn_rewards))
        assert rollout.rewards["digits"] is not None
        assert np.array_equal(rollout.turns >= 0, rollout.loss_mask)
    rows = trained_steps(undisturbed_episodes)
    assert all(row["episodes/turns"] == NUM_TURNS and row["episodes/branches"] == 1 for row in rows)
    assert any(row["reward"] > 0 for row in rows)
    for row, own in zip(rows, by_step(groups), strict=True):
        rollouts = [rollout for group in own for rollout in group]
        assert row["tokens/sampled"] == pytest.approx(np.mean([rollout.loss_mask.sum() for rollout in rollouts]))
        versions = [rollout.policy_versions[rollout.loss_mask] for rollout in rollouts]
        assert row["staleness/spread"] == pytest.approx(np.mean([np.ptp(each) for each in versions]))
        assert row["time/engine_wait"] > 0
        assert row["time/environment"] > NUM_TURNS * 0.1


@pytest.mark.slow
def test_a_run_whose_every_process_is_killed_ends_as_an_undisturbed_one(
    make: Make, undisturbed_episodes: Path, tmp_path: Path
) -> None:
    plan = {1: "rollout", 2: "episodes", 3: "replay", 4: "learner", 5: "scorer"}
    with signals(tmp_path, plan, signal.SIGKILL) as killed:
        summary = rlpipe.train(make(tmp_path, SLOW))
    assert killed == list(plan.values())
    assert summary["steps"] == NUM_STEPS
    assert_accounts_add_up(tmp_path, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    for own, other in zip(trained_groups(tmp_path), trained_groups(undisturbed_episodes), strict=True):
        for sequence, expected in zip(own.sequences, other.sequences, strict=True):
            assert np.array_equal(sequence.token_ids, expected.token_ids), "turns that were sampled again are the same"
    # Turns that an engine samples together differ from run to run, and with them the rounding of their log-probs.
    assert largest_difference(read_adapter(undisturbed_episodes / "policy"), read_adapter(tmp_path / "policy")) < 1e-4
    said = "\n".join(event.message for event in ledger_of(tmp_path).events())
    assert "engine rollout-0 died: " in said
    assert "episodes-0 died: " in said


@pytest.mark.slow
def test_a_hanging_environment_costs_its_episode_the_time_limit(make: Make, tmp_path: Path) -> None:
    options = ["algorithm.num_steps=2", "environment.timeout_s=3"]
    rlpipe.train(make(tmp_path, *options, kind="Hanging"))
    assert_accounts_add_up(tmp_path, num_steps=2, groups_per_step=GROUPS_PER_STEP)
    assert any(row["episodes/truncated"] > 0 for row in trained_steps(tmp_path))


def test_a_program_plays_on_the_runs_engines(make: Make, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["environment.path=null", f"environment.agent={FILE}:solve", "algorithm.num_steps=2"]
    summary = rlpipe.train(make(tmp_path, *options))
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    assert_accounts_add_up(tmp_path, num_steps=2, groups_per_step=GROUPS_PER_STEP)
    rows = trained_steps(tmp_path)
    assert all(row["episodes/turns"] == 2 and row["episodes/branches"] == 1 for row in rows)
    assert "core_worker" not in capfd.readouterr().err, "Ray's core has nothing to say about the actors"


@pytest.mark.slow
def test_a_program_without_a_reward_needs_a_reward_function(make: Make, tmp_path: Path) -> None:
    def half(completions: list[Any], **_: Any) -> list[float]:
        return [0.5] * len(completions)

    options = ["environment.path=null", f"environment.agent={FILE}:talk", "~scoring.rewards.digits"]
    config = make(tmp_path / "scored", *options, "algorithm.num_steps=1", "algorithm.advantage.name=reinforce")
    rlpipe.train(config, rewards=[half])
    assert [step["reward"] for step in trained_steps(tmp_path / "scored")] == [0.5]
    with pytest.raises(rlpipe.RunError, match="the program gave no reward, and the run has no reward functions"):
        rlpipe.train(make(tmp_path / "unscored", *options))


@pytest.mark.slow
def test_an_environment_that_fails_may_stop_the_run(make: Make, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match="the board is gone"):
        rlpipe.train(make(tmp_path, "environment.on_error=raise", kind="Broken"))
    assert re.search("EnvironmentFailed: .*the board is gone.*rlpipe episode plays one", diagnosed(tmp_path))


@pytest.mark.slow
def test_an_environment_that_always_fails_ends_the_run(make: Make, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFailed, match=r"groups in a row failed.*the board is gone"):
        rlpipe.train(make(tmp_path, kind="Broken"))
    assert re.search("groups in a row failed.*the board is gone.*; fix the environment", diagnosed(tmp_path))


WAYS = {
    "environment": [],
    "tools": [
        *("environment.path=null", f"environment.tools=[{FILE}:look]", f"environment.parser={FILE}:call_often"),
        *("environment.max_turns=4", "rollout.max_model_len=200"),
    ],
    "agent": ["environment.path=null", f"environment.agent={FILE}:solve"],
    "rewriting agent": ["environment.path=null", f"environment.agent={FILE}:rewrite"],
}
MANY = [
    "algorithm.groups_per_step=96",
    "algorithm.group_size=8",
    "algorithm.num_steps=1",
    "rollout.sampling.max_tokens=16",
]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
@pytest.mark.parametrize("way", WAYS)
def test_ten_thousand_tokens_are_scored_as_they_were_sampled(make: Make, tmp_path: Path, way: str, engine: str) -> None:
    summary = rlpipe.train(make(tmp_path, *MANY, f"rollout.engine={engine}", *WAYS[way]))
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    assert_accounts_add_up(tmp_path, num_steps=1, groups_per_step=96)
    rollouts = [rollout for group in trained_groups(tmp_path) for rollout in group]
    compared = ledger_of(tmp_path).rows(
        "SELECT sum(num_loss_tokens) FROM groups WHERE state = 'DISCARDED' AND step = 1"
    )
    assert compared[0][0] > 11_000, "tokens of the last version, whose log-probs are compared"
    num_sequences = {len(rollout.sequences) for rollout in rollouts}
    assert num_sequences == ({3} if way == "rewriting agent" else {1})
    if way == "tools":
        calls = [row["tools/look/calls"] for row in trained_steps(tmp_path)]
        assert min(calls) > 0.5
        roles = {message["role"] for rollout in rollouts for message in rollout.episode.messages}  # type: ignore[union-attr]
        assert roles == {"assistant", "tool"}


@pytest.mark.slow
@pytest.mark.vllm
def test_turns_of_vllm_are_scored_as_they_were_sampled(make: Make, tmp_path: Path) -> None:
    pytest.importorskip("vllm")
    summary = rlpipe.train(make(tmp_path, "rollout.engine=vllm", "replay.max_staleness=1", "rollout.num_engines=2"))
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    assert_accounts_add_up(tmp_path, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)

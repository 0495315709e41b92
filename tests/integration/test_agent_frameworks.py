"""Tests of runs whose agents are programs of several frameworks: what of their conversations is trained."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_cases import HOLDS_LOGP_TO, make_config, trained_steps
from signal_cases import assert_accounts_add_up, ledger_of

import rlpipe
from rlpipe.models.tiny_model import make_tiny_policy

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
NUM_STEPS, GROUPS_PER_STEP, GROUP_SIZE, NUM_TURNS = 3, 1, 4, 3
MAX_TOKENS = 16_384
"""Tokens of a conversation: the tiny policy has one for each character."""
OPTIONS = (
    "environment.num_cpus=0.1",
    "environment.timeout_s=300",
    "environment.concurrency=4",
    f"environment.parser={ROOT / 'tests' / 'helpers' / 'environment_cases.py'}:multiply_twice",
    f"algorithm.num_steps={NUM_STEPS}",
    f"algorithm.groups_per_step={GROUPS_PER_STEP}",
    f"algorithm.group_size={GROUP_SIZE}",
    f"rollout.max_model_len={MAX_TOKENS}",
    f"learner.max_tokens_per_microbatch={MAX_TOKENS}",
)


@pytest.fixture(scope="session")
def reading_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny policy that takes long conversations."""
    folder = tmp_path_factory.mktemp("reading-policy")
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 128}
    return make_tiny_policy(folder, max_positions=MAX_TOKENS, **sizes)


@pytest.fixture(scope="session")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("questions") / "rows.jsonl"
    rows = [{"question": f"{number} * 7?", "answer": "is even"} for number in range(24)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def train(framework: str, policy: Path, rows: Path, output: Path) -> tuple[list[dict[str, Any]], list[rlpipe.Rollout]]:
    """Train on a framework's episodes, and return the metrics of the steps and the rollouts in the ledger."""
    command = json.dumps([sys.executable, str(ROOT / "examples" / "agent_frameworks" / "agent.py"), framework])
    agent = f"environment.agent={{command: {command}}}"
    summary = rlpipe.train(make_config(policy, rows, output, *OPTIONS, agent))
    assert summary["max_logprob_difference"] <= HOLDS_LOGP_TO
    assert_accounts_add_up(output, num_steps=NUM_STEPS, groups_per_step=GROUPS_PER_STEP)
    ledger = ledger_of(output)
    groups = ledger.rows("SELECT group_id FROM groups WHERE state = 'TRAINED' ORDER BY group_id")
    rollouts = [rollout for group in ledger.load(row[0] for row in groups) for rollout in group]
    assert len(rollouts) == NUM_STEPS * GROUPS_PER_STEP * GROUP_SIZE
    steps = trained_steps(output)
    assert len(steps) == NUM_STEPS
    assert all(math.isfinite(step["loss"]) and math.isfinite(step["grad_norm"]) for step in steps)
    assert any(step["grad_norm"] > 0 for step in steps), "the rewards of siblings differ"
    assert all(step["episodes/turns"] == NUM_TURNS and step["episodes/failed"] == 0 for step in steps)
    return steps, rollouts


@pytest.mark.parametrize("framework", ["openai", "langgraph", "openai-agents"])
def test_an_episode_of_a_framework_that_sends_turns_back_is_one_sequence(
    local_ray: None, reading_policy: Path, questions: Path, tmp_path: Path, framework: str
) -> None:
    steps, rollouts = train(framework, reading_policy, questions, tmp_path)
    assert [step["episodes/branches"] for step in steps] == [1.0] * NUM_STEPS
    for rollout in rollouts:
        assert rollout.episode is not None
        assert rollout.turns is not None
        assert len(rollout.sequences) == 1
        assert {*np.unique(rollout.turns[rollout.loss_mask])} == {*range(NUM_TURNS)}
        roles = [message["role"] for message in rollout.episode.messages]
        assert roles == ["assistant", "tool"] * (NUM_TURNS - 1) + ["assistant"]
        assert rollout.rewards["environment"] in (0.0, 1.0)


def test_an_episode_of_smolagents_has_a_sequence_for_each_turn(
    local_ray: None, reading_policy: Path, questions: Path, tmp_path: Path
) -> None:
    steps, rollouts = train("smolagents", reading_policy, questions, tmp_path)
    assert [step["episodes/branches/rewritten"] for step in steps] == [NUM_TURNS - 1.0] * NUM_STEPS
    for rollout in rollouts:
        assert len(rollout.sequences) == NUM_TURNS
        trained = [own.turns[own.loss_mask] for own in rollout.sequences if own.turns is not None]
        assert [{*turns.tolist()} for turns in trained] == [{turn} for turn in range(NUM_TURNS)]

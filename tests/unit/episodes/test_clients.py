"""Tests of programs of several frameworks, none of which knows rlpipe: how their conversations are recognized."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from player_cases import play

from rlpipe.configs.schema.rollout_config import EnvironmentConfig
from rlpipe.episodes.load_environment import EpisodeKind, import_kind

PROGRAM = Path(__file__).parents[2] / "helpers" / "agent_programs.py"
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"b":  7, "a": 6}}\n</tool_call>'
AGAIN = (
    '<think>\nOnce more.\n</think>\n\n<tool_call>\n{"name": "multiply", "arguments": {"a": 6, "b": 7}}\n</tool_call>'
)
FINAL = '<tool_call>\n{"name": "final_answer", "arguments": {"answer": "42"}}\n</tool_call>'
ROW = {"question": "6 * 7?", "answer": 42}


def program(framework: str) -> EpisodeKind:
    return import_kind(EnvironmentConfig(agent={"command": [sys.executable, str(PROGRAM), framework]}))


@pytest.mark.parametrize(
    "framework",
    [
        "openai",
        "responses",
        pytest.param("langgraph", marks=pytest.mark.slow),
        pytest.param("langgraph-responses", marks=pytest.mark.slow),
        pytest.param("openai-agents", marks=pytest.mark.slow),
        pytest.param("openai-agents-responses", marks=pytest.mark.slow),
        pytest.param("openai-agents-stream", marks=pytest.mark.slow),
    ],
)
def test_a_conversation_of_turns_with_calls_is_one_sequence(framework: str) -> None:
    said = [CALL, AGAIN, "It is 42."]
    group, turns = play(said, said, kind=program(framework), row=ROW, timeout_s=120.0)
    assert group.failure is None
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [1.0, 1.0]
    assert group.logged["episodes/branches"] == 1.0
    assert group.logged["episodes/turns"] == 3.0
    for rollout in group:
        assert rollout.turns is not None
        assert {*rollout.turns[rollout.loss_mask].tolist()} == {0, 1, 2}
    contexts = [request.prompt.token_ids for request in turns.requests]
    assert sum(np.array_equal(contexts[0], context) for context in contexts) == 2


@pytest.mark.slow
def test_a_program_that_rewrites_turns_has_a_sequence_for_each() -> None:
    group, _ = play(
        [CALL, FINAL], [CALL, FINAL], kind=program("smolagents"), row=ROW, timeout_s=120.0, max_model_len=50_000
    )
    assert group.failure is None
    assert [rollout.episode.reward for rollout in group if rollout.episode] == [1.0, 1.0]
    assert group.logged["episodes/branches"] == 2.0
    assert group.logged["episodes/branches/rewritten"] == 1.0
    for rollout in group:
        turns = [sequence.turns[sequence.loss_mask] for sequence in rollout.sequences if sequence.turns is not None]
        assert [{*own.tolist()} for own in turns] == [{0}, {1}]

"""Conversations of several turns, on an engine with scripted answers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rlpipe.rollout.multi_turn import FIRST_PART_ID, MultiTurnEngine
from rlpipe.types import GroupRequest, Prompt, Rollout, RolloutGroup, RolloutStatus

END = 2
TURNS = ([30, 31], [40])
Answer = Callable[[GroupRequest, int], tuple[list[int], RolloutStatus]]


class ScriptedEngine:
    """A fake engine that answers every request at the next step, as sampled with ``version``."""

    has_work = True

    def __init__(self, answer: Answer) -> None:
        self._answer, self._waiting = answer, list[GroupRequest]()
        self.requests: list[GroupRequest] = []
        self.version = 0

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self.requests += requests
        self._waiting += requests

    def cancel(self, group_ids: Collection[int]) -> None:
        self._waiting = [request for request in self._waiting if request.group_id not in group_ids]

    def step(self) -> list[RolloutGroup]:
        waiting, self._waiting = self._waiting, []
        return [self._sample(request) for request in waiting]

    def _sample(self, request: GroupRequest) -> RolloutGroup:
        rollouts = []
        for index in range(request.group_size):
            tokens, status = self._answer(request, index)
            prompt = request.prompt.token_ids
            mask = np.arange(len(prompt) + len(tokens)) >= len(prompt)
            rollouts.append(
                Rollout(
                    group_id=request.group_id,
                    sample_index=index,
                    prompt_id=7,
                    task={},
                    token_ids=np.array([*prompt, *tokens], np.int32),
                    loss_mask=mask,
                    logprobs=np.where(mask, -0.5 - self.version, 0).astype(np.float32),
                    policy_versions=np.where(mask, self.version, -1).astype(np.int32),
                    status=status,
                )
            )
        failure = "too long" if any(r.status is RolloutStatus.FAILED for r in rollouts) else None
        return RolloutGroup(
            group_id=request.group_id, prompt=request.prompt, rollouts=rollouts, failure=failure, generate_s=1.0
        )


def make_request(group_id: int = 5, *, group_size: int = 2, turns: Sequence[Any] = TURNS) -> GroupRequest:
    prompt = Prompt(
        prompt_id=7,
        epoch=0,
        token_ids=np.array([10, 11], np.int32),
        prompt="",
        task={},
        turns=[np.array(turn, np.int32) for turn in turns],
    )
    return GroupRequest(
        group_id=group_id, prompt=prompt, group_size=group_size, max_tokens=9, temperature=1.0, seed=3, min_version=4
    )


def by_length(request: GroupRequest, index: int) -> tuple[list[int], RolloutStatus]:
    """Answer with the conversation's length and the sibling's index."""
    return [100 + len(request.prompt.token_ids), 50 + index, END], RolloutStatus.COMPLETED


def test_each_sibling_continues_from_what_it_has_said() -> None:
    inner = ScriptedEngine(by_length)
    engine = MultiTurnEngine(inner)
    engine.submit([make_request()])
    assert engine.step() == []
    inner.version = 1
    assert engine.step() == []
    (group,) = engine.step()
    assert (group.group_id, len(group), group.failure) == (5, 2, None)
    for index, rollout in enumerate(group):
        first, second, third = [102, 50 + index, END], [107, 50, END], [111, 50, END]
        assert rollout.token_ids.tolist() == [10, 11, *first, 30, 31, *second, 40, *third]
        assert np.flatnonzero(rollout.loss_mask).tolist() == [2, 3, 4, 7, 8, 9, 11, 12, 13]
        assert rollout.policy_versions.tolist() == [-1, -1, 0, 0, 0, -1, -1, 1, 1, 1, -1, 1, 1, 1]
        assert rollout.logprobs[rollout.loss_mask].tolist() == [-0.5] * 3 + [-1.5] * 6
        assert not rollout.logprobs[~rollout.loss_mask].any()
        assert (rollout.group_id, rollout.sample_index, rollout.oldest_version) == (5, index, 0)
    assert engine.step() == []


def test_a_cancelled_conversation_ends_in_the_middle() -> None:
    inner = ScriptedEngine(by_length)
    engine = MultiTurnEngine(inner)
    engine.submit([make_request(), make_request(6)])
    assert engine.step() == []
    engine.cancel({5})
    finished = [group for _ in range(4) for group in engine.step()]
    assert [group.group_id for group in finished] == [6]
    assert len([request for request in inner.requests if request.group_id >= FIRST_PART_ID]) == 2 + 4


def test_further_turns_ask_as_the_first_did_with_seeds_of_their_own() -> None:
    inner = ScriptedEngine(by_length)
    engine = MultiTurnEngine(inner)
    engine.submit([make_request(), replace(make_request(6), seed=4)])
    while not (finished := engine.step()):
        pass
    assert [group.group_id for group in finished] == [5, 6]
    parts = [request for request in inner.requests if request.group_id >= FIRST_PART_ID]
    assert len(parts) == 8
    assert len({request.group_id for request in inner.requests}) == 10
    assert {(r.group_size, r.max_tokens, r.temperature, r.min_version) for r in parts} == {(1, 9, 1.0, 4)}
    assert len({request.seed for request in parts}) == 8
    assert all(0 <= request.seed < 2**31 for request in parts)
    assert not any(request.prompt.turns for request in parts)


def test_a_turn_that_is_cut_off_is_the_last() -> None:
    def cut(request: GroupRequest, index: int) -> tuple[list[int], RolloutStatus]:
        tokens, _ = by_length(request, index)
        is_cut = index == 1 or len(request.prompt.token_ids) > 10
        return tokens, RolloutStatus.TRUNCATED if is_cut else RolloutStatus.COMPLETED

    engine = MultiTurnEngine(ScriptedEngine(cut))
    engine.submit([make_request()])
    assert engine.step() == []
    assert engine.step() == []
    (group,) = engine.step()
    assert [len(rollout.token_ids) for rollout in group] == [14, 5]
    assert [rollout.status for rollout in group] == [RolloutStatus.TRUNCATED] * 2


def test_a_turn_that_fails_fails_the_group() -> None:
    def fail_later(request: GroupRequest, index: int) -> tuple[list[int], RolloutStatus]:
        tokens, completed = by_length(request, index)
        return tokens, RolloutStatus.FAILED if request.group_id == FIRST_PART_ID + 1 else completed

    inner = ScriptedEngine(fail_later)
    engine = MultiTurnEngine(inner)
    engine.submit([make_request()])
    assert engine.step() == []
    found = engine.step() or engine.step()
    assert [group.failure for group in found] == ["turn 2: too long"]
    assert engine.step() == []


@pytest.mark.parametrize("failed", [True, False])
def test_groups_without_further_turns_pass_through(failed: bool) -> None:
    status = RolloutStatus.FAILED if failed else RolloutStatus.COMPLETED
    engine = MultiTurnEngine(ScriptedEngine(lambda request, index: ([END], status)))
    engine.submit([make_request(turns=()), make_request(6)] if failed else [make_request(turns=())])
    finished = engine.step()
    assert [group.group_id for group in finished] == ([5, 6] if failed else [5])
    assert [group.failure for group in finished] == (["too long"] * 2 if failed else [None])

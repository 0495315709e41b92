"""Greedy completions beside the sampled ones of a group, on an engine that answers in any order."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import pytest

from rlpipe.rollout.engine import Sample, build_group, failed_group
from rlpipe.rollout.greedy import FIRST_GREEDY_ID, GreedyBaselineEngine
from rlpipe.types import GroupRequest, Prompt, RolloutGroup


class ManualEngine:
    """A fake engine that finishes the requests that a test names; a completion tells its temperature and version."""

    has_work = True

    def __init__(self) -> None:
        self.waiting: list[GroupRequest] = []
        self.version = 0
        self._finished: list[RolloutGroup] = []

    def submit(self, requests: Sequence[GroupRequest]) -> None:
        self.waiting += requests

    def cancel(self, group_ids: Collection[int]) -> None:
        self.waiting = [request for request in self.waiting if request.group_id not in group_ids]

    def finish(self, *places: int, failure: str | None = None) -> None:
        for request in [self.waiting[place] for place in places]:
            self.waiting.remove(request)
            token = 100 if request.temperature else 200
            samples = [
                Sample(
                    token_ids=[token + index, 2],
                    logprobs=[-0.5, -0.5],
                    policy_versions=[self.version] * 2,
                    finish_reason="stop",
                )
                for index in range(request.group_size)
            ]
            seconds = 1.0 if request.temperature else 3.0
            group = build_group(request, samples, seconds) if failure is None else failed_group(request, failure)
            self._finished.append(group)

    def step(self) -> list[RolloutGroup]:
        finished, self._finished = self._finished, []
        return finished


def make_request(group_id: int, *, with_greedy: bool = True) -> GroupRequest:
    prompt = Prompt(prompt_id=7, epoch=0, token_ids=np.array([10, 11], np.int32), prompt="", task={})
    return GroupRequest(
        group_id=group_id,
        prompt=prompt,
        group_size=2,
        max_tokens=9,
        temperature=0.7,
        seed=3,
        min_version=4,
        with_greedy=with_greedy,
    )


def test_a_group_comes_back_once_with_its_greedy_completion_last() -> None:
    inner = ManualEngine()
    engine = GreedyBaselineEngine(inner)
    engine.submit([make_request(5), make_request(6)])
    assert [(r.group_id, r.group_size, r.temperature) for r in inner.waiting] == [
        (5, 2, 0.7),
        (6, 2, 0.7),
        (FIRST_GREEDY_ID, 1, 0.0),
        (FIRST_GREEDY_ID + 1, 1, 0.0),
    ]
    assert {(request.max_tokens, request.min_version) for request in inner.waiting} == {(9, 4)}
    inner.finish(0, 3)
    assert engine.step() == [], "a half waits for the other"
    inner.version = 1
    inner.finish(0, 1)
    by_id = {group.group_id: group for group in engine.step()}
    assert by_id.keys() == {5, 6}
    for group_id, group in by_id.items():
        assert [rollout.token_ids.tolist() for rollout in group] == [
            [10, 11, 100, 2],
            [10, 11, 101, 2],
            [10, 11, 200, 2],
        ]
        assert [rollout.is_greedy for rollout in group] == [False, False, True]
        assert [(rollout.group_id, rollout.sample_index) for rollout in group] == [(group_id, i) for i in range(3)]
        assert group.sampled == group.rollouts[:2]
        assert (group.failure, group.generate_s) == (None, 3.0)
    assert [rollout.oldest_version for rollout in by_id[5]] == [0, 0, 1]
    assert engine.step() == []


def test_other_requests_pass_unchanged() -> None:
    inner = ManualEngine()
    engine = GreedyBaselineEngine(inner)
    engine.submit([make_request(5, with_greedy=False)])
    assert len(inner.waiting) == 1
    inner.finish(0)
    (group,) = engine.step()
    assert (len(group), len(group.sampled)) == (2, 2)


@pytest.mark.parametrize(("failing", "reason"), [(0, "too long"), (1, "greedy completion: too long")])
def test_a_group_fails_if_a_half_does(failing: int, reason: str) -> None:
    inner = ManualEngine()
    engine = GreedyBaselineEngine(inner)
    engine.submit([make_request(5)])
    inner.finish(failing, failure="too long")
    inner.finish(0)
    (group,) = engine.step()
    assert (group.group_id, group.failure, group.rollouts) == (5, reason, [])


def test_a_cancelled_group_leaves_nothing_behind() -> None:
    inner = ManualEngine()
    engine = GreedyBaselineEngine(inner)
    engine.submit([make_request(5), make_request(6)])
    inner.finish(0)
    assert engine.step() == []
    engine.cancel({5})
    assert [request.group_id for request in inner.waiting] == [6, FIRST_GREEDY_ID + 1]
    inner.finish(0, 1)
    assert [group.group_id for group in engine.step()] == [6]


def test_a_group_that_is_submitted_twice_comes_back_twice() -> None:
    inner = ManualEngine()
    engine = GreedyBaselineEngine(inner)
    engine.submit([make_request(5)])
    inner.finish(0)
    assert engine.step() == []
    engine.submit([replace(make_request(5), seed=4)])
    inner.finish(0, 1, 2)
    assert [(group.group_id, len(group)) for group in engine.step()] == [(5, 3), (5, 3)]


def test_a_greedy_completion_counts_in_the_work_of_a_request() -> None:
    assert make_request(5).outstanding_tokens == 2 + 3 * 9
    assert make_request(5, with_greedy=False).outstanding_tokens == 2 + 2 * 9

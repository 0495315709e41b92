"""Tests that an evaluation counts every held-out prompt, including those that could not be scored."""

import asyncio

import numpy as np
import pytest

from rlpipe.configs.schema.data_config import HeldOutConfig
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.run.evaluation import Evaluator
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import GroupRequest, Prompt, Rollout, RolloutGroup


def answer(request: GroupRequest) -> RolloutGroup:
    rollout = Rollout(
        group_id=request.group_id,
        sample_index=0,
        prompt_id=request.prompt.prompt_id,
        task={},
        token_ids=np.arange(3, dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.zeros(3, np.float32),
        policy_versions=np.array([-1, 7, 8], np.int32),
    )
    return RolloutGroup(group_id=request.group_id, prompt=request.prompt, rollouts=[rollout])


def test_accuracy_counts_every_prompt() -> None:
    prompts = [Prompt(prompt_id=i, epoch=0, token_ids=np.zeros(1, np.int32), prompt="p", task={}) for i in range(4)]

    async def scenario() -> dict[str, float]:
        rewards = {"r": RewardConfig(path="m:r")}
        evaluator = Evaluator(prompts, rewards=rewards, held_out=HeldOutConfig(correct_at=0.9), max_tokens=5)
        requests, result = evaluator.start(version=7)
        assert all(r.min_version == 7 and r.temperature == 0 and r.group_size == 1 for r in requests)
        assert all(r.group_id < 0 for r in requests)
        for request, reward in zip(requests, [1.0, 0.95, 0.5, None], strict=True):
            assert evaluator.owns(request.group_id)
            scores = GroupScores(group_id=request.group_id)
            if reward is None:
                scores.failures["r"] = "it broke"
            else:
                scores.scores["r"] = [reward]
            evaluator.add(answer(request), [scores])
            assert not evaluator.owns(request.group_id)
        found = await result
        assert [group.prompt.prompt_id for group in found.groups] == [0, 1, 2], "those that could be scored"
        return found.metrics

    metrics = asyncio.run(scenario())
    assert metrics["eval/accuracy"] == 0.5
    assert (metrics["eval/num_prompts"], metrics["eval/num_failed"]) == (4, 1)
    assert metrics["eval/reward"] == pytest.approx((1.0 + 0.95 + 0.5) / 3)
    assert metrics["eval/completions/mean_length"] == 2
    assert metrics["eval/policy_version"] == 7.5


def test_one_reward_may_say_what_is_correct() -> None:
    prompt = Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(1, np.int32), prompt="p", task={}, max_tokens=3)
    rewards = {"sum": RewardConfig(path="m:r", weight=5.0), "exact": RewardConfig(path="m:e", weight=0.0)}

    async def scenario(exact: float | None) -> float:
        evaluator = Evaluator([prompt], rewards=rewards, held_out=HeldOutConfig(correct_by="exact"), max_tokens=5)
        (request,), result = evaluator.start(version=0)
        assert request.max_tokens == 3
        evaluator.add(
            answer(request), [GroupScores(group_id=request.group_id, scores={"sum": [1.0], "exact": [exact]})]
        )
        return (await result).metrics["eval/accuracy"]

    assert [asyncio.run(scenario(exact)) for exact in (1.0, 0.0, None)] == [1.0, 0.0, 0.0]


def test_two_evaluations_do_not_share_ids() -> None:
    prompts = [Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(1, np.int32), prompt="p", task={})]

    async def scenario() -> set[int]:
        evaluator = Evaluator(prompts, rewards={}, held_out=HeldOutConfig(), max_tokens=5)
        return {request.group_id for _ in range(3) for request in evaluator.start(version=0)[0]}

    assert len(asyncio.run(scenario())) == 3

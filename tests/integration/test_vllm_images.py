"""Tests that vLLM samples prompts with images with the learner's log-probs, whatever weights it serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import OpenVllm, load, publish_adapter, publish_full, sample
from image_cases import IMAGE_FAMILIES, render_prompts
from torch import nn

from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.data.packing import pack_step
from rlpipe.learner.policy import Policy, load_policy
from rlpipe.rollout.engine import Engine
from rlpipe.types import GroupRequest, Rollout

pytest.importorskip("vllm")
pytestmark = [pytest.mark.vllm, pytest.mark.covering(1)]

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return IMAGE_FAMILIES["idefics3"].write(tmp_path_factory.mktemp("model"))


def config(folder: Path, kind: str) -> ModelConfig:
    return ModelConfig(path=str(folder), dtype="float32", adapter=AdapterConfig(kind=kind, r=4, alpha=12.0))


def sampled(engine: Engine, model: ModelConfig) -> list[Rollout]:
    requests = [
        GroupRequest(group_id=p.prompt_id, prompt=p, group_size=2, max_tokens=6, temperature=1.0, seed=3)
        for p in render_prompts(model)
    ]
    rollouts = [rollout for group in sample(engine, requests) for rollout in group]
    for rollout in rollouts:
        rollout.advantages = np.ones(len(rollout.token_ids), np.float32)
    return rollouts


def refuse_prompts(engine: Engine, model: ModelConfig) -> None:
    """Have vLLM prepare the prompts' images for requests that never get into the engine."""
    prompts = [replace(prompt, token_ids=prompt.token_ids[1:]) for prompt in render_prompts(model) if prompt.images]
    requests = [
        GroupRequest(group_id=index, prompt=prompt, group_size=1, max_tokens=6, temperature=1.0, seed=3)
        for index, prompt in enumerate(prompts)
    ]
    assert all("or different ones" in str(group.failure) for group in sample(engine, requests))


def assert_scored_alike(policy: Policy, rollouts: list[Rollout]) -> None:
    (batch,) = pack_step(rollouts, step=0, num_ranks=1, max_tokens=4096)
    (micro_batch,) = batch.mini_batches[0].micro_batches
    with policy.inference():
        logprobs, _ = policy.logprobs(micro_batch, temperature=1.0)
    np.testing.assert_allclose(
        logprobs.numpy()[micro_batch.loss_mask], micro_batch.logprobs[micro_batch.loss_mask], atol=5e-5
    )


@pytest.mark.parametrize("kind", ["lora", pytest.param("none", marks=pytest.mark.slow)])
def test_vllm_samples_prompts_with_images_as_the_learner_scores_them(
    open_vllm: OpenVllm, folder: Path, kind: str
) -> None:
    model = config(folder, kind)
    engine = open_vllm(model=model)
    policy = load_policy(model, LearnerConfig(), CPU)
    refuse_prompts(engine, model)
    before = sampled(engine, model)
    assert sum(len(rollout.images) for rollout in before) == 2 * 4
    assert_scored_alike(policy, before)
    torch.manual_seed(1)
    for name, parameter in policy.trainable_parameters().items():
        if "lora_A" not in name:
            nn.init.normal_(parameter, std=0.3) if "lora_B" in name else parameter.data.mul_(1.3)
    publish = publish_adapter if kind == "lora" else publish_full
    load(engine, publish(policy.model, 1))
    after = sampled(engine, model)
    assert_scored_alike(policy, after)
    assert any(not np.array_equal(new.token_ids, old.token_ids) for new, old in zip(after, before, strict=True)), (
        "the new weights change what is sampled"
    )

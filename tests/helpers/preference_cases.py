"""Pairs of completions, rows of reward models, and the algorithms that train on them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.preference_config import PreferenceConfig, RewardModelConfig
from rlpipe.types import NO_VERSION, Rollout

PAIRS = 6
HEADS = ("reward_model", "process_reward_model")
COEFFICIENTS = {"orpo": {"cross_entropy_coef": 1.0}, "exo": {"label_smoothing": 0.01}, "simpo": {"margin": 0.3}}


def make_pairs(seed: int = 0) -> list[Rollout]:
    """Return pairs of random tokens, of different lengths."""
    random = np.random.default_rng(seed)
    pairs = []
    for group in range(PAIRS):
        prompt = random.integers(7, 100, random.integers(2, 9)).tolist()
        chosen, rejected = (
            rollout_of(group, prompt, random.integers(7, 100, random.integers(1, 8)).tolist(), sign)
            for sign in (1.0, -1.0)
        )
        chosen.rejected = rejected
        pairs.append(chosen)
    return pairs


def make_rows(loss: str, seed: int = 0) -> list[Rollout]:
    """Return rows of a loss; the loss tokens of a reward model follow those that values are read at."""
    pairs, random = make_pairs(seed), np.random.default_rng(seed)
    if loss not in HEADS:
        return pairs
    for sequence in (sequence for pair in pairs for sequence in pair.sequences):
        length = len(sequence.token_ids)
        sequence.loss_mask = np.arange(length) == length - 1
        sequence.advantages = np.zeros(length, np.float32)
        if loss == "process_reward_model":
            sequence.loss_mask |= (np.arange(length) > 1) & (random.random(length) < 0.3)
            sequence.advantages[sequence.loss_mask] = random.integers(0, 2, int(sequence.loss_mask.sum()))
    if loss == "process_reward_model":
        return [replace(pair, rejected=None) for pair in pairs]
    for pair in pairs:
        assert pair.advantages is not None
        pair.advantages[-1] = random.random()  # its margin
    return pairs


def rollout_of(group: int, prompt: list[int], completion: list[int], sign: float) -> Rollout:
    """Return one completion; its sign says whether it is good."""
    tokens = np.array([*prompt, *completion], np.int32)
    mask = np.arange(len(tokens)) >= len(prompt)
    return Rollout(
        group_id=group,
        sample_index=0,
        prompt_id=group,
        task={},
        token_ids=tokens,
        loss_mask=mask,
        logprobs=np.zeros(len(mask), np.float32),
        policy_versions=np.full(len(mask), NO_VERSION, np.int32),
        advantages=np.where(mask, sign, 0).astype(np.float32),
    )


def algorithm_of(loss: str, **options: Any) -> AlgorithmConfig:
    """Return the algorithm of a loss of preferences, with the coefficients that it needs, or of a reward model."""
    if loss in HEADS:
        return AlgorithmConfig(
            kind=loss, group_size=1, num_steps=10, reward_model=RewardModelConfig(**{"center_coef": 0.05} | options)
        )
    preference = PreferenceConfig(loss=loss, **{**COEFFICIENTS.get(loss, {}), **options})
    return AlgorithmConfig(kind="preference", group_size=1, num_steps=10, preference=preference)

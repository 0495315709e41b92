"""Pairs of completions and the learners that train on them."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.preference_config import PreferenceConfig
from rlpipe.types import NO_VERSION, Rollout

PAIRS = 6
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
    """Return the algorithm of a loss of preferences, with the coefficients that it needs."""
    preference = PreferenceConfig(loss=loss, **{**COEFFICIENTS.get(loss, {}), **options})
    return AlgorithmConfig(kind="preference", group_size=1, num_steps=10, preference=preference)

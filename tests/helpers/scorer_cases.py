"""A tokenizer of characters, and groups whose completions are given texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlpipe.types import Prompt, Rollout, RolloutGroup

PROMPT_TOKENS = 3


class CharacterTokenizer:
    """A tokenizer with one token per character, of which token 0 is special, and a counter of its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def batch_decode(self, sequences: Any, *, skip_special_tokens: bool) -> list[str]:
        self.num_calls += 1
        assert skip_special_tokens
        return ["".join(chr(token) for token in sequence if token) for sequence in sequences]


def make_rollout(index: int, text: str, task: dict[str, Any], version: int) -> Rollout:
    tokens = np.array([1] * PROMPT_TOKENS + [ord(c) for c in text] + [0], dtype=np.int32)
    sampled = np.arange(len(tokens)) >= PROMPT_TOKENS
    return Rollout(
        group_id=5,
        sample_index=index,
        prompt_id=17,
        task=task,
        token_ids=tokens,
        loss_mask=sampled,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        policy_versions=np.where(sampled, version, -1).astype(np.int32),
    )


def make_group(*texts: str, prompt: Any = "2 + 2 = ?", version: int = 3, **task: Any) -> RolloutGroup:
    token_ids = np.ones(PROMPT_TOKENS, dtype=np.int32)
    source = Prompt(prompt_id=17, epoch=1, token_ids=token_ids, prompt=prompt, task=task)
    rollouts = [make_rollout(index, text, task, version) for index, text in enumerate(texts)]
    return RolloutGroup(group_id=5, prompt=source, rollouts=rollouts)

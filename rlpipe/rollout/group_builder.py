"""Construction of rollouts and groups from the tokens that an engine drew."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rlpipe.types import NO_VERSION, GroupRequest, Rollout, RolloutGroup, RolloutStatus

_STATUS = {"stop": RolloutStatus.COMPLETED, "length": RolloutStatus.TRUNCATED}


@dataclass(kw_only=True, slots=True, frozen=True)
class Sample:
    """One completion as an engine returns it, including the token that ended it."""

    token_ids: Sequence[int]  # [C]
    logprobs: Sequence[float]  # [C], of the distribution that each token was drawn from
    policy_versions: Sequence[int]  # [C], the version that drew each token
    finish_reason: str
    """``stop`` (an end token or a stop string), ``length``, ``image`` (an image token), or the engine's own reason."""


def build_rollout(request: GroupRequest, sample_index: int, sample: Sample) -> Rollout:
    """Build a rollout from the prompt's tokens and the completion's, without tokenizing any of them again."""
    num_prompt, num_drawn = len(request.prompt.token_ids), len(sample.token_ids)
    token_ids = np.empty(num_prompt + num_drawn, dtype=np.int32)
    token_ids[:num_prompt] = request.prompt.token_ids
    token_ids[num_prompt:] = sample.token_ids
    logprobs = np.zeros(len(token_ids), dtype=np.float32)
    logprobs[num_prompt:] = sample.logprobs
    policy_versions = np.full(len(token_ids), NO_VERSION, dtype=np.int32)
    policy_versions[num_prompt:] = sample.policy_versions
    return Rollout(
        group_id=request.group_id,
        sample_index=sample_index,
        prompt_id=request.prompt.prompt_id,
        task=request.prompt.task,
        token_ids=token_ids,
        loss_mask=policy_versions != NO_VERSION,
        logprobs=logprobs,
        policy_versions=policy_versions,
        status=_STATUS.get(sample.finish_reason, RolloutStatus.ABORTED),
        finish_reason=sample.finish_reason,
        images=request.prompt.images,
    )


def build_group(request: GroupRequest, samples: Sequence[Sample], generate_s: float) -> RolloutGroup:
    """Build the group of a request whose samples are all finished."""
    rollouts = [build_rollout(request, index, sample) for index, sample in enumerate(samples)]
    return RolloutGroup(group_id=request.group_id, prompt=request.prompt, rollouts=rollouts, generate_s=generate_s)


def failed_group(request: GroupRequest, failure: str) -> RolloutGroup:
    """Build the empty group of a request that the engine can't sample."""
    return RolloutGroup(group_id=request.group_id, prompt=request.prompt, rollouts=[], failure=failure)


def too_long(length: int, limit: int) -> str:
    """Return the failure message for a prompt of ``length`` tokens that does not fit."""
    return f"the prompt is too long: its {length} tokens leave no room in {limit} (rollout.max_model_len)"


def without_image(drawn: Sequence[int], image_id: int | None, finish_reason: str) -> str:
    """Return the finish reason, or ``image`` if the last token is an image token, after which sampling must end."""
    return "image" if drawn and drawn[-1] == image_id else finish_reason


def sample_seed(seed: int, sample_index: int = 0) -> int:
    """Derive a seed in [0, 2^62) from a request's seed; neighbouring requests share none (SplitMix64's mixing)."""
    value = (seed * 0x9E3779B97F4A7C15 + (sample_index + 1) * 0xD1B54A32D192ED03) % 2**64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return (value ^ (value >> 31)) >> 2

"""A comparison of the policies that engines serve with the policy in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from engine_cases import Published

from rlpipe.data.packing import pack_step
from rlpipe.learner.policy import Policy
from rlpipe.learner.publish import publish_weights
from rlpipe.types import ByteArray, RolloutGroup, WeightsKind


def publish_policy(policy: Policy, version: int, kind: WeightsKind | None = None) -> Published:
    buckets: list[ByteArray] = []
    manifest = publish_weights(policy, version=version, bucket_bytes=2**16, emit=buckets.append, kind=kind)
    assert manifest is not None, "the first rank publishes"
    return manifest, buckets


def largest_gap(policy: Policy, groups: Sequence[RolloutGroup]) -> float:
    """Return the largest difference between the log-probs of an engine and those of the policy, at temperature 1."""
    rollouts = [
        replace(rollout, advantages=np.ones(len(rollout.token_ids), np.float32))
        for group in groups
        for rollout in group
    ]
    (micro_batch,) = pack_step(rollouts, step=0, num_ranks=1, max_tokens=4096)[0].mini_batches[0].micro_batches
    mask = torch.from_numpy(micro_batch.loss_mask)
    with policy.inference():
        logprobs, _ = policy.logprobs(micro_batch, temperature=1.0)
    return float((logprobs - torch.from_numpy(micro_batch.logprobs))[mask].abs().max())

"""A micro batch on the device: its row, and the inputs of the loss, for its loss tokens alone.

Shapes: N tokens of the micro batch, K loss tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rlpipe.algorithms.losses import LossInputs
from rlpipe.learner.policy import Policy
from rlpipe.learner.row_plan import Row
from rlpipe.types import IntArray, MicroBatch, MiniBatch


@dataclass(kw_only=True, slots=True)
class LearnerInputs:
    """A micro batch on the device; ``old_logprobs`` and ``ref_logprobs`` are filled in where they are needed."""

    row: Row
    group_ids: IntArray  # of its sequences, on the host
    sequence_ids: Tensor  # [K], numbered from 0 without gaps
    advantages: Tensor  # [K]
    sampling_logprobs: Tensor  # [K]
    old_logprobs: Tensor | None = None  # [K]
    ref_logprobs: Tensor | None = None  # [K]
    is_truth: bool = False
    """True for ground truths, whose likelihood is trained."""

    @property
    def is_empty(self) -> bool:
        return not len(self.row.targets)

    def loss_inputs(
        self, logprobs: Tensor, entropy: Tensor | None, mini_batch: MiniBatch, max_completion_tokens: int
    ) -> LossInputs:
        """Return the inputs of the losses, given the policy's current log-probs and entropies ``[K]``."""
        return LossInputs(
            logprobs=logprobs,
            loss_mask=torch.ones_like(logprobs, dtype=torch.bool),
            sequence_ids=self.sequence_ids,
            num_loss_tokens=mini_batch.num_loss_tokens,
            num_sequences=mini_batch.num_sequences,
            max_completion_tokens=max_completion_tokens,
            advantages=self.advantages,
            sampling_logprobs=self.sampling_logprobs,
            old_logprobs=self.old_logprobs,
            ref_logprobs=self.ref_logprobs,
            entropy=entropy,
        )


def prepare(policy: Policy, micro_batch: MicroBatch) -> LearnerInputs:
    loss_tokens = np.flatnonzero(micro_batch.loss_mask)
    sequences = np.searchsorted(micro_batch.sequence_starts, loss_tokens, side="right")

    def pick(values: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values[loss_tokens]).to(policy.device, non_blocking=True)

    return LearnerInputs(
        row=policy.plan(micro_batch),
        group_ids=micro_batch.group_ids,
        sequence_ids=torch.from_numpy(np.unique(sequences, return_inverse=True)[1]).to(policy.device),
        advantages=pick(micro_batch.advantages),
        sampling_logprobs=pick(micro_batch.logprobs),
        ref_logprobs=None if micro_batch.ref_logprobs is None else pick(micro_batch.ref_logprobs),
    )

"""Losses of policies and reward models over micro batches of pairs, or of completions that are labelled good or bad.

Shapes: K loss tokens of a micro batch, S sequences and P pairs of it.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import torch
from peft import PeftModel
from torch import Tensor

from rlpipe.algorithms.corrections import LOGPROB_DIFFERENCE
from rlpipe.algorithms.losses import LossOutput
from rlpipe.algorithms.preferences import (
    LabelledInputs,
    PairInputs,
    RewardPairInputs,
    StepInputs,
    bradley_terry_loss,
    kto_loss,
    pair_loss,
    step_loss,
)
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.preference_config import PreferenceConfig, RewardModelConfig
from rlpipe.data.reference_cache import keyed_sequences
from rlpipe.errors import ModelError
from rlpipe.learner.objectives import LearnerInputs, PackedRows, Reference, prepare
from rlpipe.learner.policy import Policy
from rlpipe.learner.row_plan import AttentionLayout
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.types import FloatArray, MiniBatch


class Preferences(PackedRows):
    """The base class of losses that compare completions with a reference, or with each other."""

    def __init__(
        self,
        policy: Policy,
        learner: LearnerConfig,
        preference: PreferenceConfig,
        reference: Reference | None,
        *,
        temperature: float | None = None,
    ) -> None:
        super().__init__(policy, learner)
        self._preference, self._reference = preference, reference
        self._is_sampled, self._temperature = temperature is not None, 1.0 if temperature is None else temperature

    def _logprobs(self, inputs: LearnerInputs) -> Tensor:
        """Return the policy's log-prob of each completion ``[S]``; of a micro batch without loss ``[0]``."""
        return _sum_by_sequence(self._token_logprobs(inputs), inputs)

    def _token_logprobs(self, inputs: LearnerInputs) -> Tensor:
        chunk_tokens = self._config.logprob_chunk_tokens
        return self._policy.module.logprobs(inputs.row, self._temperature, chunk_tokens)[0]

    def _ref_logprobs(self, inputs: LearnerInputs) -> Tensor | None:
        """Return the reference's log-prob of each completion ``[S]``, or None without a reference."""
        if inputs.ref_logprobs is None:
            if self._reference is None:
                return None
            inputs.ref_logprobs = self._reference.logprobs(
                inputs.row, temperature=self._temperature, chunk_tokens=self._config.logprob_chunk_tokens
            )
        return _sum_by_sequence(inputs.ref_logprobs, inputs)

    def reference_logprobs(self, mini_batch: MiniBatch) -> dict[bytes, FloatArray]:
        """Return the log-probs of the loss tokens by the policy as it begins, by the keys of the sequences.

        A new adapter, which changes nothing yet, is off; one that training continues belongs to the reference.
        """
        policy, logprobs_by_key = self._policy, dict[bytes, FloatArray]()
        is_new = isinstance(policy.model, PeftModel) and policy.config.adapter.path is None
        for micro_batch in self.micro_batches(mini_batch):
            without_adapter = policy.adapter_off() if is_new else nullcontext()
            with without_adapter, policy.inference():
                logprobs = self._token_logprobs(prepare(policy, micro_batch))
            values = np.zeros(micro_batch.num_tokens, np.float32)
            values[micro_batch.loss_mask] = logprobs.float().cpu().numpy()
            logprobs_by_key |= {
                key: values[span][micro_batch.loss_mask[span]] for key, span in keyed_sequences(micro_batch)
            }
        return logprobs_by_key


class PairObjective(Preferences):
    """The losses of a chosen and a rejected completion, which share their prompt's tokens in a row.

    ``temperature`` is that at which they were sampled; None if they come from rows.
    """

    sequences_together = 2

    def prepare(self, mini_batch: MiniBatch) -> list[LearnerInputs]:
        if self._policy.module.layout is AttentionLayout.ALONE:
            raise ModelError(
                f"{self._preference.loss} needs both completions of a pair in one pass, which this model can't run; "
                "use algorithm=kto, which needs no pairs"
            )
        return super().prepare(mini_batch)

    def loss(self, mini_batch: MiniBatch, inputs: LearnerInputs) -> LossOutput:
        ref_logprobs = self._ref_logprobs(inputs)
        logprobs = self._token_logprobs(inputs)
        pair_inputs = PairInputs(
            logprobs=_in_pairs(_sum_by_sequence(logprobs, inputs)),
            ref_logprobs=None if ref_logprobs is None else _in_pairs(ref_logprobs),
            lengths=_in_pairs(_sum_by_sequence(torch.ones_like(inputs.advantages), inputs)),
            num_pairs=mini_batch.num_sequences,
            num_chosen_tokens=mini_batch.num_chosen_tokens,
        )
        output = pair_loss(pair_inputs, self._preference)
        if self._is_sampled:
            sampled = torch.where(inputs.sampling_logprobs.isnan(), logprobs.detach(), inputs.sampling_logprobs)
            distance = (logprobs.detach() - sampled).abs()
            output.metrics.add_max(LOGPROB_DIFFERENCE, distance, torch.ones_like(distance, dtype=torch.bool))
        return self.with_token_counts(output, inputs)


class KtoObjective(Preferences):
    """KTO's loss of completions that are good or bad.

    The KL to the reference, which both are compared with, is estimated once an update, from its mismatched completions.
    """

    _kl: tuple[MiniBatch, Tensor] | None = None

    def begin(self, step: int) -> None:
        """Forget the estimate of the step before."""
        self._kl = None

    def loss(self, mini_batch: MiniBatch, inputs: LearnerInputs) -> LossOutput:
        if self._kl is None or self._kl[0] is not mini_batch:
            self._kl = mini_batch, self._estimate_kl(mini_batch)
        ref_logprobs = self._ref_logprobs(inputs)
        assert ref_logprobs is not None, "KTO has a reference"
        first = torch.ones_like(inputs.sequence_ids, dtype=torch.bool)
        first[1:] = inputs.sequence_ids[1:] != inputs.sequence_ids[:-1]
        labelled = LabelledInputs(
            logprobs=self._logprobs(inputs),
            ref_logprobs=ref_logprobs,
            is_good=inputs.advantages[first] > 0,
            kl=self._kl[1],
            num_sequences=mini_batch.num_sequences,
        )
        return self.with_token_counts(kto_loss(labelled, self._preference), inputs)

    def _estimate_kl(self, mini_batch: MiniBatch) -> Tensor:
        """Return the mean log-ratio of the update's mismatched completions on all ranks, at least 0 (scalar)."""
        assert mini_batch.mismatched is not None, "steps of KTO have mismatched completions"
        total = torch.zeros((), dtype=torch.float64)
        for inputs in self.prepare(mini_batch.mismatched):
            with self._policy.inference():
                logprobs, ref_logprobs = self._logprobs(inputs), self._ref_logprobs(inputs)
            assert ref_logprobs is not None, "KTO has a reference"
            total += (logprobs - ref_logprobs).sum().cpu()
        total = self._policy.sharding.reduce(total, Reduce.SUM)
        mean = total / max(mini_batch.mismatched.num_sequences, 1)
        return mean.clamp(min=0).to(self._policy.device)


class RewardModelObjective(PackedRows):
    """The loss of the rewards of a chosen and a rejected completion, which share their prompt's tokens in a row."""

    sequences_together = 2

    def __init__(self, policy: Policy, learner: LearnerConfig, config: RewardModelConfig) -> None:
        super().__init__(policy, learner)
        self._options = config

    def loss(self, mini_batch: MiniBatch, inputs: LearnerInputs) -> LossOutput:
        rewards = self._policy.module.head_outputs(inputs.row)[:, 0]  # [K], one for each sequence
        pairs = RewardPairInputs(
            rewards=_in_pairs(rewards), margins=inputs.advantages[::2], num_pairs=mini_batch.num_sequences
        )
        return self.with_token_counts(bradley_terry_loss(pairs, self._options), inputs)


class StepLabelObjective(PackedRows):
    """The loss of the labels of steps, one for each loss token."""

    def loss(self, mini_batch: MiniBatch, inputs: LearnerInputs) -> LossOutput:
        steps = StepInputs(
            logits=self._policy.module.head_outputs(inputs.row),
            labels=inputs.advantages.long(),
            solution_ids=inputs.sequence_ids,
            num_steps=mini_batch.num_loss_tokens,
        )
        return self.with_token_counts(step_loss(steps), inputs)


def _in_pairs(values: Tensor) -> Tensor:
    """Return values of sequences ``[S]`` as values of pairs ``[P, 2]``."""
    return values.view(len(values) // 2, 2)


def _sum_by_sequence(values: Tensor, inputs: LearnerInputs) -> Tensor:
    """Return the sums ``[S]`` of ``values`` ``[K]`` over each sequence's loss tokens, in float64.

    A loss compares long sums that differ by little.
    """
    values = values.double()
    return values.new_zeros(inputs.num_sequences).index_add(0, inputs.sequence_ids, values)

"""The objectives of a training step on one rank: the policy-gradient loss of rollouts, and the likelihood of rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from rlpipe.algorithms.losses import LossOutput, policy_loss, sft_loss
from rlpipe.algorithms.metrics import MetricSums
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.data.packing import empty_micro_batch, split_padded, with_blank
from rlpipe.errors import ModelError
from rlpipe.learner.inputs import LearnerInputs, prepare
from rlpipe.learner.policy import Policy
from rlpipe.learner.reference import Reference
from rlpipe.learner.row_plan import AttentionLayout
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.types import IntArray, MicroBatch, MiniBatch


class Inputs(Protocol):
    """A micro batch on the device."""

    @property
    def group_ids(self) -> IntArray:
        """Group of each of its sequences, on the host."""

    @property
    def is_empty(self) -> bool:
        """True if it has no loss tokens, and is run only because other ranks have work."""


Prepared = TypeVar("Prepared", bound=Inputs)


class Objective(Protocol[Prepared]):
    """The loss that a step minimises on one rank; all ranks must make the same calls."""

    def begin(self, step: int) -> None:
        """Prepare for a step; called before every one."""

    def prepare(self, mini_batch: MiniBatch) -> list[Prepared]:
        """Return the mini batch's inputs, equally many on all ranks."""

    def remember(self, inputs: Prepared) -> None:
        """Store what the loss needs of the current weights, because these change before it is computed."""

    def loss(self, mini_batch: MiniBatch, inputs: Prepared) -> LossOutput:
        """Return what these inputs add to the update's loss."""


class PackedRows:
    """The base class of objectives that run the sequences of rollouts or rows unchanged."""

    def __init__(self, policy: Policy, learner: LearnerConfig) -> None:
        self._policy, self._config = policy, learner

    def begin(self, step: int) -> None:
        """Do nothing; these objectives do not depend on the step."""

    def prepare(self, mini_batch: MiniBatch) -> list[LearnerInputs]:
        micro_batches = self._cut(list(mini_batch.micro_batches))
        if self._policy.has_vision and self._policy.sharding.num_ranks > 1:
            micro_batches = self._with_images(micro_batches)
        return [prepare(self._policy, micro) for micro in micro_batches]

    def _with_images(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Add a blank image to each micro batch without images if another rank's has some.

        Every rank must run the same modules. Raises ``ModelError`` if that is not possible in this layout.
        """
        have = torch.tensor([bool(micro.images) for micro in micro_batches], dtype=torch.int64)
        needed = self._policy.sharding.reduce(have, Reduce.MAX).tolist()
        lacking = [
            bool(need and not micro.images and micro.loss_mask.any())
            for need, micro in zip(needed, micro_batches, strict=True)
        ]
        if self._policy.scorer.layout is AttentionLayout.ALONE and int(
            self._policy.sharding.reduce(torch.tensor(int(any(lacking))), Reduce.MAX)
        ):
            raise ModelError(
                "this model can't be trained on several ranks on rows of which only some have images: leave out the "
                "others, or set learner.num_ranks=1"
            )
        return [
            with_blank(micro, self._policy.vision.processor.blank) if need and not micro.images else micro
            for need, micro in zip(needed, micro_batches, strict=True)
        ]

    def _cut(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Split the micro batches if sequences are padded or run alone, into equally many parts on all ranks.

        In layout ``APART``, each part keeps to the token budget, padding included; in ``ALONE``, it is one sequence.
        """
        layout = self._policy.scorer.layout
        if layout not in (AttentionLayout.APART, AttentionLayout.ALONE) or not micro_batches:
            return micro_batches
        with_reference = micro_batches[0].ref_logprobs is not None
        max_tokens = self._config.max_tokens_per_microbatch if layout is AttentionLayout.APART else 1
        parts = [part for micro in micro_batches for part in split_padded(micro, max_tokens)]
        most = int(self._policy.sharding.reduce(torch.tensor(len(parts)), Reduce.MAX))
        return parts + [empty_micro_batch(with_reference=with_reference)] * (most - len(parts))


class Supervised(PackedRows):
    """The negative log-likelihood of rows."""

    def remember(self, inputs: LearnerInputs) -> None:
        """Do nothing; the likelihood is that of the current weights."""

    def loss(self, mini_batch: MiniBatch, inputs: LearnerInputs) -> LossOutput:
        logprobs, _ = self._policy.scorer.logprobs(inputs.row, 1.0, self._config.logprob_chunk_tokens)
        return sft_loss(inputs.loss_inputs(logprobs, None, mini_batch, max_completion_tokens=1))


class PolicyGradient(PackedRows):
    """The surrogate loss of rollouts, with a KL penalty to ``reference`` if there is one."""

    def __init__(
        self,
        policy: Policy,
        learner: LearnerConfig,
        algorithm: AlgorithmConfig,
        reference: Reference | None,
        *,
        temperature: float,
        max_completion_tokens: int,
    ) -> None:
        super().__init__(policy, learner)
        self._algorithm, self._reference = algorithm, reference
        self._temperature, self._max_completion_tokens = temperature, max_completion_tokens
        self._truths = Supervised(policy, learner)

    def prepare(self, mini_batch: MiniBatch) -> list[LearnerInputs]:
        truths = [] if mini_batch.truth is None else self._truths.prepare(mini_batch.truth)
        return super().prepare(mini_batch) + [replace(inputs, is_truth=True) for inputs in truths]

    def remember(self, inputs: LearnerInputs) -> None:
        if inputs.is_truth:
            return
        with self._policy.inference():
            inputs.old_logprobs, _ = self._policy.scorer.logprobs(
                inputs.row, self._temperature, self._config.logprob_chunk_tokens
            )

    def loss(self, mini_batch: MiniBatch, inputs: LearnerInputs) -> LossOutput:
        if inputs.is_truth:
            return self._truth_loss(mini_batch, inputs)
        chunk_tokens = self._config.logprob_chunk_tokens
        if self._reference is not None and inputs.ref_logprobs is None:
            inputs.ref_logprobs = self._reference.logprobs(
                inputs.row, temperature=self._temperature, chunk_tokens=chunk_tokens
            )
        logprobs, entropy = self._policy.scorer.logprobs(
            inputs.row,
            self._temperature,
            chunk_tokens,
            with_entropy=True,
            entropy_gradient=bool(self._algorithm.loss.entropy_coef),
        )
        loss_inputs = inputs.loss_inputs(logprobs, entropy, mini_batch, self._max_completion_tokens)
        output = policy_loss(loss_inputs, self._algorithm.loss, self._algorithm.correction)
        if not self._algorithm.ebft.reward:
            return output
        output.metrics.add_total("ebft/rl_loss", output.loss)
        output.loss = self._algorithm.ebft.rl_coef * output.loss
        output.metrics.add_total("loss", output.loss)
        return output

    def _truth_loss(self, mini_batch: MiniBatch, inputs: LearnerInputs) -> LossOutput:
        """Return the loss of ground truths, with metrics that enter no mean over the rollouts' tokens."""
        assert mini_batch.truth is not None
        loss = self._truths.loss(mini_batch.truth, inputs).loss
        weighted = self._algorithm.ebft.ce_coef * loss
        metrics = MetricSums(num_tokens=torch.zeros_like(inputs.row.targets).sum())
        metrics.add_total("ebft/ce_loss", loss)
        metrics.add_total("loss", weighted)
        return LossOutput(loss=weighted, metrics=metrics)

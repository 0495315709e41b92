"""Losses of RL and supervised fine-tuning over micro batches, with the reference policy's log-probs.

Shapes: N tokens of the micro batch, M tokens of its row, K loss tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from peft import PeftModel
from torch import Tensor, nn

from rlpipe.algorithms.losses import EntropyBonus, LossInputs, LossOutput, policy_loss, sft_loss
from rlpipe.algorithms.metrics import MetricSums
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.data.packing import empty_micro_batch, split_padded, with_blank
from rlpipe.errors import ConfigError, ModelError
from rlpipe.learner.policy import Policy, load_copy
from rlpipe.learner.row_plan import AttentionLayout, Row
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.learner.workload import needs_reference
from rlpipe.types import IntArray, MicroBatch, MiniBatch

RUN, SHARED = "tokens/run", "tokens/shared"
"""Metrics: tokens that passes run, and tokens of sequences that they do not, because other sequences share them."""


@dataclass(kw_only=True, slots=True)
class LearnerInputs:
    """A micro batch on the device; ``old_logprobs`` and ``ref_logprobs`` are filled in where they are needed."""

    row: Row
    group_ids: IntArray  # of its sequences, on the host
    num_sequences: int
    """Sequences with loss tokens."""
    sequence_ids: Tensor  # [K], numbered from 0 without gaps
    indices: NDArray[np.int64]  # [K], among all loss tokens of the step, on the host
    advantages: Tensor  # [K]
    sampling_logprobs: Tensor  # [K]
    old_logprobs: Tensor | None = None  # [K]
    ref_logprobs: Tensor | None = None  # [K]
    shares: Tensor | None = None  # [K]
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
            shares=self.shares,
        )


def prepare(policy: Policy, micro_batch: MicroBatch) -> LearnerInputs:
    loss_tokens = np.flatnonzero(micro_batch.loss_mask)
    sequences = np.searchsorted(micro_batch.sequence_starts, loss_tokens, side="right")
    unique_sequences, sequence_ids = np.unique(sequences, return_inverse=True)

    def pick(values: NDArray[np.float32]) -> Tensor:
        return torch.from_numpy(values[loss_tokens]).to(policy.device, non_blocking=True)

    return LearnerInputs(
        row=policy.plan(micro_batch),
        group_ids=micro_batch.group_ids,
        num_sequences=len(unique_sequences),
        sequence_ids=torch.from_numpy(sequence_ids).to(policy.device),
        indices=_loss_token_indices(micro_batch, sequences - 1),
        advantages=pick(micro_batch.advantages),
        sampling_logprobs=pick(micro_batch.logprobs),
        ref_logprobs=None if micro_batch.ref_logprobs is None else pick(micro_batch.ref_logprobs),
        shares=None if micro_batch.shares is None else pick(micro_batch.shares),
    )


def _loss_token_indices(micro_batch: MicroBatch, sequences: NDArray[np.integer]) -> NDArray[np.int64]:
    """Return the indices of the loss tokens among all of the step, given the sequence of each ``[K]``."""
    num_earlier = np.searchsorted(sequences, sequences)  # loss tokens of earlier sequences of the micro batch
    return micro_batch.first_indices[sequences] + np.arange(len(sequences)) - num_earlier


class Reference(Protocol):
    """The reference policy that the policy is compared with."""

    def logprobs(self, row: Row, *, temperature: float, chunk_tokens: int) -> Tensor:
        """Return the log-probs ``[K]`` of the row's targets, without gradient."""

    def depths(self, row: Row, indices: Sequence[int]) -> list[Tensor]:
        """Return the hidden states of all tokens at some depths, each ``[M, H]``, no gradient; 0 is the embedding."""

    def end_step(self, num_steps_done: int) -> None:
        """Update the reference if it is due; called after every step."""

    def moving(self) -> dict[str, nn.Parameter]:
        """Return the parameters that training changes, by name; a checkpoint must hold them."""


class BaseModelReference:
    """The policy's model with its LoRA adapter disabled, which takes no extra memory."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def logprobs(self, row: Row, *, temperature: float, chunk_tokens: int) -> Tensor:
        with self._policy.adapter_off(), self._policy.inference():
            return self._policy.module.logprobs(row, temperature, chunk_tokens)[0]

    def depths(self, row: Row, indices: Sequence[int]) -> list[Tensor]:
        with self._policy.adapter_off(), self._policy.inference():
            return self._policy.module.depths(row, indices)

    def end_step(self, num_steps_done: int) -> None:
        pass

    def moving(self) -> dict[str, nn.Parameter]:
        return {}


class FrozenCopy:
    """A copy of the whole model, fixed or updated by an exponential average (as TRL's sync_ref_model).

    Every ``sync_steps`` steps, reference = mixup · policy + (1 - mixup) · reference. The copy is loaded from
    ``model.path`` and sharded over the ranks as the policy is. A fixed copy has the dtype of ``model.dtype``, one that
    moves float32, as the trained weights. Without a KL penalty it ends at the deepest hidden states that are read.
    """

    def __init__(self, policy: Policy, algorithm: AlgorithmConfig) -> None:
        self._policy = policy
        self._config = algorithm.reference
        self.module = load_copy(policy.config, algorithm, "cpu" if policy.sharding.loads_on_cpu else policy.device)
        policy.sharding.shard(self.module, trained=False)

    @torch.no_grad()
    def logprobs(self, row: Row, *, temperature: float, chunk_tokens: int) -> Tensor:
        logprobs = self.module.logprobs(row, temperature, chunk_tokens)[0]
        self._policy.sharding.end_inference(self.module)
        return logprobs

    @torch.no_grad()
    def depths(self, row: Row, indices: Sequence[int]) -> list[Tensor]:
        states = self.module.depths(row, indices)
        self._policy.sharding.end_inference(self.module)
        return states

    @torch.no_grad()
    def end_step(self, num_steps_done: int) -> None:
        if not self._config.sync_steps or num_steps_done % self._config.sync_steps:
            return
        parameters = dict(self.module.model.named_parameters())
        for name, parameter in self._policy.model.named_parameters():
            if name in parameters:
                self._policy.sharding.move(parameters[name], parameter, self._config.mixup)

    def moving(self) -> dict[str, nn.Parameter]:
        """Return nothing if the copy is fixed, because ``model.path`` holds it then."""
        return dict(self.module.model.named_parameters()) if self._config.sync_steps else {}


def make_reference(policy: Policy, algorithm: AlgorithmConfig) -> Reference | None:
    """Make the reference that the config needs, or None; raise ``ConfigError`` if ``sync_steps`` is set with LoRA."""
    if not needs_reference(algorithm):
        return None
    if not isinstance(policy.model, PeftModel):
        copy = FrozenCopy(policy, algorithm)
        if algorithm.kind == "ebft_strided":
            copy.module.take_masks(policy.config.attention, policy.device)
        return copy
    if algorithm.reference.sync_steps:
        raise ConfigError(
            "algorithm.reference.sync_steps updates the frozen copy in full training; "
            "with a LoRA adapter the reference is the base model: set it to 0"
        )
    return BaseModelReference(policy)


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

    def store_old_logprobs(self, inputs: Prepared) -> None:
        """Store what the loss needs of the current weights, because these change before it is computed."""

    def loss(self, mini_batch: MiniBatch, inputs: Prepared) -> LossOutput:
        """Return what these inputs add to the update's loss."""


class PackedRows:
    """The base class of objectives that run the sequences of rollouts or rows unchanged."""

    sequences_together = 1
    """Consecutive sequences of a micro batch whose log-probs the loss needs at once."""

    def __init__(self, policy: Policy, learner: LearnerConfig) -> None:
        self._policy, self._config = policy, learner

    def begin(self, step: int) -> None:
        """Do nothing; these objectives do not depend on the step."""

    def store_old_logprobs(self, inputs: LearnerInputs) -> None:
        """Do nothing; these losses are those of the current weights alone."""

    def prepare(self, mini_batch: MiniBatch) -> list[LearnerInputs]:
        return [prepare(self._policy, micro) for micro in self.micro_batches(mini_batch)]

    def micro_batches(self, mini_batch: MiniBatch) -> list[MicroBatch]:
        """Return the micro batches as they are run, equally many on all ranks."""
        micro_batches = self._split(list(mini_batch.micro_batches))
        if self._policy.has_vision and self._policy.sharding.num_ranks > 1:
            micro_batches = self._with_images(micro_batches)
        return micro_batches

    def with_token_counts(self, output: LossOutput, inputs: LearnerInputs) -> LossOutput:
        """Add the tokens that the pass ran, and those that it did not because sequences share them, to the metrics."""
        for name, count in ((RUN, len(inputs.row.token_ids)), (SHARED, inputs.row.num_shared)):
            output.metrics.add_total(name, output.loss.new_tensor(count, dtype=torch.float64))
        return output

    def _with_images(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Add a blank image to each micro batch without images if another rank's has some.

        Every rank must run the same modules. Raises ``ModelError`` if that is not possible in this layout.
        """
        has_images = torch.tensor([bool(micro.images) for micro in micro_batches], dtype=torch.int64)
        needed = self._policy.sharding.reduce(has_images, Reduce.MAX).tolist()
        lacking = [
            bool(is_needed and not micro.images and micro.loss_mask.any())
            for is_needed, micro in zip(needed, micro_batches, strict=True)
        ]
        if self._policy.module.layout is AttentionLayout.ALONE and int(
            self._policy.sharding.reduce(torch.tensor(int(any(lacking))), Reduce.MAX)
        ):
            raise ModelError(
                "this model can't be trained on several ranks if only some rows have images: leave out the rows "
                "without images, or set learner.num_ranks=1"
            )
        return [
            with_blank(micro, self._policy.image_processor.blank) if is_needed and not micro.images else micro
            for is_needed, micro in zip(needed, micro_batches, strict=True)
        ]

    def _split(self, micro_batches: list[MicroBatch]) -> list[MicroBatch]:
        """Split the micro batches if sequences are padded or run alone, into equally many pieces on all ranks.

        In layout ``APART``, each piece keeps to the token budget, padding included; in ``ALONE``, it is one sequence.
        """
        layout = self._policy.module.layout
        if layout not in (AttentionLayout.APART, AttentionLayout.ALONE) or not micro_batches:
            return micro_batches
        with_reference = micro_batches[0].ref_logprobs is not None
        max_tokens = self._config.max_tokens_per_microbatch if layout is AttentionLayout.APART else 1
        pieces = [
            piece for micro in micro_batches for piece in split_padded(micro, max_tokens, self.sequences_together)
        ]
        max_pieces = int(self._policy.sharding.reduce(torch.tensor(len(pieces)), Reduce.MAX))
        return pieces + [empty_micro_batch(with_reference=with_reference)] * (max_pieces - len(pieces))


class SupervisedObjective(PackedRows):
    """The negative log-likelihood of rows."""

    def loss(self, mini_batch: MiniBatch, inputs: LearnerInputs) -> LossOutput:
        logprobs, _ = self._policy.module.logprobs(inputs.row, 1.0, self._config.logprob_chunk_tokens)
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
        bonus: EntropyBonus,
        temperature: float,
        max_completion_tokens: int,
    ) -> None:
        super().__init__(policy, learner)
        self._algorithm, self._reference, self._bonus = algorithm, reference, bonus
        self._temperature, self._max_completion_tokens = temperature, max_completion_tokens
        self._truths = SupervisedObjective(policy, learner)
        self.differences: list[tuple[NDArray[np.int64], Tensor]] = []
        """Indices of the step's loss tokens, and their log-probs before the step minus the engine's ``[K]``."""

    def begin(self, step: int) -> None:
        self.differences.clear()

    def prepare(self, mini_batch: MiniBatch) -> list[LearnerInputs]:
        truths = [] if mini_batch.truth is None else self._truths.prepare(mini_batch.truth)
        return super().prepare(mini_batch) + [replace(inputs, is_truth=True) for inputs in truths]

    def store_old_logprobs(self, inputs: LearnerInputs) -> None:
        if inputs.is_truth or inputs.old_logprobs is not None:
            return
        with self._policy.inference():
            inputs.old_logprobs, _ = self._policy.module.logprobs(
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
        logprobs, entropy = self._policy.module.logprobs(
            inputs.row,
            self._temperature,
            chunk_tokens,
            with_entropy=True,
            entropy_gradient=self._algorithm.loss.trains_entropy,
        )
        loss_inputs = inputs.loss_inputs(logprobs, entropy, mini_batch, self._max_completion_tokens)
        loss_inputs.entropy_weight = self._bonus.weight
        old_logprobs = logprobs.detach() if inputs.old_logprobs is None else inputs.old_logprobs
        self.differences.append((inputs.indices, old_logprobs - inputs.sampling_logprobs))
        output = policy_loss(loss_inputs, self._algorithm.loss, self._algorithm.correction)
        self.with_token_counts(output, inputs)
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

"""Losses of reward models over micro batches, whose loss tokens mark where values are read: one token before each.

Shapes: K loss tokens of a micro batch, P pairs of it.
"""

from __future__ import annotations

from rlpipe.algorithms.losses import LossOutput
from rlpipe.algorithms.reward_losses import RewardPairInputs, StepInputs, bradley_terry_loss, step_loss
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.reward_model_config import RewardModelConfig
from rlpipe.learner.objectives import LearnerInputs, PackedRows
from rlpipe.learner.policy import Policy
from rlpipe.types import MiniBatch


class RewardPairs(PackedRows):
    """The loss of the rewards of a chosen and a rejected completion, which share their prompt's tokens in a row."""

    sequences_together = 2

    def __init__(self, policy: Policy, learner: LearnerConfig, config: RewardModelConfig) -> None:
        super().__init__(policy, learner)
        self._options = config

    def remember(self, inputs: LearnerInputs) -> None:
        """Do nothing; the loss is that of the current weights."""

    def loss(self, mini_batch: MiniBatch, inputs: LearnerInputs) -> LossOutput:
        rewards = self._policy.scorer.head_outputs(inputs.row)[:, 0]  # [K], one for each sequence
        pairs = RewardPairInputs(
            rewards=rewards.view(-1, 2), margins=inputs.advantages[::2], num_pairs=mini_batch.num_sequences
        )
        return self.with_token_counts(bradley_terry_loss(pairs, self._options), inputs)


class LabelledSteps(PackedRows):
    """The loss of the labels of steps, one for each loss token."""

    def remember(self, inputs: LearnerInputs) -> None:
        """Do nothing; the loss is that of the current weights."""

    def loss(self, mini_batch: MiniBatch, inputs: LearnerInputs) -> LossOutput:
        steps = StepInputs(
            logits=self._policy.scorer.head_outputs(inputs.row),
            labels=inputs.advantages.long(),
            num_steps=mini_batch.num_loss_tokens,
        )
        return self.with_token_counts(step_loss(steps), inputs)

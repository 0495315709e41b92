"""The EBFT objective on raw text: blocks are sampled, rewarded by their features, and give a policy-gradient loss.

Shapes: C columns of a row (B blocks times n samples), g tokens of a block, D features.
Source: Jelassi et al. 2026, "Energy-Based Fine-Tuning", arXiv:2603.12248.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from rlpipe.algorithms.advantages import compute_advantages
from rlpipe.algorithms.features import (
    FeatureScores,
    feature_rewards,
    join_layers,
    layer_indices,
    pool,
    score_features,
)
from rlpipe.algorithms.losses import LossInputs, LossOutput, policy_loss
from rlpipe.algorithms.metrics import MetricSums
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.ebft_config import FeatureConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.learner.policy import Policy
from rlpipe.learner.reference import Reference
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.learner.strided_pass import StridedInputs, StridedLogprobs, draw_blocks, plan_strided, score_blocks
from rlpipe.types import MiniBatch


class Strided:
    """The objective of strided EBFT, which samples from the current weights, so that every update is on-policy.

    ``reference`` is the feature network. Samples depend on ``seed``, the step and the row alone, not on the split into
    ranks and micro batches.
    """

    def __init__(
        self,
        policy: Policy,
        learner: LearnerConfig,
        algorithm: AlgorithmConfig,
        reference: Reference,
        *,
        seed: int,
    ) -> None:
        self._policy, self._reference = policy, reference
        self._algorithm, self._temperature = algorithm, algorithm.ebft.strided.temperature
        self._chunk_tokens = learner.logprob_chunk_tokens
        self._seed, self._step = seed, 0
        policy.scorer.take_masks(policy.config.attention)
        self._layers = layer_indices(algorithm.ebft.features.layers, policy.scorer.num_layers)

    def begin(self, step: int) -> None:
        self._step = step

    def prepare(self, mini_batch: MiniBatch) -> list[StridedInputs]:
        num_samples, device = self._algorithm.group_size, self._policy.device
        planned = [
            plan_strided(micro_batch, self._algorithm.ebft.strided, num_samples=num_samples, device=device)
            for micro_batch in mini_batch.micro_batches
        ]
        own = torch.tensor(sum(inputs.plan.num_columns for inputs in planned))
        num_columns = int(self._policy.sharding.reduce(own, Reduce.SUM))
        return [replace(inputs, num_columns_of_update=num_columns) for inputs in planned]

    def remember(self, inputs: StridedInputs) -> None:
        """Do nothing; blocks are sampled from the current weights."""

    def loss(self, mini_batch: MiniBatch, inputs: StridedInputs) -> LossOutput:
        ebft, plan = self._algorithm.ebft, inputs.plan
        drawn = self.draw(inputs)
        scores = self._score(inputs, drawn)
        advantages = self._advantages(scores, drawn.device)  # [C]
        logprobs = score_blocks(
            self._policy.scorer,
            inputs,
            drawn,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            entropy_gradient=bool(self._algorithm.loss.entropy_coef),
        )
        surrogate = policy_loss(self._loss_inputs(inputs, drawn, advantages, logprobs), self._algorithm.loss)
        inputs.mask.forget()
        truth_loss = -logprobs.truth.sum() / max(mini_batch.num_loss_tokens, 1)
        if not ebft.ce_coef:
            truth_loss = truth_loss.detach()  # it is only reported, and needs no backward pass
        loss = ebft.rl_coef * surrogate.loss + ebft.ce_coef * truth_loss
        metrics = surrogate.metrics
        metrics.add_total("loss", loss)
        metrics.add_total("ebft/rl_loss", surrogate.loss)
        metrics.add_total("ebft/ce_loss", truth_loss)
        _add_metrics(metrics, scores, advantages, plan.num_steps, ebft.features)
        metrics.add_total("ebft/num_blocks", torch.tensor(float(scores.cfm.numel()), device=drawn.device))
        metrics.add_total("ebft/documents_skipped", torch.tensor(float(plan.num_skipped), device=drawn.device))
        return LossOutput(loss=loss, metrics=metrics)

    def draw(self, inputs: StridedInputs) -> Tensor:
        """Sample the tokens of all blocks ``[g, C]``."""
        with self._policy.inference():
            return draw_blocks(
                self._policy.scorer,
                inputs,
                self._uniforms(inputs),
                temperature=self._temperature,
                chunk_tokens=self._chunk_tokens,
            )

    def _uniforms(self, inputs: StridedInputs) -> Tensor:
        """Return the uniform random numbers ``[g, C]`` that determine the tokens of all columns."""
        plan = inputs.plan
        by_document = [
            np.random.default_rng([self._seed, self._step, row]).random((count, plan.num_steps))
            for row, count in zip(inputs.group_ids, plan.columns_by_document(), strict=True)
            if count
        ]
        points = np.concatenate([*by_document, np.zeros((0, plan.num_steps))])  # [C, g]
        return torch.from_numpy(points.T.copy()).to(inputs.documents.device)

    def _score(self, inputs: StridedInputs, drawn: Tensor) -> FeatureScores:
        """Score each block's samples against the document's own tokens in their place."""
        config, num_samples = self._algorithm.ebft.features, self._algorithm.group_size
        depths = self._reference.depths(inputs.row(drawn), self._layers)
        places = inputs.plan.truth_places()[:, ::num_samples]  # [g, B], the same for all samples
        truth = self._pool(depths, torch.from_numpy(places).to(drawn.device))  # [B, D]
        start = inputs.plan.num_document_tokens
        own = torch.arange(start, inputs.plan.num_tokens, device=drawn.device).view_as(drawn)
        samples = self._pool(depths, own).unflatten(0, (-1, num_samples))  # [B, n, D]
        return score_features(samples, truth, config.whitening)

    def _pool(self, depths: list[Tensor], places: Tensor) -> Tensor:
        """Return the features ``[S, D]`` of token sequences whose places in the row are ``[g, S]``."""
        config = self._algorithm.ebft.features
        states = [depth[places.T].float() for depth in depths]
        tokens = join_layers(states, normalize=config.normalize_layers)  # [S, g, D]
        every = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        return pool(tokens, every, every, config.pooling)

    def _advantages(self, scores: FeatureScores, device: torch.device) -> Tensor:
        """Return the advantage of each column ``[C]``."""
        config = self._algorithm.ebft.features
        rewards = feature_rewards(scores, config).cpu().numpy()
        pairwise = (-2 * config.diversity_coef * scores.diversity).cpu().numpy()
        advantages = compute_advantages(list(rewards), self._algorithm.advantage, list(pairwise))
        return torch.from_numpy(np.concatenate([*advantages, np.zeros(0, np.float32)])).to(device)

    def _loss_inputs(
        self, inputs: StridedInputs, drawn: Tensor, advantages: Tensor, logprobs: StridedLogprobs
    ) -> LossInputs:
        columns = torch.arange(inputs.plan.num_columns, device=drawn.device)
        num_steps = inputs.plan.num_steps
        return LossInputs(
            logprobs=logprobs.drawn,
            loss_mask=torch.ones_like(logprobs.drawn, dtype=torch.bool),
            sequence_ids=columns.repeat(num_steps),
            num_loss_tokens=num_steps * inputs.num_columns_of_update,
            num_sequences=inputs.num_columns_of_update,
            max_completion_tokens=num_steps,
            advantages=advantages.repeat(num_steps),  # a column's tokens are C apart
            ref_logprobs=self._ask_reference(inputs, drawn),
            entropy=logprobs.entropy,
        )

    def _ask_reference(self, inputs: StridedInputs, drawn: Tensor) -> Tensor | None:
        if not self._algorithm.loss.beta:
            return None
        return self._reference.logprobs(
            inputs.row(drawn), temperature=self._temperature, chunk_tokens=self._chunk_tokens
        )


def _add_metrics(
    metrics: MetricSums, scores: FeatureScores, advantages: Tensor, num_steps: int, config: FeatureConfig
) -> None:
    """Add means over blocks and samples, which all have the same number of tokens."""
    by_block = advantages.view_as(scores.alignment)  # [B, n]
    values = {
        "ebft/alignment": scores.alignment,
        "ebft/diversity": scores.diversity,
        "ebft/cfm_loss": scores.cfm[:, None].expand_as(by_block),
        "ebft/reward": feature_rewards(scores, config),
        "ebft/advantages_std": by_block.std(1, correction=0, keepdim=True).expand_as(by_block),
    }
    for name, value in values.items():
        metrics.add_mean(name, num_steps * value)
    metrics.add_total("ebft/num_unwhitened", advantages.new_tensor(float(scores.num_unwhitened)))

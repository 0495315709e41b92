"""EBFT's objective on strided blocks of a text: the forward pass, rewards and loss.

Shapes: L document tokens of a row, K of them with a loss, C columns (B blocks times n samples), g tokens of a block,
M = L + g C tokens of the row, D features.
Source: Jelassi et al. 2026, "Energy-Based Fine-Tuning", arXiv:2603.12248.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache

from rlpipe.algorithms.advantages import compute_advantages
from rlpipe.algorithms.features import FeatureScores, feature_rewards, join_layers, layer_indices, pool, score_features
from rlpipe.algorithms.losses import LossInputs, LossOutput, policy_loss
from rlpipe.algorithms.metrics import MetricSums
from rlpipe.algorithms.strided import StridedRow, plan_strided_row
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, FeatureConfig, StridedConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.kernels.strided_mask import StridedMask
from rlpipe.learner.forward import LogprobModel
from rlpipe.learner.objectives import Reference
from rlpipe.learner.policy import Policy
from rlpipe.learner.row_plan import AttentionLayout, Row, mask_for, to_device
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.types import NO_GROUP, IntArray, MicroBatch, MiniBatch


@dataclass(kw_only=True, slots=True, frozen=True)
class StridedInputs:
    """A strided row on the device, before its blocks are sampled."""

    plan: StridedRow
    documents: Tensor  # [L] token ids
    position_ids: Tensor  # [M]
    mask: StridedMask
    predecessors: Tensor  # [g, C], into the row
    truth: Tensor  # [K], indices of the document tokens whose likelihood counts
    group_ids: IntArray  # of the documents, on the host
    checksums: Sequence[int]  # of the documents' tokens, which chunks of one row differ by
    num_columns_of_update: int = 0
    """Columns of the update, on all ranks."""

    @property
    def is_empty(self) -> bool:
        return not self.plan.num_columns and not len(self.truth)

    def row(self, sampled: Tensor) -> Row:
        """Return the row with the sampled tokens ``[g, C]``, which are its targets, step by step."""
        token_ids = torch.cat([self.documents, sampled.flatten()])
        indices = torch.arange(len(self.documents), len(token_ids), device=token_ids.device)
        return Row(
            token_ids=token_ids,
            position_ids=self.position_ids,
            predictors=self.predecessors.flatten(),
            loss_tokens=indices,
            targets=token_ids[indices],
            mask=self.mask,
        )


def plan_strided(
    micro_batch: MicroBatch, config: StridedConfig, *, num_samples: int, device: torch.device
) -> StridedInputs:
    """Plan a strided row with the micro batch's sequences as documents.

    The tokens before a document's first loss token are its prompt, if there is more than one.
    """
    starts = micro_batch.sequence_starts
    masks = [micro_batch.loss_mask[start:end] for start, end in pairwise(starts)]
    firsts = [int(mask.argmax()) if mask.any() else 0 for mask in masks]
    # The first token of a text can't be predicted, and is no prompt. What only fills a micro batch has no block.
    prompts = [
        len(mask) if group_id == NO_GROUP else first if first > 1 else 0
        for mask, first, group_id in zip(masks, firsts, micro_batch.group_ids, strict=True)
    ]
    plan = plan_strided_row(np.diff(starts).tolist(), config, num_samples=num_samples, prompt_lengths=prompts)

    mask = make_mask(plan, device)
    return StridedInputs(
        plan=plan,
        documents=to_device(micro_batch.token_ids, device),
        position_ids=mask.positions,
        mask=mask,
        predecessors=to_device(plan.predecessors(), device),
        truth=to_device(np.flatnonzero(micro_batch.loss_mask), device),
        group_ids=micro_batch.group_ids,
        checksums=[crc32(micro_batch.token_ids[start:end].tobytes()) for start, end in pairwise(starts)],
    )


def make_mask(plan: StridedRow, device: torch.device) -> StridedMask:
    """Make the attention mask of a strided row."""
    return StridedMask(
        documents=to_device(plan.documents(), device),
        columns=to_device(plan.columns(), device),
        positions=to_device(plan.position_ids(), device),
        visible=to_device(plan.visible(), device),
        num_document_tokens=plan.num_document_tokens,
        num_columns=plan.num_columns,
    )


class StridedLogprobs(NamedTuple):
    """Log-probs of one pass, in a tuple, where FSDP finds the tensors that the backward pass starts from."""

    sampled: Tensor  # [g C], at the temperature that they were sampled with
    entropy: Tensor  # [g C], in nats
    truth: Tensor  # [K], of the documents' own tokens, at temperature 1


def score_blocks(
    module: LogprobModel,
    inputs: StridedInputs,
    sampled: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> StridedLogprobs:
    """Compute the log-probs of the sampled tokens ``[g, C]`` and of the documents' tokens in one pass."""

    def work() -> StridedLogprobs:
        row = inputs.row(sampled)
        hidden = module.hidden_states(row)
        logprobs, entropy = module.score_hidden(
            hidden.index_select(0, row.predictors), row.targets, temperature, chunk_tokens, True, entropy_gradient
        )
        assert entropy is not None
        truth_hidden = hidden.index_select(0, inputs.truth - 1)
        truth, _ = module.score_hidden(truth_hidden, inputs.documents[inputs.truth], 1.0, chunk_tokens)
        return StridedLogprobs(sampled=logprobs, entropy=entropy, truth=truth)

    result: StridedLogprobs = module(work)
    return result


def sample_blocks(
    module: LogprobModel, inputs: StridedInputs, uniforms: Tensor, *, config: StridedConfig, chunk_tokens: int
) -> Tensor:
    """Sample the tokens of all blocks ``[g, C]`` from the policy, one step of all columns at a time.

    ``uniforms`` ``[g, C]`` in [0, 1) determine them: each selects the token whose interval of the cumulative
    probability contains it. Logits are in memory for ``chunk_tokens`` columns at a time.
    """
    sampled: Tensor = module(partial(_sample_blocks, module, inputs, uniforms, config, chunk_tokens))
    return sampled


@torch.no_grad()
def _sample_blocks(
    module: LogprobModel, inputs: StridedInputs, uniforms: Tensor, config: StridedConfig, chunk_tokens: int
) -> Tensor:
    plan = inputs.plan

    def run(token_ids: Tensor, queries: slice, cache: DynamicCache) -> Tensor:
        return module.run_backbone(
            token_ids[None],
            position_ids=inputs.position_ids[None, queries],
            attention_mask=mask_for(module.causal_model, inputs.mask, queries),
            past_key_values=cache,
        )[0]

    def sample(hidden: Tensor, points: Tensor) -> Tensor:
        chunks = zip(hidden.split(chunk_tokens), points.split(chunk_tokens), strict=True)
        return torch.cat(
            [
                _invert(module.logits(chunk, config.temperature), chunk_points, config.top_p)
                for chunk, chunk_points in chunks
            ]
        )

    documents = slice(0, plan.num_document_tokens)
    cache = DynamicCache()
    hidden = run(inputs.documents, documents, cache)
    steps = [sample(hidden.index_select(0, inputs.predecessors[0]), uniforms[0])]
    for step in range(plan.num_steps - 1):
        if plan.num_columns:
            hidden = run(steps[-1], plan.step_slice(step), cache)
        else:  # as many passes as on ranks that have blocks
            run(inputs.documents, documents, DynamicCache())
        steps.append(sample(hidden[: plan.num_columns], uniforms[step + 1]))
    return torch.stack(steps)


def _invert(logits: Tensor, points: Tensor, top_p: float) -> Tensor:
    """Return the tokens ``[C]`` whose intervals of the cumulative probability contain the points ``[C]``.

    Tokens have an interval if those that are more probable have a probability of less than ``top_p`` together.
    """
    probabilities = logits.double().softmax(1)  # [C, V]
    if top_p < 1:
        highest, tokens = probabilities.sort(dim=1, descending=True, stable=True)
        is_excluded = highest.cumsum(1) - highest >= top_p
        probabilities = probabilities.scatter(1, tokens, highest.masked_fill(is_excluded, 0))
    ends = probabilities.cumsum(1)
    indices = torch.searchsorted(ends, (points.double() * ends[:, -1])[:, None], right=True)[:, 0]
    return indices.clamp(max=logits.shape[1] - 1)


class Strided:
    """The objective of strided EBFT, which samples from the current weights, so that every update is on-policy.

    ``reference`` is the feature network. Samples depend on ``seed``, the step, the row and its tokens alone, not on the
    split into ranks and micro batches.
    """

    def __init__(
        self, policy: Policy, learner: LearnerConfig, algorithm: AlgorithmConfig, reference: Reference, *, seed: int
    ) -> None:
        self._policy, self._reference = policy, reference
        self._algorithm, self._temperature = algorithm, algorithm.ebft.strided.temperature
        self._chunk_tokens = learner.logprob_chunk_tokens
        self._seed, self._step = seed, 0
        if policy.module.layout is not AttentionLayout.POSITIONS:  # a run's policy is loaded for masks
            policy.module.take_masks(policy.config.attention, policy.device)
        self._layers = layer_indices(algorithm.ebft.features.layers, policy.module.num_layers)

    def begin(self, step: int) -> None:
        self._step = step

    def prepare(self, mini_batch: MiniBatch) -> list[StridedInputs]:
        num_samples, device = self._algorithm.group_size, self._policy.device
        planned = [
            plan_strided(micro_batch, self._algorithm.ebft.strided, num_samples=num_samples, device=device)
            for micro_batch in mini_batch.micro_batches
        ]
        local_columns = torch.tensor(sum(inputs.plan.num_columns for inputs in planned))
        num_columns = int(self._policy.sharding.reduce(local_columns, Reduce.SUM))
        return [replace(inputs, num_columns_of_update=num_columns) for inputs in planned]

    def store_old_logprobs(self, inputs: StridedInputs) -> None:
        """Do nothing; blocks are sampled from the current weights."""

    def loss(self, mini_batch: MiniBatch, inputs: StridedInputs) -> LossOutput:
        ebft, plan = self._algorithm.ebft, inputs.plan
        sampled = self.sample(inputs)
        scores = self._score(inputs, sampled)
        advantages = self._advantages(scores, sampled.device)  # [C]
        logprobs = score_blocks(
            self._policy.module,
            inputs,
            sampled,
            temperature=self._temperature,
            chunk_tokens=self._chunk_tokens,
            entropy_gradient=bool(self._algorithm.loss.entropy_coef),
        )
        surrogate = policy_loss(self._loss_inputs(inputs, sampled, advantages, logprobs), self._algorithm.loss)
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
        metrics.add_total("ebft/num_blocks", torch.tensor(float(scores.cfm.numel()), device=sampled.device))
        num_skipped = plan.num_skipped - sum(group_id == NO_GROUP for group_id in inputs.group_ids)
        metrics.add_total("ebft/documents_skipped", torch.tensor(float(num_skipped), device=sampled.device))
        return LossOutput(loss=loss, metrics=metrics)

    def sample(self, inputs: StridedInputs) -> Tensor:
        """Sample the tokens of all blocks ``[g, C]``."""
        with self._policy.inference():
            return sample_blocks(
                self._policy.module,
                inputs,
                self._uniforms(inputs),
                config=self._algorithm.ebft.strided,
                chunk_tokens=self._chunk_tokens,
            )

    def _uniforms(self, inputs: StridedInputs) -> Tensor:
        """Return the uniform random numbers ``[g, C]`` that determine the tokens of all columns."""
        plan = inputs.plan
        by_document = [
            np.random.default_rng([self._seed, self._step, row, checksum]).random((count, plan.num_steps))
            for row, checksum, count in zip(inputs.group_ids, inputs.checksums, plan.columns_by_document(), strict=True)
            if count
        ]
        points = np.concatenate([*by_document, np.zeros((0, plan.num_steps))])  # [C, g]
        return torch.from_numpy(points.T.copy()).to(inputs.documents.device)

    def _score(self, inputs: StridedInputs, sampled: Tensor) -> FeatureScores:
        """Score each block's samples against the document's own tokens in their place."""
        config, num_samples = self._algorithm.ebft.features, self._algorithm.group_size
        depths = self._reference.depths(inputs.row(sampled), self._layers)
        indices = inputs.plan.truth_indices()[:, ::num_samples]  # [g, B], the same for all samples
        truth = self._pool(depths, torch.from_numpy(indices).to(sampled.device))  # [B, D]
        start = inputs.plan.num_document_tokens
        sample_indices = torch.arange(start, inputs.plan.num_tokens, device=sampled.device).view_as(sampled)
        samples = self._pool(depths, sample_indices).unflatten(0, (-1, num_samples))  # [B, n, D]
        return score_features(samples, truth, config.whitening, **config.parts)

    def _pool(self, depths: list[Tensor], indices: Tensor) -> Tensor:
        """Return the features ``[S, D]`` of token sequences whose indices in the row are ``[g, S]``."""
        config = self._algorithm.ebft.features
        states = [depth[indices.T].float() for depth in depths]
        tokens = join_layers(states, normalize=config.normalize_layers)  # [S, g, D]
        all_tokens = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        return pool(tokens, all_tokens, all_tokens, config.pooling)

    def _advantages(self, scores: FeatureScores, device: torch.device) -> Tensor:
        """Return the advantage of each column ``[C]``."""
        config = self._algorithm.ebft.features
        rewards = feature_rewards(scores, config).cpu().numpy()
        pairwise = (-2 * config.diversity_coef * scores.diversity).cpu().numpy()
        advantages = compute_advantages(list(rewards), self._algorithm.advantage, list(pairwise))
        return torch.from_numpy(np.concatenate([*advantages, np.zeros(0, np.float32)])).to(device)

    def _loss_inputs(
        self, inputs: StridedInputs, sampled: Tensor, advantages: Tensor, logprobs: StridedLogprobs
    ) -> LossInputs:
        columns = torch.arange(inputs.plan.num_columns, device=sampled.device)
        num_steps = inputs.plan.num_steps
        return LossInputs(
            logprobs=logprobs.sampled,
            loss_mask=torch.ones_like(logprobs.sampled, dtype=torch.bool),
            sequence_ids=columns.repeat(num_steps),
            num_loss_tokens=num_steps * inputs.num_columns_of_update,
            num_sequences=inputs.num_columns_of_update,
            max_completion_tokens=num_steps,
            advantages=advantages.repeat(num_steps),  # a column's tokens are C apart
            ref_logprobs=self._reference_logprobs(inputs, sampled),
            entropy=logprobs.entropy,
        )

    def _reference_logprobs(self, inputs: StridedInputs, sampled: Tensor) -> Tensor | None:
        if not self._algorithm.loss.beta:
            return None
        return self._reference.logprobs(
            inputs.row(sampled), temperature=self._temperature, chunk_tokens=self._chunk_tokens
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

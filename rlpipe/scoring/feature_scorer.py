"""EBFT's features: the frozen network, and the scorer that rewards completions by them.

Shapes: S sequences, T tokens in the longest, D features.
Source: Jelassi et al. 2026, "Energy-Based Fine-Tuning", arXiv:2603.12248.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlpipe.algorithms.features import FeatureScores, feature_rewards, join_layers, layer_indices, pool, score_features
from rlpipe.configs.schema.algorithm_config import FeatureConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.packing import padded_parts
from rlpipe.learner.forward import drop_unread
from rlpipe.learner.objectives import Reference
from rlpipe.learner.policy import Policy, load_logprob_model
from rlpipe.learner.row_plan import AttentionLayout, AttentionPlan, Row
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.models.nf4 import resolve_nf4
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import ALIGNMENT, DIVERSITY, BoolArray, IntArray, Rollout, RolloutGroup

Depths = Callable[[Row, Sequence[int]], list[Tensor]]
"""Function that returns the hidden states of a row's tokens at the given depths, each ``[M, H]``."""


@dataclass(kw_only=True, slots=True, frozen=True)
class FeatureSequence:
    """Sequence that is turned into one feature vector."""

    token_ids: IntArray  # [T]
    completion_mask: BoolArray  # [T]

    @staticmethod
    def of(rollout: Rollout) -> FeatureSequence:
        return FeatureSequence(token_ids=rollout.token_ids, completion_mask=rollout.loss_mask)


FILLER = FeatureSequence(token_ids=np.zeros(1, np.int32), completion_mask=np.zeros(1, np.bool_))
"""Dummy sequence that a rank reads while other ranks still have sequences."""


def open_feature_network(
    model: ModelConfig, config: FeatureConfig, device: torch.device, *, max_tokens: int
) -> FeatureReader:
    """Load a frozen copy of the initial policy, up to the deepest hidden states that are read and without lm_head."""
    module = load_logprob_model(model, device, frozen=True).requires_grad_(False).eval()
    if model.adapter.kind == "qlora":
        resolve_nf4(module, device)
    reader = FeatureReader(
        module.depths, config, num_layers=module.num_layers, layout=module.layout, device=device, max_tokens=max_tokens
    )
    drop_unread(module, max(layer_indices(config.layers, module.num_layers)))
    return reader


class FeatureReader:
    """Reader of sequences' features, in micro batches of at most ``max_tokens`` tokens, padding included.

    If ranks share the model, ``most`` returns the largest number of micro batches of any rank; all ranks run as many.
    """

    def __init__(
        self,
        depths: Depths,
        config: FeatureConfig,
        *,
        num_layers: int,
        layout: AttentionLayout,
        device: torch.device,
        max_tokens: int,
        most: Callable[[int], int] = lambda count: count,
    ) -> None:
        self._depths, self._config, self._most = depths, config, most
        self._indices = layer_indices(config.layers, num_layers)
        self._layout, self._device, self._max_tokens = layout, device, max_tokens

    @torch.no_grad()
    def read(self, sequences: Sequence[FeatureSequence]) -> Tensor:
        """Return the features ``[S, D]``, in float32 on the CPU, in the order of the sequences."""
        features: list[Tensor | None] = [None] * len(sequences)
        batches = padded_parts([len(sequence.token_ids) for sequence in sequences], self._max_tokens)
        for _ in range(self._most(len(batches)) - len(batches)):
            self._read([FILLER])
        for members in batches:
            for index, vector in zip(members, self._read([sequences[index] for index in members]), strict=True):
                features[index] = vector
        vectors = [vector for vector in features if vector is not None]
        return torch.stack(vectors) if vectors else torch.zeros(0, 0)

    def _read(self, sequences: Sequence[FeatureSequence]) -> Tensor:
        longest = max(len(sequence.token_ids) for sequence in sequences)
        token_ids = np.zeros((len(sequences), longest), np.int64)
        mask, completion = np.zeros((2, *token_ids.shape), np.bool_)
        for index, sequence in enumerate(sequences):
            length = len(sequence.token_ids)
            token_ids[index, :length] = sequence.token_ids
            mask[index, :length] = True
            completion[index, :length] = sequence.completion_mask
        depths = self._depths(self._row(token_ids), self._indices)
        states = [depth.float().unflatten(0, token_ids.shape) for depth in depths]
        features = join_layers(states, normalize=self._config.normalize_layers)  # [S, T, D]
        real, completed = (torch.from_numpy(array).to(self._device) for array in (mask, completion))
        return pool(features, real, completed, self._config.pooling).cpu()

    def _row(self, token_ids: np.ndarray) -> Row:
        """Return a row of the padded sequences, one after the other."""
        count, length = token_ids.shape
        indices = torch.arange(count * length, device=self._device)
        none = indices[:0]
        return Row(
            token_ids=torch.from_numpy(token_ids).flatten().to(self._device),
            position_ids=torch.arange(length, device=self._device).repeat(count),
            predictors=none,
            loss_tokens=none,
            targets=none,
            attention=None
            if self._layout is AttentionLayout.POSITIONS
            else AttentionPlan(blocks=[indices.view(count, length)], selected=indices),
        )


Read = Callable[[Sequence[FeatureSequence]], Tensor]
"""Function that returns the features ``[S, D]`` of sequences."""


class FeatureScorer:
    """Scorer of groups by the features of their completions and of the ground truth."""

    def __init__(self, read: Read, config: FeatureConfig) -> None:
        self._read, self._config = read, config

    def score(self, groups: Sequence[RolloutGroup]) -> list[GroupScores]:
        """Return the scores of the groups, in order; the features of all groups are read together."""
        started = time.perf_counter()
        results = [GroupScores(group_id=group.group_id) for group in groups]
        sequences: list[FeatureSequence] = []
        for group in groups:
            token_ids, is_truth = group.prompt.with_truth()
            truth = FeatureSequence(token_ids=token_ids, completion_mask=is_truth)
            sequences += [*map(FeatureSequence.of, group), truth]
        features = self._read(sequences)
        first = 0
        for group, result in zip(groups, results, strict=True):
            last = first + len(group)
            self._fill(result, features[first:last], features[last])
            first = last + 1
        seconds = (time.perf_counter() - started) / max(len(groups), 1)
        for result in results:
            result.seconds = {ALIGNMENT: seconds}
        return results

    def _fill(self, result: GroupScores, samples: Tensor, truth: Tensor) -> None:
        scores = score_features(samples[None], truth[None], self._config.whitening, **self._config.parts)
        if not all(bool(component.isfinite().all()) for component in (scores.alignment, scores.diversity, scores.cfm)):
            result.failures = dict.fromkeys((ALIGNMENT, DIVERSITY), "its features are not finite")
            return
        is_single = len(samples) == 1
        result.scores = {
            ALIGNMENT: scores.alignment[0].tolist(),
            DIVERSITY: [None] if is_single else scores.diversity[0].tolist(),
        }
        result.metrics = feature_metrics(scores, self._config)


def feature_metrics(scores: FeatureScores, config: FeatureConfig) -> dict[str, float]:
    """Return EBFT's metrics: means over the samples, and the number of failed whitenings."""
    return {
        "ebft/alignment": float(scores.alignment.mean()),
        "ebft/diversity": float(scores.diversity.mean()),
        "ebft/cfm_loss": float(scores.cfm.mean()),
        "ebft/reward": float(feature_rewards(scores, config).mean()),
        "ebft/num_unwhitened": float(scores.num_unwhitened),
    }


def learner_feature_scorer(policy: Policy, reference: Reference, config: FeatureConfig) -> FeatureScorer:
    """Return a scorer that reads the learner's ``reference``; all ranks must score together, each its own groups."""
    sharding = policy.sharding
    reader = FeatureReader(
        reference.depths,
        config,
        num_layers=policy.module.num_layers,
        layout=policy.module.layout,
        device=policy.device,
        max_tokens=config.micro_batch_tokens,
        most=lambda count: int(sharding.reduce(torch.tensor(count), Reduce.MAX)),
    )
    return FeatureScorer(reader.read, config)


def make_feature_scorer(model: ModelConfig, config: FeatureConfig) -> FeatureScorer:
    """Return a scorer with its own frozen copy of the initial policy, on the GPU if the process has one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return FeatureScorer(open_feature_network(model, config, device, max_tokens=config.micro_batch_tokens).read, config)

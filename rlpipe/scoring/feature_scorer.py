"""Scorer of EBFT, which compares the features of a group's completions with those of its ground truth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlpipe.algorithms.features import FeatureScores, feature_rewards, score_features
from rlpipe.configs.schema.ebft_config import FeatureConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.learner.policy import Policy
from rlpipe.learner.reference import Reference
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.scoring.feature_network import FeatureReader, FeatureSequence, open_feature_network
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import ALIGNMENT, DIVERSITY, RolloutGroup

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
        scores = score_features(samples[None], truth[None], self._config.whitening)
        if not all(bool(part.isfinite().all()) for part in (scores.alignment, scores.diversity, scores.cfm)):
            result.failures = dict.fromkeys((ALIGNMENT, DIVERSITY), "its features are not finite")
            return
        alone = len(samples) == 1
        result.scores = {
            ALIGNMENT: scores.alignment[0].tolist(),
            DIVERSITY: [None] if alone else scores.diversity[0].tolist(),
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
        num_layers=policy.scorer.num_layers,
        layout=policy.scorer.layout,
        device=policy.device,
        max_tokens=config.micro_batch_tokens,
        most=lambda count: int(sharding.reduce(torch.tensor(count), Reduce.MAX)),
    )
    return FeatureScorer(reader.read, config)


def make_feature_scorer(model: ModelConfig, config: FeatureConfig) -> FeatureScorer:
    """Return a scorer with its own frozen copy of the initial policy, on the GPU if the process has one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return FeatureScorer(open_feature_network(model, config, device, max_tokens=config.micro_batch_tokens).read, config)

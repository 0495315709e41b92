"""A learner rank's part in scoring groups by features, between steps and with the adapter disabled."""

from __future__ import annotations

import time
from typing import Any, Protocol

import ray
import torch
from ray.actor import ActorHandle

from rlpipe.actors.publishing import Calls
from rlpipe.configs.schema.ebft_config import FeatureConfig
from rlpipe.learner.policy import Policy
from rlpipe.learner.reference import Reference
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.scoring.feature_scorer import learner_feature_scorer

ANSWERED, NOTHING, NOT_FIRST = -1, -2, -3
"""Results of a round of waiting other than a job, whose number is 0 or more."""


class Waits(Protocol):
    def wait(self, call: Any, timeout_s: float) -> bool:
        """Wait for a call's answer, and return whether it has arrived."""


class FeatureRank:
    """A rank's wait for remote calls, during which it scores the groups that are due.

    All ranks must make the same calls in the same order. They act in the order in which the first rank learns of
    answers and jobs, because they share the model.
    """

    def __init__(
        self, policy: Policy, reference: Reference, config: FeatureConfig, batches: ActorHandle, calls: Calls
    ) -> None:
        self._sharding, self._batches, self._calls = policy.sharding, batches, calls
        self._scorer = learner_feature_scorer(policy, reference, config)
        self._due: Any = None

    def wait(self, call: Any, timeout_s: float) -> bool:
        """Wait for ``call``; return whether it is answered: False after ``timeout_s``, or once groups were scored."""
        found = self._learn(call, timeout_s) if self._sharding.rank == 0 else NOT_FIRST
        agreed = int(self._sharding.reduce(torch.tensor(float(found)), Reduce.MAX))
        if agreed >= 0:
            self._score(agreed)
        return agreed == ANSWERED

    def _learn(self, call: Any, timeout_s: float) -> int:
        """Wait, on the first rank, for a job or for ``call``; jobs come first, because a batch may depend on them."""
        if self._due is None:
            self._due = self._batches.features_due.remote(timeout_s)
        ended = time.monotonic() + timeout_s
        while (left := ended - time.monotonic()) > 0:
            ready, _ = ray.wait([self._due, call], num_returns=1, timeout=left)
            if self._due in ready:
                job = ray.get(self._due)
                self._due = None
                if job is not None:
                    return int(job)
                self._due = self._batches.features_due.remote(timeout_s)
            elif ready:
                return ANSWERED
        return NOTHING

    def _score(self, job: int) -> None:
        rank = self._sharding.rank
        groups = self._calls.get(self._batches.feature_share.remote(job, rank), "the groups whose features to read")
        scores = self._scorer.score(groups)
        self._calls.get(self._batches.features_scored.remote(job, rank, scores), "a receipt for the scores")

"""Collects the scored groups of one evaluation on held-out prompts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rlpipe.configs.schema import RewardConfig
from rlpipe.replay.assemble import reward_metrics
from rlpipe.scoring.scorer import GroupScores, apply_scores
from rlpipe.types import RolloutGroup


class Evaluation:
    """Waits until every group of the evaluation is there; ``result`` then holds its metrics.

    ``eval/accuracy`` is the share of all held-out prompts whose reward is at least ``correct_at``; a group that could
    not be scored counts as wrong, and in ``eval/num_failed``.
    """

    def __init__(self, group_ids: Iterable[int], *, rewards: Mapping[str, RewardConfig], correct_at: float) -> None:
        self._missing = set(group_ids)
        self._rewards, self._correct_at = rewards, correct_at
        self._groups: list[RolloutGroup] = []
        self._num_failed = 0
        self.result: asyncio.Future[dict[str, float]] = asyncio.get_running_loop().create_future()

    def add(self, group: RolloutGroup, scores: Sequence[GroupScores]) -> None:
        """Takes one scored group."""
        apply_scores(group, scores, self._rewards)
        self._missing.discard(group.group_id)
        if group.failure is None:
            self._groups.append(group)
        else:
            self._num_failed += 1
        if not self._missing and not self.result.done():
            self.result.set_result(self._metrics())

    def _metrics(self) -> dict[str, float]:
        num_groups = len(self._groups) + self._num_failed
        rewards = [rollout.reward for group in self._groups for rollout in group if rollout.reward is not None]
        correct = sum(reward >= self._correct_at for reward in rewards)
        metrics = {"accuracy": correct / num_groups, "num_failed": float(self._num_failed)}
        if self._groups:
            kept = reward_metrics(self._groups)
            metrics |= {name: value for name, value in kept.items() if name.endswith(("/mean",)) or name == "reward"}
            lengths = [len(rollout.completion_ids) for group in self._groups for rollout in group]
            metrics["completions/mean_length"] = float(np.mean(lengths))
        return {f"eval/{name}": value for name, value in metrics.items()}

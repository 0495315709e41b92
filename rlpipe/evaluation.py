"""Evaluates a policy version on the held-out prompts: greedy completions, scored like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from rlpipe.configs.schema import RewardConfig
from rlpipe.replay.assemble import reward_metrics
from rlpipe.scoring.scorer import GroupScores, apply_scores
from rlpipe.types import GroupRequest, Prompt, RolloutGroup

Metrics = dict[str, float]


class Evaluator:
    """Makes the requests of evaluations and collects their groups; for one event loop.

    Its group ids are negative, so that evaluations leave the ids (and with them the seeds) of training as they are.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        rewards: Mapping[str, RewardConfig],
        correct_at: float,
        max_tokens: int,
    ) -> None:
        self.prompts = prompts
        self._rewards, self._correct_at, self._max_tokens = rewards, correct_at, max_tokens
        self._running: dict[int, _Evaluation] = {}
        self._next_id = -1

    def start(self, version: int) -> tuple[list[GroupRequest], asyncio.Future[Metrics]]:
        """The requests of one evaluation, and its metrics to come; no policy older than ``version`` may answer.

        ``eval/accuracy`` is the share of all held-out prompts whose reward is at least ``correct_at``; a group that
        can't be scored counts as wrong, and in ``eval/num_failed``.
        """
        evaluation = _Evaluation(len(self.prompts), self._correct_at)
        requests = []
        for prompt in self.prompts:
            self._running[self._next_id] = evaluation
            requests.append(
                GroupRequest(
                    group_id=self._next_id,
                    prompt=prompt,
                    group_size=1,
                    max_tokens=self._max_tokens,
                    temperature=0.0,
                    seed=0,
                    min_version=version,
                )
            )
            self._next_id -= 1
        return requests, evaluation.result

    def owns(self, group_id: int) -> bool:
        """Whether the group belongs to an evaluation that still runs."""
        return group_id in self._running

    def add(self, group: RolloutGroup, scores: Sequence[GroupScores]) -> None:
        """Takes one scored group."""
        if group.failure is None:
            apply_scores(group, scores, self._rewards)
        self._running.pop(group.group_id).add(group)


class _Evaluation:
    """The groups of one evaluation, until all are there."""

    def __init__(self, num_groups: int, correct_at: float) -> None:
        self._num_groups, self._correct_at = num_groups, correct_at
        self._groups: list[RolloutGroup] = []
        self.result: asyncio.Future[Metrics] = asyncio.get_running_loop().create_future()

    def add(self, group: RolloutGroup) -> None:
        self._groups.append(group)
        if len(self._groups) == self._num_groups and not self.result.done():
            self.result.set_result(self._metrics())

    def _metrics(self) -> Metrics:
        scored = [group for group in self._groups if group.failure is None]
        rollouts = [rollout for group in scored for rollout in group]
        correct = sum(rollout.reward is not None and rollout.reward >= self._correct_at for rollout in rollouts)
        metrics = {
            "eval/accuracy": correct / self._num_groups,
            "eval/num_failed": float(self._num_groups - len(scored)),
        }
        if scored:
            means = {n: v for n, v in reward_metrics(scored).items() if n == "reward" or n.endswith("/mean")}
            metrics |= {f"eval/{name}": value for name, value in means.items()}
            lengths = [len(rollout.completion_ids) for rollout in rollouts]
            metrics["eval/completions/mean_length"] = float(np.mean(lengths))
        return metrics

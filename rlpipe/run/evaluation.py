"""Evaluation of a policy version on the held-out prompts, with greedy completions that are scored as in training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlpipe.actors.remote import await_remote
from rlpipe.configs.schema.data_config import HeldOutConfig
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.replay.assemble import EBFT, reward_metrics
from rlpipe.scoring.scorer import GroupScores, apply_scores
from rlpipe.tracking.jsonl import MAX_HELD_OUT
from rlpipe.types import GroupRequest, Prompt, Rollout, RolloutGroup

Metrics = dict[str, float]


@dataclass(kw_only=True, slots=True, frozen=True)
class EvaluationResult:
    """A finished evaluation."""

    metrics: Metrics
    groups: list[RolloutGroup]
    """Groups of the first ``MAX_HELD_OUT`` prompts, in their order, except those that could not be scored."""


class Evaluator:
    """Requests and results of evaluations; for one event loop.

    Its group ids are negative, so that evaluations do not change the ids (and thus the seeds) of training groups.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        *,
        rewards: Mapping[str, RewardConfig],
        held_out: HeldOutConfig,
        max_tokens: int,
    ) -> None:
        self.prompts = prompts
        self._rewards, self._config, self._max_tokens = rewards, held_out, max_tokens
        self._running: dict[int, _Evaluation] = {}
        self._kept: dict[int, RolloutGroup] = {}
        self._next_id = -1

    def start(self, version: int) -> tuple[list[GroupRequest], asyncio.Future[EvaluationResult]]:
        """Return the requests of one evaluation of ``version`` or a newer policy, and a future of its outcome.

        ``eval/accuracy`` is the share of all held-out prompts whose reward, or the one named by ``correct_by``, is
        at least ``correct_at``; a group that can't be scored counts as wrong, and in ``eval/num_failed``.
        """
        evaluation = _Evaluation(len(self.prompts), self._config)
        requests = []
        for prompt in self.prompts:
            self._running[self._next_id] = evaluation
            requests.append(
                GroupRequest(
                    group_id=self._next_id,
                    prompt=prompt,
                    group_size=1,
                    max_tokens=prompt.limit(self._max_tokens),
                    temperature=0.0,
                    seed=prompt.prompt_id,  # for environments; the policy itself samples greedily
                    min_version=version,
                )
            )
            self._next_id -= 1
        return requests, evaluation.result

    def owns(self, group_id: int) -> bool:
        """Return whether the group belongs to an evaluation that still runs."""
        return group_id in self._running

    async def fetch(self, groups: Awaitable[Sequence[RolloutGroup]], indices: Iterable[int], within: float) -> None:
        """Fetch groups and keep those of the ``indices`` that it owns until their scores come; their host may be lost.

        Raises as ``await_remote`` does.
        """
        fetched = await await_remote(groups, "an evaluation's groups", within=within, option="cluster.call_timeout_s")
        chosen = [fetched[index] for index in indices]
        self._kept |= {group.group_id: group for group in chosen if self.owns(group.group_id)}

    async def kept(self, requests: Iterable[GroupRequest]) -> list[RolloutGroup]:
        """Return those of the requests' groups that are kept."""
        return [self._kept[request.group_id] for request in requests if request.group_id in self._kept]

    def scored(self, group_ids: Iterable[int], scores: Sequence[Sequence[GroupScores]]) -> None:
        """Add kept groups with their scores, of every pool, to their evaluations."""
        groups = [self._kept.pop(group_id) for group_id in group_ids if group_id in self._kept]
        for group in groups:
            self.add(group, [entry for pool in scores for entry in pool if entry.group_id == group.group_id])

    def add(self, group: RolloutGroup, scores: Sequence[GroupScores]) -> None:
        """Add one group and its scores to its evaluation."""
        if group.failure is None:
            apply_scores(group, scores, self._rewards)
        self._running.pop(group.group_id).add(group)


class _Evaluation:
    """Groups of one evaluation, collected until it is complete."""

    def __init__(self, num_groups: int, config: HeldOutConfig) -> None:
        self._num_groups, self._config = num_groups, config
        self._groups: list[RolloutGroup] = []
        self.result: asyncio.Future[EvaluationResult] = asyncio.get_running_loop().create_future()

    def add(self, group: RolloutGroup) -> None:
        self._groups.append(group)
        if len(self._groups) == self._num_groups and not self.result.done():
            scored = [entry for entry in self._groups if entry.failure is None]
            first = sorted(self._groups, key=lambda entry: -entry.group_id)[:MAX_HELD_OUT]
            groups = [entry for entry in first if entry.failure is None]
            self.result.set_result(EvaluationResult(metrics=self._metrics(scored), groups=groups))

    def _is_correct(self, rollout: Rollout) -> bool:
        by = self._config.correct_by
        reward = rollout.reward if by is None else rollout.rewards.get(by)
        return reward is not None and reward >= self._config.correct_at

    def _metrics(self, scored: Sequence[RolloutGroup]) -> Metrics:
        rollouts = [rollout for group in scored for rollout in group]
        metrics = {
            "eval/accuracy": sum(map(self._is_correct, rollouts)) / self._num_groups,
            "eval/num_prompts": float(self._num_groups),
            "eval/num_failed": float(self._num_groups - len(scored)),
        }
        if scored:
            means = {
                name: value
                for name, value in reward_metrics(scored).items()
                if name == "reward" or name.endswith("/mean") or name.startswith(EBFT)
            }
            metrics |= {f"eval/{name}": value for name, value in means.items()}
            lengths = [len(rollout.completion_ids) for rollout in rollouts]
            metrics["eval/completions/mean_length"] = float(np.mean(lengths))
            versions = np.concatenate([rollout.policy_versions[rollout.loss_mask] for rollout in rollouts])
            if len(versions):  # episodes that failed may have sampled nothing
                metrics["eval/policy_version"] = float(np.mean(versions))
        return metrics

"""The replay actor: keeps scored groups, and serves each learner rank its share of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rlpipe.configs.schema import AlgorithmConfig, LearnerConfig, RewardConfig
from rlpipe.replay.assemble import assemble_step
from rlpipe.replay.buffer import Admitted, ReplayBuffer
from rlpipe.replay.steps import StepBoard, StepReport
from rlpipe.scoring.scorer import GroupScores, apply_scores
from rlpipe.types import RolloutGroup, TrainBatch


class ReplayActor:
    """Remote shell of ``ReplayBuffer``; its methods are coroutines, so that ranks can wait for their batches."""

    def __init__(
        self,
        *,
        algorithm: AlgorithmConfig,
        learner: LearnerConfig,
        rewards: dict[str, RewardConfig],
        max_staleness: int,
        seed: int,
        num_samples: int,
    ) -> None:
        self._algorithm, self._learner, self._rewards = algorithm, learner, rewards
        self._seed, self._num_samples = seed, num_samples
        self._buffer = ReplayBuffer(groups_per_step=algorithm.groups_per_step, max_staleness=max_staleness)
        self._board = StepBoard(num_ranks=learner.num_ranks)
        self._samples: dict[int, list[RolloutGroup]] = {}
        self._num_failed = 0
        self._cursor: dict[str, int] = {}

    async def admit(self, groups: list[Admitted], cursor: dict[str, int]) -> None:
        """Registers groups that are about to be generated; ``cursor`` is the prompt source's place behind them."""
        self._buffer.admit(groups)
        self._cursor = cursor

    async def add(
        self, groups: Sequence[RolloutGroup], indices: Sequence[int], *scores: Sequence[GroupScores]
    ) -> dict[int, str]:
        """Stores ``groups[indices]`` with the scores that every pool gave them; answers the failed ones' reasons."""
        by_group: dict[int, list[GroupScores]] = {}
        for pool in scores:
            for entry in pool:
                by_group.setdefault(entry.group_id, []).append(entry)
        failed: dict[int, str] = {}
        for index in indices:
            group = groups[index]
            if group.failure is None:
                apply_scores(group, by_group.get(group.group_id, []), self._rewards)
            if group.failure is None:
                self._buffer.add(group)
            else:
                failed[group.group_id] = group.failure
                self._buffer.discard(group.group_id)
        self._num_failed += len(failed)
        await self._fill()
        return failed

    async def next_batch(self, step: int, rank: int) -> TrainBatch:
        """Waits until the step is complete and returns the rank's share of it."""
        self._board.want(step)
        await self._fill()
        return await self._board.batch(step, rank)

    async def complete_step(self, report: StepReport) -> None:
        """Called by the first rank once the step is trained."""
        report.samples = self._samples.pop(report.step, [])
        await self._board.complete(report)

    async def wait_completed(self, timeout_s: float) -> list[StepReport]:
        """The reports that nobody has taken yet, as soon as there is one; an empty list after ``timeout_s``."""
        return await self._board.wait_completed(timeout_s)

    async def describe(self) -> dict[str, Any]:
        """Its state in a few numbers, for error messages."""
        pending = self._buffer.pending
        return {
            "scored_groups": self._buffer.num_scored,
            "groups_in_flight": len(pending) - self._buffer.num_scored,
            "oldest_groups": [group.group_id for group in pending[:4]],
            "failed_groups": self._num_failed,
            "step_wanted": self._board.wanted,
        }

    async def _fill(self) -> None:
        """Assembles the wanted step if the buffer can fill it."""
        step = self._board.wanted
        if step is None or (groups := self._buffer.take(step)) is None:
            return
        batches = assemble_step(
            groups,
            step=step,
            algorithm=self._algorithm,
            learner=self._learner,
            reward_weights={name: reward.weight for name, reward in self._rewards.items()},
            seed=self._seed,
        )
        resume = {"cursor": self._cursor, "pending": [[g.epoch, g.position] for g in self._buffer.pending]}
        for batch in batches:
            batch.metrics = {**batch.metrics, "groups/failed": float(self._num_failed)}
            batch.resume = resume
        self._samples[step] = groups[: self._num_samples]
        await self._board.put(step, batches)

"""A queue of groups that the learner's ranks score between steps, with each rank's share and scores."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from rlpipe.replay.notifier import Noticeboard
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import RolloutGroup


@dataclass(slots=True)
class _Job:
    groups: Sequence[RolloutGroup]
    scores: asyncio.Future[list[GroupScores]]
    answers: dict[int, list[GroupScores]] = field(default_factory=dict)
    """Scores of each rank's share, by rank."""


class FeatureBoard(Noticeboard):
    """Queue of scoring jobs, oldest first, for one event loop; all calls of ranks can be repeated."""

    def __init__(self, *, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks
        self._jobs: dict[int, _Job] = {}
        self._next_id = 0
        self._is_over = False

    async def score(self, groups: Sequence[RolloutGroup]) -> list[GroupScores]:
        """Return the groups' scores once the ranks have scored them all."""
        job = _Job(groups, asyncio.get_running_loop().create_future())
        job_id, self._next_id = self._next_id, self._next_id + 1
        self._jobs[job_id] = job
        await self.notify()
        try:
            return await job.scores
        finally:
            self._jobs.pop(job_id, None)

    async def due(self, timeout_s: float) -> int | None:
        """Return the oldest job as soon as there is one, or None after ``timeout_s``."""
        await self.wait_for(lambda: self._jobs, timeout_s)
        return min(self._jobs, default=None)

    def share(self, job_id: int, rank: int) -> list[RolloutGroup]:
        """Return the groups of a job that a rank is to score; none if the job is over."""
        job = self._jobs.get(job_id)
        return [] if job is None else list(job.groups[rank :: self._num_ranks])

    def answer(self, job_id: int, rank: int, scores: Sequence[GroupScores]) -> None:
        """Keep the scores of a rank's share; once all ranks have answered, the job is done."""
        job = self._jobs.get(job_id)
        if job is None:
            return
        job.answers[rank] = list(scores)
        if len(job.answers) == self._num_ranks:
            self._jobs.pop(job_id)
            if not job.scores.done():
                job.scores.set_result(list(chain.from_iterable(job.answers.values())))

    def begin_again(self) -> None:
        """Drop the scores of unfinished jobs, which new ranks score again."""
        for job in self._jobs.values():
            job.answers.clear()

    async def end(self) -> None:
        """Record that no more groups will come."""
        self._is_over = True
        await self.notify()

    async def ended(self) -> None:
        """Wait until no more groups will come."""
        await self.wait_for(lambda: self._is_over)

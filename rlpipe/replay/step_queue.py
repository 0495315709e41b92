"""Queues of steps that are ready to train, and of groups that wait for features."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import HalfArray, RolloutGroup, TrainBatch


class Notifier:
    """Base of the boards on which ranks and the controller wait for changes."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()

    async def wait_for(self, condition: Callable[[], object], timeout_s: float | None = None) -> bool:
        """Wait until ``condition`` holds, and return True, or False after ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True

    async def notify(self) -> None:
        """Have all waiting coroutines check their conditions again."""
        async with self._changed:
            self._changed.notify_all()


@dataclass(kw_only=True, slots=True)
class StepReport:
    """Report on a step that was trained or, as an RL run's last one, compared."""

    step: int
    metrics: dict[str, float]
    samples: list[RolloutGroup] = field(default_factory=list)
    """A few of the step's groups, for people to read."""
    last: bool = False
    """Whether this is the last step."""
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    """Metrics on held-out rows, by version, where the learner evaluates (SFT, strided EBFT)."""
    differences: Mapping[int, HalfArray] = field(default_factory=dict)
    """Difference of the learner's log-probs before the step and the engine's, of each group's loss tokens."""


class StepQueue(Notifier):
    """Batches of the newest steps, one per rank, for one event loop.

    A step's batches may be ready before ranks ask for them. They are kept until the step after the next is ready, so
    that a slower rank still finds its own.
    """

    def __init__(self, *, num_ranks: int) -> None:
        super().__init__()
        self._num_ranks = num_ranks
        self._wanted: int | None = None
        self._batches: dict[int, list[TrainBatch]] = {}
        self._newest = -1
        self._ends_before: int | None = None
        self._incarnation = 0

    @property
    def wanted(self) -> int | None:
        """Step that ranks wait for, or None."""
        return self._wanted

    @property
    def due(self) -> int | None:
        """Step that ranks wait for, or else the one that they will want next, if it is not ready yet, or None."""
        if self._wanted is not None:
            return self._wanted
        following = self._newest + 1
        is_missing = self._newest >= 0 and following not in self._batches
        return following if is_missing and not self._is_after_end(following) else None

    def want(self, step: int) -> bool:
        """Record that a rank waits for ``step``; return whether it is not ready and was not asked for before."""
        if step in self._batches or step == self._wanted:
            return False
        self._wanted = step
        return True

    async def put(self, step: int, batches: list[TrainBatch]) -> None:
        """Hand out a step's batches, one per rank, and drop those of steps that no rank can want any more."""
        assert len(batches) == self._num_ranks
        self._batches = {old: step_batches for old, step_batches in self._batches.items() if old == step - 1}
        self._batches[step] = batches
        self._wanted = None
        await self.notify()

    async def stop(self) -> None:
        """Hand out no further step, except that all ranks still get a step that one of them has begun."""
        if self._ends_before is None:
            self._ends_before = self._newest + 1
        await self.notify()

    async def begin_again(self) -> None:
        """Start over for new ranks, which may ask from any step on; waiting calls of the old ranks return None."""
        self._incarnation += 1
        self._wanted, self._batches, self._newest = None, {}, -1
        if self._ends_before is not None:
            self._ends_before = 0
        await self.notify()

    async def batch(self, step: int, rank: int) -> TrainBatch | None:
        """Return the rank's share of the step once it is ready, or None if the run stops before it."""
        incarnation = self._incarnation

        def is_over() -> bool:
            return incarnation != self._incarnation or self._is_after_end(step)

        await self.wait_for(lambda: step in self._batches or is_over())
        if is_over():
            return None
        self._newest = max(step, self._newest)
        return self._batches[step][rank]

    def _is_after_end(self, step: int) -> bool:
        return self._ends_before is not None and step >= self._ends_before


@dataclass(slots=True)
class _Job:
    groups: Sequence[RolloutGroup]
    scores: asyncio.Future[list[GroupScores]]
    answers: dict[int, list[GroupScores]] = field(default_factory=dict)
    """Scores of each rank's share, by rank."""


class FeatureQueue(Notifier):
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
        """Keep the scores of a rank's share; once all ranks have answered, the job is done.

        Scores of other groups are ignored: a dead process, whose numbers began at 0 as well, gave that job to the rank.
        """
        job = self._jobs.get(job_id)
        group_ids = [group.group_id for group in self.share(job_id, rank)]
        if job is None or [entry.group_id for entry in scores] != group_ids:
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

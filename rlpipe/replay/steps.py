"""Where ranks wait for the batches of a step, and the controller for the reports of trained ones."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from rlpipe.types import RolloutGroup, TrainBatch


@dataclass(kw_only=True, slots=True)
class StepReport:
    """What became of a step."""

    step: int
    metrics: dict[str, float]
    samples: list[RolloutGroup] = field(default_factory=list)
    """A few of its groups, for people to read."""
    last: bool = False
    """Whether none follows."""


class StepBoard:
    """Batches of the newest steps, one a rank, and the reports of those before; for one event loop.

    A step's batches stay until the step after the next is wanted, so that a slower rank still finds its own.
    """

    def __init__(self, *, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._wanted: int | None = None
        self._batches: dict[int, list[TrainBatch]] = {}
        self._reports: list[StepReport] = []
        self._changed = asyncio.Condition()

    @property
    def wanted(self) -> int | None:
        """The step that ranks wait for, or None."""
        return self._wanted

    def want(self, step: int) -> bool:
        """Notes that a rank waits for ``step``, drops the batches that no rank can want any more; True if it is new."""
        if step in self._batches or step == self._wanted:
            return False
        self._wanted = step
        self._batches = {old: batches for old, batches in self._batches.items() if old >= step - 1}
        return True

    async def put(self, step: int, batches: list[TrainBatch]) -> None:
        """Hands out a step, one batch a rank."""
        assert len(batches) == self._num_ranks
        self._batches[step] = batches
        self._wanted = None
        await self._notify()

    async def batch(self, step: int, rank: int) -> TrainBatch:
        """The rank's share of the step, once it is there."""
        async with self._changed:
            await self._changed.wait_for(lambda: step in self._batches)
        return self._batches[step][rank]

    async def complete(self, report: StepReport) -> None:
        self._reports.append(report)
        await self._notify()

    async def wait_completed(self, timeout_s: float) -> list[StepReport]:
        """Takes the reports that nobody has taken yet, as soon as there is one; none after ``timeout_s``."""
        try:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(lambda: bool(self._reports)), timeout_s)
        except TimeoutError:
            return []
        reports, self._reports = self._reports, []
        return reports

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

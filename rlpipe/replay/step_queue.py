"""The board on which ranks wait for the batches of a step, and the controller for reports of trained ones."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlpipe.replay.notifier import Noticeboard
from rlpipe.types import RolloutGroup, TrainBatch


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


class StepBoard(Noticeboard):
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
        self._life = 0

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
        known = self._newest >= 0 and following not in self._batches
        return following if known and not self._is_past_the_end(following) else None

    def want(self, step: int) -> bool:
        """Record that a rank waits for ``step``; return whether it is not ready and was not asked for before."""
        if step in self._batches or step == self._wanted:
            return False
        self._wanted = step
        return True

    async def put(self, step: int, batches: list[TrainBatch]) -> None:
        """Hand out a step's batches, one per rank, and drop those of steps that no rank can want any more."""
        assert len(batches) == self._num_ranks
        self._batches = {old: kept for old, kept in self._batches.items() if old == step - 1}
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
        self._life += 1
        self._wanted, self._batches, self._newest = None, {}, -1
        if self._ends_before is not None:
            self._ends_before = 0
        await self.notify()

    async def batch(self, step: int, rank: int) -> TrainBatch | None:
        """Return the rank's share of the step once it is ready, or None if the run stops before it."""
        life = self._life

        def is_over() -> bool:
            return life != self._life or self._is_past_the_end(step)

        await self.wait_for(lambda: step in self._batches or is_over())
        if is_over():
            return None
        self._newest = max(step, self._newest)
        return self._batches[step][rank]

    def _is_past_the_end(self, step: int) -> bool:
        return self._ends_before is not None and step >= self._ends_before

"""What learner ranks talk to: batches of a step, reports, signs of life, and news of all that for the controller."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.errors import LearnerFailed, RlpipeError
from rlpipe.replay.ledger.run_ledger import LedgerEvent
from rlpipe.replay.step_queue import StepBoard, StepReport
from rlpipe.types import TrainBatch

SILENT_AFTER_S = 12.0
"""Seconds without a sign of life, which ranks give every five."""


@dataclass(kw_only=True, slots=True)
class News:
    """What has happened since the controller asked last."""

    reports: Sequence[StepReport] = field(default_factory=list)
    events: Sequence[LedgerEvent] = field(default_factory=list)


class BatchActor(ABC):
    """The learner's side of the replay and dataset actors; all methods are coroutines, so that ranks can wait.

    Every method can be repeated, so that Ray may call it again on the process that takes the place of a dead one.
    """

    def __init__(self, learner: LearnerConfig) -> None:
        self._learner = learner
        self._board = StepBoard(num_ranks=learner.num_ranks)
        self._error: RlpipeError | None = None
        self._last_progress = time.monotonic()
        self._failures_in_row = self._life = 0
        self._beats: dict[int, tuple[float, int]] = {}

    async def begin_life(self) -> int:
        """Called by the first rank of a group that begins; a higher number than any group before it got."""
        self._last_progress = time.monotonic()
        return self._count_life()

    async def next_batch(self, step: int, rank: int) -> TrainBatch | None:
        """Waits until the step is complete and returns the rank's share of it; None if the run stops before it."""
        self._board.want(step)
        await self._fill()
        return await self._board.batch(step, rank)

    async def complete_step(self, report: StepReport) -> None:
        """Called by the first rank once the step is trained."""
        if report.step > self._last_step():  # not one that is trained again
            self._failures_in_row = 0
        self._keep_report(report)
        self._last_progress = time.monotonic()
        await self._board.notify()

    async def beat(self, rank: int, step: int) -> None:
        """Says that a rank lives, and which step it is in."""
        self._beats[rank] = (time.monotonic(), step)

    async def note(self, kind: str, subject: str, message: str) -> None:
        """Writes an event down, which the controller shows."""
        self._keep_event(kind, subject, message)
        await self._board.notify()

    async def learner_died(self, cause: str) -> None:
        """Counts a death of the learner group; beyond ``learner.max_failures`` without a new step the run stops."""
        self._failures_in_row += 1
        if silent := self._silent_ranks():
            cause = f"{cause}; {silent}"
        self._beats.clear()
        await self._board.begin_again()
        deaths, limit = self._failures_in_row, self._learner.max_failures
        if deaths > limit:
            await self.fail(
                LearnerFailed(
                    f"the learner group died {deaths} time{'s' * (deaths > 1)} without a new step "
                    f"(learner.max_failures): {cause}"
                )
            )
        else:
            await self.note(
                "death", "learner", f"the learner group died: {cause}; it begins again at the last checkpoint"
            )

    async def fail(self, error: RlpipeError) -> None:
        """Ends the run with an error."""
        self._error = self._error or error
        await self._board.stop()

    async def back_up(self, target: Path) -> str | None:
        """Puts the accounts into a checkpoint that is being written; answers which run they are of."""
        return None

    async def checkpointed(self, step: int) -> None:  # noqa: B027 - only where there are accounts
        """A checkpoint after ``step`` steps is whole."""

    async def wait_news(self, after_step: int, after_event: int, timeout_s: float) -> News:
        """Reports and events behind those given, as soon as there is one; nothing after ``timeout_s``.

        Raises the error that the run can't go on with.
        """
        await self._board.wait_for(
            lambda: self._error is not None or self._has_news(after_step, after_event), timeout_s
        )
        if self._error is not None:
            raise self._error
        return News(reports=self._reports(after_step), events=self._events(after_event))

    async def stop(self) -> None:
        """Lets the learner end after the step that it is in."""
        await self._board.stop()

    async def describe(self) -> dict[str, Any]:
        """Its state in a few numbers, for error messages."""
        now = time.monotonic()
        return {
            "step_wanted": self._board.wanted,
            "seconds_since_a_step": round(now - self._last_progress, 1),
            "learner_ranks": {
                rank: f"in step {step}, last heard of {now - beat:.0f} s ago"
                for rank, (beat, step) in sorted(self._beats.items())
            }
            or "no sign of life",
        }

    def _silent_ranks(self) -> str:
        now = time.monotonic()
        return ", ".join(
            f"rank {rank} was last heard of {now - beat:.0f} s ago, in step {step}"
            for rank, (beat, step) in sorted(self._beats.items())
            if now - beat > SILENT_AFTER_S
        )

    async def _fill(self) -> None:
        """Hands out the wanted step if it can be filled; where ranks still train, has the next one ready for them."""
        step = self._board.due
        if step is not None and (batches := self._batches(step)) is not None:
            await self._board.put(step, batches)

    def _has_news(self, after_step: int, after_event: int) -> bool:
        return bool(self._last_step() > after_step or self._events(after_event))

    def _count_life(self) -> int:
        self._life += 1
        return self._life

    @abstractmethod
    def _batches(self, step: int) -> list[TrainBatch] | None:
        """One batch for each rank, or None while the step can't be filled; the same ones whenever it is asked."""

    @abstractmethod
    def _keep_report(self, report: StepReport) -> None: ...

    @abstractmethod
    def _keep_event(self, kind: str, subject: str, message: str) -> None: ...

    @abstractmethod
    def _reports(self, after: int) -> Sequence[StepReport]: ...

    @abstractmethod
    def _events(self, after: int) -> Sequence[LedgerEvent]: ...

    @abstractmethod
    def _last_step(self) -> int:
        """The newest step that was reported, or -1."""

"""The base actor that gives learner ranks their batches, and reports their progress to the controller."""

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
from rlpipe.replay.step_queue import StepQueue, StepReport
from rlpipe.types import ServedRecord, TrainBatch

SILENT_AFTER_S = 12.0
"""Seconds without a heartbeat after which a rank is reported as silent; ranks send one every five seconds."""


@dataclass(kw_only=True, slots=True)
class RunUpdates:
    """Reports and events since the controller's last request."""

    reports: Sequence[StepReport] = field(default_factory=list)
    events: Sequence[LedgerEvent] = field(default_factory=list)


class StepServer(ABC):
    """The learner's side of the replay and dataset actors; all methods are coroutines, so that ranks can wait.

    Every method can be repeated, so that Ray may call it again on the process that replaces a dead one.
    """

    def __init__(self, learner: LearnerConfig) -> None:
        self._learner = learner
        self._board = StepQueue(num_ranks=learner.num_ranks)
        self._error: RlpipeError | None = None
        self._last_progress = time.monotonic()
        self._failures_in_row = self._incarnation = 0
        self._beats: dict[int, tuple[float, int]] = {}

    async def begin_incarnation(self) -> int:
        """Return the number of a new learner group, higher than any before; called by the group's first rank."""
        self._last_progress = time.monotonic()
        return self._count_incarnation()

    async def next_batch(self, step: int, rank: int) -> TrainBatch | None:
        """Wait until the step is filled, and return the rank's share of it, or None if the run stops first."""
        self._board.want(step)
        await self._fill()
        return await self._board.batch(step, rank)

    async def complete_step(self, report: StepReport) -> None:
        """Keep the report of a trained step; called by the first rank."""
        if report.step > self._last_step():  # not one that is trained again
            self._failures_in_row = 0
        self._keep_report(report)
        self._last_progress = time.monotonic()
        await self._board.notify()

    async def heartbeat(self, rank: int, step: int) -> None:
        """Record a rank's heartbeat and the step that it is in."""
        self._beats[rank] = (time.monotonic(), step)

    async def heartbeats(self) -> dict[int, tuple[float, int]]:
        """Return by rank the seconds since its last heartbeat, and the step that it was in."""
        now = time.monotonic()
        return {rank: (now - heartbeat, step) for rank, (heartbeat, step) in sorted(self._beats.items())}

    async def note(self, kind: str, subject: str, message: str) -> None:
        """Record an event, which the controller shows."""
        self._keep_event(kind, subject, message)
        await self._board.notify()

    async def learner_died(self, cause: str) -> None:
        """Count a death of the learner group; stop the run after more than ``learner.max_failures`` without a step."""
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
                "death", "learner", f"the learner group died: {cause}; it restarts from the last checkpoint"
            )

    async def fail(self, error: RlpipeError) -> None:
        """End the run with an error."""
        self._error = self._error or error
        await self._board.stop()

    async def back_up(self, target: Path) -> str | None:
        """Copy the ledger, if there is one, into a checkpoint that is being written, and return its run's id."""
        return None

    async def checkpointed(  # noqa: B027 - only actors with a ledger override it
        self, step: int, weights: ServedRecord | None
    ) -> None:
        """Record that the checkpoint after ``step`` steps is complete."""

    async def wait_updates(self, after_step: int, after_event: int, timeout_s: float) -> RunUpdates:
        """Return reports and events after the given ones as soon as there are any; none after ``timeout_s``.

        Raises the error that ended the run, if there is one.
        """
        await self._board.wait_for(
            lambda: self._error is not None or self._has_updates(after_step, after_event), timeout_s
        )
        if self._error is not None:
            raise self._error
        return RunUpdates(reports=self._reports(after_step), events=self._events(after_event))

    async def stop(self) -> None:
        """Let the learner end after the current step."""
        await self._board.stop()

    async def describe(self) -> dict[str, Any]:
        """Return a summary of the state, for error messages."""
        now = time.monotonic()
        return {
            "step_wanted": self._board.wanted,
            "seconds_since_a_step": round(now - self._last_progress, 1),
            "learner_ranks": {
                rank: f"in step {step}, last heard of {now - heartbeat:.0f} s ago"
                for rank, (heartbeat, step) in sorted(self._beats.items())
            }
            or "not heard of yet",
        }

    def _silent_ranks(self) -> str:
        now = time.monotonic()
        return ", ".join(
            f"rank {rank} was last heard of {now - heartbeat:.0f} s ago, in step {step}"
            for rank, (heartbeat, step) in sorted(self._beats.items())
            if now - heartbeat > SILENT_AFTER_S
        )

    async def _fill(self) -> None:
        """Hand out the step that ranks wait for, if it can be filled; while they train, prepare the next one."""
        step = self._board.due
        if step is not None and (batches := self._batches(step)) is not None:
            await self._board.put(step, batches)

    def _has_updates(self, after_step: int, after_event: int) -> bool:
        return bool(self._last_step() > after_step or self._events(after_event))

    def _count_incarnation(self) -> int:
        self._incarnation += 1
        return self._incarnation

    @abstractmethod
    def _batches(self, step: int) -> list[TrainBatch] | None:
        """Return one batch per rank, or None while the step can't be filled; repeated calls give equal batches."""

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
        """Return the newest step that was reported, or -1."""

"""The dataset actor, which serves packed batches of supervised rows in place of an RL run's replay actor."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial

from rlpipe.actors.step_server import RunUpdates, StepServer
from rlpipe.common.imports import enter_folder
from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.data_config import DataConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.prompts import SequenceSource, first_epoch, longest_row, open_run_sequences, packing_of
from rlpipe.data.reference_cache import ReferenceCache, reference_folder
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.data.render_rows import forward_logs
from rlpipe.data.sources.row_source import Cursor, check_num_rows
from rlpipe.replay.ledger.run_ledger import LedgerEvent
from rlpipe.replay.step_queue import StepReport
from rlpipe.types import FloatArray, MiniBatch, Rollout, RolloutStatus, TrainBatch

HELD_OUT = -1
"""Stands for the held-out rows among the steps whose log-probs are precomputed."""
ANSWER_LEAVES_S = 0.01
"""Seconds after which an answer has left the event loop, which is then kept busy by packing."""
SEEN_WITHIN_S = 30.0
"""Seconds that ``complete_step`` waits for the driver to fetch the report; the driver polls continually."""


@dataclass(kw_only=True, frozen=True)
class DatasetSetup:
    """Settings of the dataset actor.

    ``folder`` is the driver's working directory, ``cursor`` the place where the rows of ``first_step`` begin.
    """

    data: DataConfig
    model: ModelConfig
    algorithm: AlgorithmConfig
    learner: LearnerConfig
    seed: int
    folder: str
    first_step: int
    cursor: Cursor
    num_rows: int | None = None
    """Rows of an epoch when the run began; None if that is not known, or may change."""


def _pads_sequences(model: ModelConfig) -> bool:
    from rlpipe.learner.policy import pads_sequences  # imported here because it takes seconds

    return pads_sequences(model)


class DatasetActor(StepServer):
    """Actor that packs a step while ranks train the one before; any from ``first_step`` on can be requested again."""

    def __init__(self, setup: DatasetSetup) -> None:
        super().__init__(setup.learner)
        self._setup = setup
        self._source: SequenceSource | None = None
        self._held_out: list[TrainBatch] = []
        """Batches of held-out rows, one per rank; empty if no rows are held out."""
        self._max_tokens = longest_row(setup.algorithm, setup.learner)
        self._reference: ReferenceCache | None = None
        """The reference's log-probs, if they are precomputed."""
        self._due: dict[int, bool] = {}
        """Whether log-probs of a step are computed before the first one."""
        self._shares: tuple[int, list[TrainBatch]] = (HELD_OUT, [])
        """The last such step that was packed, and its batches, which all ranks ask for."""
        self._pack = packing_of(setup.algorithm)
        self._cursors = {setup.first_step: setup.cursor}
        self._known_reports: list[StepReport] = []
        self._known_events: list[LedgerEvent] = []
        self._reported: set[str] = set()
        self._seen = -1
        self._ahead: asyncio.Task[None] | None = None
        """Packs the step after the newest one that a rank has."""

    async def start(self) -> None:
        """Open the row source; raise ``DataError`` if a resumed run has another number of rows."""
        check_num_rows(self._setup.num_rows, self._open().num_rows)

    async def next_batch(self, step: int, rank: int) -> TrainBatch | None:
        self._board.want(step)
        if self._board.wanted is not None:  # else the rank would wait until the next step is packed
            await self._fill()
        batch = await self._board.batch(step, rank)
        if batch is not None and (self._ahead is None or self._ahead.done()):
            self._ahead = asyncio.create_task(self._pack_ahead())
        return batch

    async def _pack_ahead(self) -> None:
        await asyncio.sleep(ANSWER_LEAVES_S)
        step = self._board.due
        if step is not None and step < self._setup.algorithm.num_steps:
            with suppress(Exception):  # the rank's own request raises it again
                await self._fill()

    async def complete_step(self, report: StepReport) -> None:
        """Keep the report and wait until the driver has it: until then, Ray repeats the call if this process dies."""
        await super().complete_step(report)
        await self._board.wait_for(lambda: self._seen >= report.step, SEEN_WITHIN_S)

    async def wait_updates(self, after_step: int, after_event: int, timeout_s: float) -> RunUpdates:
        self._seen = max(self._seen, after_step)
        # The newest report is kept for ``_last_step``.
        self._known_reports = list(self._reports(self._seen)) or self._known_reports[-1:]
        await self._board.notify()
        return await super().wait_updates(after_step, after_event, timeout_s)

    def _open(self) -> SequenceSource:
        if self._source is None:
            setup = self._setup
            enter_folder(setup.folder)
            tokenizer = load_tokenizer(setup.model)
            with forward_logs(self._report_once, warnings=True):
                self._source, held_out = open_run_sequences(
                    setup.data,
                    setup.model,
                    tokenizer,
                    algorithm=setup.algorithm,
                    learner=setup.learner,
                    seed=setup.seed,
                    pads_pairs=cache(partial(_pads_sequences, setup.model)),
                )
            if setup.algorithm.precomputes_reference:
                self._reference = ReferenceCache(reference_folder(setup.data, setup.model))
            if held_out:
                ranks = setup.learner.num_ranks
                self._held_out = self._pack(held_out, step=0, num_ranks=ranks, max_tokens=self._max_tokens)
        return self._source

    async def learner_died(self, cause: str) -> None:
        """Count a death of the learner group, which begins anew with the log-probs that are missing."""
        self._due.clear()
        if self._reference is not None:
            self._reference.forget_due()
        await super().learner_died(cause)

    async def reference_steps(self) -> list[int]:
        """Return the steps that ``reference_share`` is to be called for, in order."""
        source, setup = self._open(), self._setup
        steps = first_epoch(source, setup.data, setup.algorithm, first_step=setup.first_step, start=setup.cursor)
        return [*([HELD_OUT] if self._held_out else []), *steps]

    async def reference_share(self, step: int, rank: int) -> list[MiniBatch]:
        """Return a rank's share of a step, or of held-out rows, if the reference's log-probs of some row are missing.

        Otherwise it is empty, on all ranks.
        """
        self._open()
        assert self._reference is not None, "only asked for if log-probs are precomputed"
        if self._due.get(step) is False:
            return []
        if step not in (HELD_OUT, self._shares[0]):
            self._shares = step, self._pack_step(step, self._rows(step))
        batches = self._held_out if step == HELD_OUT else self._shares[1]
        if step not in self._due:
            self._due[step] = self._reference.is_due(batches)
        return batches[rank].mini_batches if self._due[step] else []

    async def add_reference(self, logprobs: Mapping[bytes, FloatArray]) -> None:
        """Keep the reference's log-probs of some sequences."""
        self._open()
        assert self._reference is not None, "only asked for if log-probs are precomputed"
        self._last_progress = time.monotonic()
        self._reference.add(logprobs)

    def _with_reference(self, batches: Sequence[TrainBatch]) -> None:
        """Give batches the log-probs of the reference, all of which are known, if they are precomputed."""
        if self._reference is None:
            return
        if num_written := self._reference.flush():
            text = f"reference log-probs of {num_written:,} sequences are stored in {self._reference.folder}"
            self._report_once(text)
        self._reference.fill(batches)

    def _report_once(self, message: str) -> None:
        """Report a message to the driver's user, who does not see this process's log; each message only once."""
        if message not in self._reported:
            self._reported.add(message)
            self._keep_event("data", "rows", message)

    async def held_out(self, rank: int) -> list[MiniBatch]:
        """Return a rank's share of the held-out rows, or an empty list if no rows are held out."""
        self._open()
        self._with_reference(self._held_out)
        return self._held_out[rank].mini_batches if self._held_out else []

    def _rows(self, step: int) -> list[Rollout]:
        """Return the rows of a step, and keep the place where the next one begins."""
        source = self._open()
        with forward_logs(self._report_once, warnings=True):
            self._seek(source, step)
            rows = source.take(self._setup.algorithm.groups_per_step)
        self._cursors[step + 1] = source.cursor
        return rows

    def _pack_step(self, step: int, rows: Sequence[Rollout]) -> list[TrainBatch]:
        setup = self._setup
        return self._pack(
            rows,
            step=step,
            num_ranks=setup.learner.num_ranks,
            max_tokens=self._max_tokens,
            num_minibatches=setup.algorithm.num_minibatches,
            num_epochs=setup.algorithm.num_epochs_per_step,
            seed=setup.seed + step,
        )

    def _batches(self, step: int) -> list[TrainBatch]:
        source = self._open()
        started = time.perf_counter()
        sequences = self._rows(step)
        batches = self._pack_step(step, sequences)
        self._with_reference(batches)
        cursor = self._cursors[step + 1]
        trained = [sequence for row in sequences for sequence in row.sequences]
        metrics = {
            "num_tokens": float(sum(len(sequence.token_ids) for sequence in trained)),
            "num_completion_tokens": float(sum(sequence.num_loss_tokens for sequence in trained)),
            "epoch": float(cursor.epoch),
            "rows/cut": float(sum(sequence.status is RolloutStatus.TRUNCATED for sequence in sequences)),
            **source.metrics,
            "time/pack": time.perf_counter() - started,
        }
        for batch in batches:
            batch.metrics = metrics
            batch.resume = {"epoch": cursor.epoch, "position": cursor.position}
            if source.num_rows is not None:
                batch.resume["num_rows"] = source.num_rows
        return batches

    def _seek(self, source: SequenceSource, step: int) -> None:
        """Move ``source`` to the first row of ``step``.

        A process that replaced a dead one reads through the rows from ``first_step`` on.
        """
        start = max(earlier for earlier in self._cursors if earlier <= step)
        source.seek(self._cursors[start])
        for taken_step in range(start, step):
            source.take(self._setup.algorithm.groups_per_step)
            self._cursors[taken_step + 1] = source.cursor

    def _keep_report(self, report: StepReport) -> None:
        if report.step > self._last_step():
            self._known_reports.append(report)

    def _keep_event(self, kind: str, subject: str, message: str) -> None:
        earlier = self._known_events[-1].number if self._known_events else 0
        number = max(time.time_ns(), earlier + 1)  # the time is higher than the numbers of an earlier process
        self._known_events.append(
            LedgerEvent(number=number, time=time.time(), kind=kind, subject=subject, message=message)
        )

    def _reports(self, after: int) -> Sequence[StepReport]:
        return [report for report in self._known_reports if report.step > after]

    def _events(self, after: int) -> Sequence[LedgerEvent]:
        return [event for event in self._known_events if event.number > after]

    def _last_step(self) -> int:
        return self._known_reports[-1].step if self._known_reports else -1

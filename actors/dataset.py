"""The dataset actor: serves packed batches of supervised rows, where an RL run has the replay actor."""

from __future__ import annotations

import time
from typing import Any

from rlpipe.configs.schema import AlgorithmConfig, DataConfig, LearnerConfig, ModelConfig
from rlpipe.data.chat import load_tokenizer
from rlpipe.data.packing import pack_step
from rlpipe.data.prompts import Cursor, SequenceSource, open_sft_rows
from rlpipe.imports import enter_folder
from rlpipe.replay.steps import StepBoard, StepReport
from rlpipe.types import TrainBatch


class DatasetActor:
    """Packs a step when the first rank asks for it; has the methods of ``ReplayActor`` that learners use."""

    def __init__(self, *, algorithm: AlgorithmConfig, learner: LearnerConfig) -> None:
        self._algorithm, self._learner = algorithm, learner
        self._board = StepBoard(num_ranks=learner.num_ranks)
        self._source: SequenceSource | None = None
        self._seed = 0

    async def start(self, data: DataConfig, model: ModelConfig, seed: int, cursor: Cursor, folder: str) -> None:
        """Opens the rows and goes to where training goes on; ``folder`` is the driver's working directory."""
        enter_folder(folder)
        source, _ = open_sft_rows(
            data, load_tokenizer(model), seed=seed, max_tokens=self._learner.max_tokens_per_microbatch
        )
        source.seek(cursor)
        self._source, self._seed = source, seed

    async def next_batch(self, step: int, rank: int) -> TrainBatch:
        """The rank's share of the step."""
        if self._board.want(step):
            await self._board.put(step, self._pack(step))
        return await self._board.batch(step, rank)

    async def complete_step(self, report: StepReport) -> None:
        """Called by the first rank once the step is trained."""
        await self._board.complete(report)

    async def wait_completed(self, timeout_s: float) -> list[StepReport]:
        """The reports that nobody has taken yet, as soon as there is one; an empty list after ``timeout_s``."""
        return await self._board.wait_completed(timeout_s)

    async def describe(self) -> dict[str, Any]:
        """Its state in a few numbers, for error messages."""
        return {"step_wanted": self._board.wanted}

    def _pack(self, step: int) -> list[TrainBatch]:
        assert self._source is not None, "start() comes first"
        started = time.perf_counter()
        sequences = self._source.take(self._algorithm.groups_per_step)
        batches = pack_step(
            sequences,
            step=step,
            num_ranks=self._learner.num_ranks,
            max_tokens=self._learner.max_tokens_per_microbatch,
            num_minibatches=self._algorithm.num_minibatches,
            num_epochs=self._algorithm.num_epochs_per_step,
            seed=self._seed + step,
        )
        place = self._source.cursor
        metrics = {
            "num_tokens": float(sum(len(sequence.token_ids) for sequence in sequences)),
            "num_completion_tokens": float(sum(sequence.num_loss_tokens for sequence in sequences)),
            "epoch": float(place.epoch),
            **{f"rows/skipped/{kind}": float(count) for kind, count in self._source.skip_counts.items()},
            "time/pack": time.perf_counter() - started,
        }
        for batch in batches:
            batch.metrics = metrics
            batch.resume = {"cursor": {"epoch": place.epoch, "position": place.position}, "pending": []}
        return batches

"""The training loop that a learner rank runs under Ray Train."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.exceptions import RayActorError, RayTaskError

from rlpipe.actors.feature_rank import FeatureRank, Waits
from rlpipe.actors.learner_setup import LearnerSetup
from rlpipe.actors.publishing import Calls, make_publisher
from rlpipe.configs.tree import to_tree
from rlpipe.errors import RlpipeError, WaitTimeout
from rlpipe.learner.checkpoint.checkpoint_files import newest_of_run
from rlpipe.learner.checkpoint.checkpoints import CheckpointStore
from rlpipe.learner.checkpoint.save_policy import export_policy
from rlpipe.learner.policy import load_policy
from rlpipe.learner.step import Learner
from rlpipe.learner.stopping import LossTarget
from rlpipe.learner.threads import num_threads
from rlpipe.replay.ledger.database import NAME as LEDGER
from rlpipe.replay.step_queue import StepReport
from rlpipe.types import MiniBatch, TrainBatch

POLL_S = 5.0
"""Seconds between a rank's heartbeats, and between its checks for a restarted weights actor while it waits."""


def run_rank(setup: LearnerSetup) -> None:
    """Train on one rank until the last step is trained, checkpointed and exported, or until the run stops.

    An ``RlpipeError`` ends the run: the replay actor passes it to the controller. Any other error kills the group,
    which Ray Train then restarts.
    """
    try:
        LearnerLoop(setup).run()
    except (RlpipeError, RayTaskError) as error:
        cause = getattr(error, "cause", error)
        if not isinstance(cause, RlpipeError):
            raise
        ray.get(setup.batches.fail.remote(cause), timeout=setup.call_timeout_s)


class LearnerLoop:
    """Loop of one rank: it pulls its share of a step, trains it, publishes the new version, and checkpoints."""

    def __init__(self, setup: LearnerSetup) -> None:
        self._setup = setup
        self._rank = ray.train.get_context().get_world_rank()
        self._step = 0
        self._life = 0
        self._saved_step = -1
        self._num_notes = 0
        threading.Thread(target=self._give_signs_of_life, name="signs-of-life", daemon=True).start()
        torch.set_num_threads(num_threads(setup.learner))
        torch.manual_seed(setup.seed)
        self._policy = load_policy(
            setup.model,
            setup.learner,
            _device(),
            seed=setup.seed,
            workload=setup.workload,
        )
        self._learner = Learner(
            self._policy,
            setup.learner,
            setup.algorithm,
            temperature=setup.sampling.temperature,
            max_completion_tokens=setup.sampling.max_tokens,
            seed=setup.seed,
        )
        self._calls = Calls(self._rank, setup.call_timeout_s)
        self._publisher = make_publisher(self._policy, setup, self._calls)
        self._target = LossTarget(setup.algorithm.stop_loss)
        self._store = CheckpointStore(setup.output / "checkpoints", keep=setup.checkpoint.keep)
        self._features = self._make_features()

    def _make_features(self) -> FeatureRank | None:
        """Return the feature scorer if the run's rewards are computed by the learner, or None."""
        ebft, setup = self._setup.algorithm.ebft, self._setup
        if not ebft.reward or ebft.features.weights != "learner":
            return None
        assert self._learner.reference is not None, "make_reference makes the feature network"
        return FeatureRank(self._policy, self._learner.reference, ebft.features, setup.batches, self._calls)

    def run(self) -> None:
        setup, num_steps = self._setup, self._setup.algorithm.num_steps
        checkpoint = newest_of_run(setup.output / "checkpoints", setup.resume_from)
        first_step = 0 if checkpoint is None else self._store.load(checkpoint, self._learner).step
        if self._rank == 0:
            self._life = self._calls.get(
                setup.batches.begin_life.remote(), "the number of this life of the learner group"
            )
            self._post_notes()
        self._publisher.publish(first_step, self._life)
        follows = setup.weights_actor is not None
        held_out = [] if follows else self._calls.get(setup.batches.held_out.remote(self._rank), "the held-out rows")
        evaluations = self._evaluate(held_out, first_step) if first_step < num_steps else {}
        batch: TrainBatch | None = None
        for step in range(first_step, num_steps):
            self._step = step
            previous, (batch, waited) = batch, self._next_batch(step)
            if batch is None:
                if previous is not None and self._saved_step < step:
                    self._checkpoint(step, previous)
                return
            metrics = self._learner.train_step(batch)
            self._post_notes()
            self._publisher.publish(step + 1, self._life)
            last = step + 1 == num_steps or self._target.reached(metrics.get("loss", math.nan))
            if last or self._evaluation_due(step + 1):
                evaluations |= self._evaluate(held_out, step + 1)
            metrics = {**batch.metrics, **metrics, "time/wait": waited}
            self._report(step, metrics, last=last and not follows, evaluations=evaluations)
            evaluations = {}
            every = setup.checkpoint.every_steps
            if last or (every and (step + 1) % every == 0):
                self._checkpoint(step + 1, batch)
            if last:
                break
        if follows:
            self._step = num_steps
            batch, _ = self._next_batch(num_steps)
            if batch is None:
                return
            self._report(num_steps, self._learner.compare(batch), last=True)
        self._score_the_rest()
        self._calls.await_all()
        export_policy(self._policy, setup.output / "policy")

    def _post_notes(self) -> None:
        """Post, from the first rank, the notes on the policy that are new since the last call."""
        notes = self._policy.notes if self._rank == 0 else []
        for note in notes[self._num_notes :]:
            self._calls.get(self._setup.batches.note.remote("model", "learner", note), "a note to be taken")
        self._num_notes = len(notes)

    def _evaluation_due(self, version: int) -> bool:
        every = self._setup.evaluate_every
        return every > 0 and version % every == 0

    def _evaluate(self, held_out: Sequence[MiniBatch], version: int) -> dict[int, dict[str, float]]:
        return {version: self._learner.evaluate(held_out)} if held_out else {}

    @property
    def _waiter(self) -> Waits:
        return self._publisher if self._features is None else self._features

    def _next_batch(self, step: int) -> tuple[TrainBatch | None, float]:
        """Return the rank's share of the step, or None if the run stops, and the seconds spent waiting for it."""
        started = time.perf_counter()
        limit = self._setup.start_timeout_s + self._setup.step_timeout_s
        call: Any = self._setup.batches.next_batch.remote(step, self._rank)
        while not self._waiter.wait(call, min(POLL_S, limit)):
            if time.perf_counter() - started >= limit:
                raise WaitTimeout(
                    f"learner rank {self._rank} has waited {limit:g} seconds (cluster.start_timeout_s and "
                    f"cluster.step_timeout_s) for the batch of step {step}; the replay actor's state: "
                    f"{self._describe_batches()}"
                )
            self._publisher.publish_again()
        batch: TrainBatch | None = ray.get(call)
        return batch, time.perf_counter() - started

    def _score_the_rest(self) -> None:
        """Score the groups of evaluations that are still under way, until no more will come."""
        if self._features is not None:
            call: Any = self._setup.batches.features_ended.remote()
            while not self._features.wait(call, POLL_S):
                self._publisher.publish_again()

    def _describe_batches(self) -> str:
        limit = self._setup.call_timeout_s
        try:
            return str(ray.get(self._setup.batches.describe.remote(), timeout=limit))
        except (TimeoutError, RayActorError, RayTaskError):
            return f"unknown, as it has not answered for {limit:g} seconds (cluster.call_timeout_s)"

    def _report(
        self,
        step: int,
        metrics: dict[str, float],
        *,
        last: bool,
        evaluations: Mapping[int, dict[str, float]] | None = None,
    ) -> None:
        if self._rank == 0:
            report = StepReport(step=step, metrics=metrics, last=last, evaluations=dict(evaluations or {}))
            self._calls.in_order("report", self._setup.batches.complete_step, report)

    def _checkpoint(self, step: int, batch: TrainBatch) -> None:
        """Write a checkpoint; report each failure to write one, after which the run goes on with the last whole one."""
        self._calls.await_answer("report")  # no step before a checkpoint may go unreported
        setup = self._setup
        # The config has paths as the user wrote them, the model has them resolved.
        extra = {"resume": batch.resume, "config": dict(setup.resolved_config), "model": to_tree(setup.model)}
        try:
            self._store.save(self._learner, step=step, extra=extra, add=self._add_ledger)
        except OSError as error:
            if self._rank == 0:
                message = f"the checkpoint after step {step} can't be written, the last whole one stays: {error}"
                self._calls.get(self._setup.batches.note.remote("checkpoint", "learner", message), "a note to be taken")
            return
        self._saved_step = step
        if self._rank == 0:
            self._calls.get(self._setup.batches.checkpointed.remote(step), "the ledger to count the checkpoint")

    def _add_ledger(self, folder: Path) -> dict[str, Any]:
        """Copy the ledger into the checkpoint and return its run's id; raise ``OSError`` if it can't be written."""
        try:
            run_id = self._calls.get(self._setup.batches.back_up.remote(folder / LEDGER), "the ledger to be copied")
        except RlpipeError as error:
            raise OSError(str(error)) from error
        return {"run_id": run_id}

    def _give_signs_of_life(self) -> None:
        while True:
            self._setup.batches.beat.remote(self._rank, self._step)
            time.sleep(POLL_S)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

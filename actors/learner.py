"""Actor of one learner rank: it trains steps and publishes weights."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import ray
import ray.train
import torch
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from rlpipe.actors.learner_setup import LearnerSetup
from rlpipe.actors.remote import get_remote
from rlpipe.common import run_files
from rlpipe.configs.options import to_tree
from rlpipe.configs.schema.algorithm_config import FeatureConfig
from rlpipe.configs.serving import published_kind
from rlpipe.errors import RlpipeError, WaitTimeout
from rlpipe.hardware.cgroup import learner_threads
from rlpipe.hardware.peer_access import settle_peer_access
from rlpipe.learner.checkpoint_files import newest_of_run
from rlpipe.learner.checkpoints import CheckpointStore, export_policy
from rlpipe.learner.objectives import Reference
from rlpipe.learner.policy import Policy, load_policy
from rlpipe.learner.profiling import StepProfiler, memory_metrics
from rlpipe.learner.publish import DirectSender, publish_weights
from rlpipe.learner.step import Learner, LossTarget
from rlpipe.learner.strategies.sharding import Reduce
from rlpipe.replay.step_queue import StepReport
from rlpipe.scoring.feature_scorer import learner_feature_scorer
from rlpipe.types import MiniBatch, ServedRecord, TrainBatch, Transfer, WeightsKind, WeightsManifest
from rlpipe.weights.buckets import BucketMemory


class RemoteCalls:
    """A rank's calls of other actors, each with a time limit, and one at a time for each kind."""

    def __init__(self, rank: int, limit_s: float) -> None:
        self._rank, self._limit_s = rank, limit_s
        self._unanswered: dict[str, tuple[Any, float]] = {}

    def get(self, call: Any, what: str, *, more_s: float = 0.0) -> Any:
        limit = self._limit_s + more_s
        return get_remote(call, f"learner rank {self._rank}: {what}", within=limit, option="cluster.call_timeout_s")

    def in_order(self, kind: str, method: Any, *arguments: Any, more_s: float = 0.0) -> None:
        """Call an actor once the last call of the same kind has been answered.

        An actor may take calls that wait for it at the same time in any order.
        """
        self.await_answer(kind)
        self._unanswered[kind] = method.remote(*arguments), more_s

    def await_answer(self, kind: str) -> None:
        if kind in self._unanswered:
            call, more_s = self._unanswered.pop(kind)
            self.get(call, f"the answer to its last {kind}", more_s=more_s)

    def await_all(self) -> None:
        for kind in list(self._unanswered):
            self.await_answer(kind)


class Publisher(Protocol):
    """One rank's part in publishing; all ranks must make the same calls in the same order."""

    def publish(self, version: int, incarnation: int) -> None:
        """Send the current weights to the engines; ``incarnation`` counts the learner groups started so far."""

    def publish_again(self) -> None:
        """Publish the same version again if the weights actor was restarted and has none, or an engine needs it."""

    def wait(self, call: Any, timeout_s: float) -> bool:
        """Wait for a call's answer, and return whether it has arrived."""

    def digest_of(self, version: int) -> ServedRecord | None:
        """Return kind and digest of a version, on the first rank, if it was the last one to be published."""


class NoPublisher:
    """Publisher of runs without engines, as in SFT."""

    def publish(self, version: int, incarnation: int) -> None:
        pass

    def publish_again(self) -> None:
        pass

    def wait(self, call: Any, timeout_s: float) -> bool:
        return is_answered(call, timeout_s)

    def digest_of(self, version: int) -> ServedRecord | None:
        return None


class StorePublisher:
    """Publisher that puts weights into Ray's object store, one object per bucket, and calls the weights actor."""

    def __init__(self, policy: Policy, setup: LearnerSetup, calls: RemoteCalls, weights: ActorHandle) -> None:
        self._policy, self._setup, self._calls, self._weights = policy, setup, calls, weights
        self._memory = BucketMemory()
        self._kind = WeightsKind(published_kind(setup.model, setup.weights))
        self._published: tuple[WeightsManifest, list[ray.ObjectRef], int] | None = None

    def publish(self, version: int, incarnation: int) -> None:
        buckets: list[ray.ObjectRef] = []
        manifest = publish_weights(
            self._policy,
            version=version,
            bucket_bytes=self._setup.weights.bucket_bytes,
            emit=lambda bucket: buckets.append(ray.put(bucket)),
            memory=self._memory,
            kind=self._kind,
        )
        if manifest is not None:
            self._published = (manifest, buckets, incarnation)
            self._send_version()

    def publish_again(self) -> None:
        if self._published is not None and newest_version(self._calls, self._weights) < 0:
            self._send_version()

    def _send_version(self) -> None:
        """Send the version; the answer may take two loads and, if the run was resumed, the start of its other parts."""
        assert self._published is not None, "only the first rank has something to tell"
        more_s = 2 * self._setup.weights.timeout_s + self._setup.start_timeout_s
        self._calls.in_order("publish", self._weights.publish, *self._published, more_s=more_s)

    def wait(self, call: Any, timeout_s: float) -> bool:
        return is_answered(call, timeout_s)

    def digest_of(self, version: int) -> ServedRecord | None:
        if self._published is None or self._published[0].version != version:
            return None
        return self._published[0].kind.value, self._published[0].digest, self._policy.served_dtype


class DirectPublisher:
    """Publisher that has the engines wait, sends them the weights, and then has their digests checked.

    All ranks gather the weights that the first one sends, so they must agree on when to send, also while they wait
    for a batch.
    """

    def __init__(self, policy: Policy, setup: LearnerSetup, calls: RemoteCalls, weights: ActorHandle) -> None:
        self._policy, self._calls, self._weights = policy, calls, weights
        self._timeout_s, self._start_timeout_s = setup.weights.timeout_s, setup.start_timeout_s
        self._sender = DirectSender(policy, setup.weights)
        self._is_first = policy.sharding.rank == 0
        self._last = (0, 0)
        self._digest = ""

    def publish(self, version: int, incarnation: int) -> None:
        self._last = (version, incarnation)
        transfer = self._offer(version, incarnation) if self._is_first else None
        if not self._any_rank(transfer is not None):
            return
        self._digest = self._sender.send(transfer if transfer is not None and transfer.num_processes > 1 else None)
        if self._is_first:
            call: Any = self._weights.publish.remote(self._describe(version, digest=self._digest), [], incarnation)
            self._calls.get(call, "the engines to serve the new weights", more_s=self._timeout_s)

    def publish_again(self) -> None:
        if self._any_rank(self._is_first and newest_version(self._calls, self._weights) < 0):
            self.publish(*self._last)

    def wait(self, call: Any, timeout_s: float) -> bool:
        return not self._any_rank(not is_answered(call, timeout_s))

    def digest_of(self, version: int) -> ServedRecord | None:
        if not self._digest or self._last[0] != version:
            return None
        return WeightsKind.FULL.value, self._digest, self._policy.served_dtype

    def _offer(self, version: int, incarnation: int) -> Transfer | None:
        """Offer a version to the engines; return the transfer that both sides join, or None if it is outdated."""
        transfer = self._sender.open(ray.util.get_node_ip_address())
        call: Any = self._weights.offer.remote(self._describe(version, transfer=transfer), incarnation)
        num_processes = self._calls.get(call, "the engines to be ready", more_s=self._start_timeout_s)
        return replace(transfer, num_processes=num_processes) if num_processes else None

    def _describe(self, version: int, *, digest: str = "", transfer: Transfer | None = None) -> WeightsManifest:
        return WeightsManifest(
            version=version,
            kind=WeightsKind.FULL,
            digest=digest,
            num_buckets=0,
            num_bytes=self._sender.num_bytes,
            transfer=transfer,
        )

    def _any_rank(self, flag: bool) -> bool:
        return bool(self._policy.sharding.reduce(torch.tensor(float(flag)), Reduce.MAX))


def is_answered(call: Any, timeout_s: float) -> bool:
    return bool(ray.wait([call], timeout=timeout_s)[0])


def newest_version(calls: RemoteCalls, weights: ActorHandle) -> int:
    version: int = calls.get(weights.newest.remote(), "the weights actor to report the newest version")
    return version


def make_publisher(policy: Policy, setup: LearnerSetup, calls: RemoteCalls) -> Publisher:
    if setup.weights_actor is None:
        return NoPublisher()
    kind = DirectPublisher if setup.weights.transport == "nccl" else StorePublisher
    return kind(policy, setup, calls, setup.weights_actor)


ANSWERED, NOTHING, NOT_FIRST = -1, -2, -3
"""Results of a round of waiting other than a job, whose number is 0 or more."""


class AnswerWaiter(Protocol):
    def wait(self, call: Any, timeout_s: float) -> bool:
        """Wait for a call's answer, and return whether it has arrived."""


class FeatureRank:
    """A rank's wait for remote calls, during which it scores the groups that are due.

    All ranks must make the same calls in the same order. They act in the order in which the first rank learns of
    answers and jobs, because they share the model.
    """

    def __init__(
        self, policy: Policy, reference: Reference, config: FeatureConfig, batches: ActorHandle, calls: RemoteCalls
    ) -> None:
        self._sharding, self._batches, self._calls = policy.sharding, batches, calls
        self._scorer = learner_feature_scorer(policy, reference, config)
        self._due: Any = None

    def wait(self, call: Any, timeout_s: float) -> bool:
        """Wait for ``call``; return whether it is answered: False after ``timeout_s``, or once groups were scored."""
        outcome = self._wait_on_first(call, timeout_s) if self._sharding.rank == 0 else NOT_FIRST
        agreed = int(self._sharding.reduce(torch.tensor(float(outcome)), Reduce.MAX))
        if agreed >= 0:
            self._score(agreed)
        return agreed == ANSWERED

    def _wait_on_first(self, call: Any, timeout_s: float) -> int:
        """Wait, on the first rank, for a job or for ``call``; jobs come first, because a batch may depend on them."""
        if self._due is None:
            self._due = self._batches.features_due.remote(timeout_s)
        deadline = time.monotonic() + timeout_s
        while (remaining_s := deadline - time.monotonic()) > 0:
            ready, _ = ray.wait([self._due, call], num_returns=1, timeout=remaining_s)
            if self._due in ready:
                job = ray.get(self._due)
                self._due = None
                if job is not None:
                    return int(job)
                self._due = self._batches.features_due.remote(timeout_s)
            elif ready:
                return ANSWERED
        return NOTHING

    def _score(self, job: int) -> None:
        rank = self._sharding.rank
        groups = self._calls.get(self._batches.feature_share.remote(job, rank), "the groups to compute features of")
        scores = self._scorer.score(groups)
        self._calls.get(self._batches.features_scored.remote(job, rank, scores), "the replay actor to store the scores")


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
        self._step, self._saved_step = 0, -1
        self._incarnation, self._num_notes = 0, 0
        threading.Thread(target=self._send_heartbeats, name="heartbeats", daemon=True).start()
        torch.set_num_threads(learner_threads(setup.learner))
        torch.manual_seed(setup.seed)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        note = settle_peer_access() if device.type == "cuda" and setup.learner.num_ranks > 1 else None
        self._policy = load_policy(setup.model, setup.learner, device, seed=setup.seed, workload=setup.workload)
        if setup.served_dtype is not None:
            self._policy.served_dtype = setup.served_dtype
        if note is not None:
            self._policy.sharding.notes.append(note)
        self._learner = Learner(
            self._policy,
            setup.learner,
            setup.algorithm,
            temperature=setup.sampling.temperature,
            max_completion_tokens=setup.sampling.max_tokens,
            seed=setup.seed,
        )
        self._calls = RemoteCalls(self._rank, setup.call_timeout_s)
        self._publisher = make_publisher(self._policy, setup, self._calls)
        self._target = LossTarget(setup.algorithm.stop_loss)
        profiles, steps = setup.output / run_files.PROFILES, setup.learner.profile_steps
        self._profiler = StepProfiler(profiles, steps, rank=self._rank, device=self._policy.device)
        self._store = CheckpointStore(setup.output / run_files.CHECKPOINTS, keep=setup.checkpoint.keep)
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
        if setup.algorithm.precomputes_reference:
            self._precompute_reference()
        checkpoint = newest_of_run(setup.output / run_files.CHECKPOINTS, setup.resume_from)
        loaded = None if checkpoint is None else self._store.load(checkpoint, self._learner)
        first_step = 0 if loaded is None else loaded.step
        if loaded is not None and loaded.extra["config"]["algorithm"]["num_steps"] == num_steps:
            self._target.restore(loaded.extra.get("losses", ()))
        if self._rank == 0:
            self._incarnation = self._calls.get(
                setup.batches.begin_incarnation.remote(), "the number of the learner group's starts"
            )
            self._post_messages()
        self._publisher.publish(first_step, self._incarnation)
        if loaded is not None:
            self._record_checkpoint(first_step)  # the ranks may have died between writing and recording it
        follows = setup.weights_actor is not None
        held_out = [] if follows else self._calls.get(setup.batches.held_out.remote(self._rank), "the held-out rows")
        end = first_step if self._target.is_met else num_steps
        evaluations = self._evaluate(held_out, first_step) if first_step < end else {}
        batch: TrainBatch | None = None
        for step in range(first_step, end):
            self._step = step
            previous, (batch, waited) = batch, self._next_batch(step)
            if batch is None:
                if previous is not None and self._saved_step < step:
                    self._checkpoint(step, previous)
                return
            with self._profiler.step(step + 1):
                metrics = self._learner.train_step(batch)
            metrics |= memory_metrics(self._policy.device)
            self._post_messages()
            if self._setup.weights.publishes(step + 1, self._setup.algorithm.num_steps):
                self._publisher.publish(step + 1, self._incarnation)
            last = step + 1 == num_steps or self._target.reached(metrics.get("loss", math.nan))
            if last or self._evaluation_due(step + 1):
                evaluations |= self._evaluate(held_out, step + 1)
            metrics = {**batch.metrics, **metrics, "time/wait": waited}
            self._report(batch, metrics, evaluations, last=last and not follows)
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
            self._report(batch, self._learner.compare(batch), {}, last=True)
        self._score_remaining()
        self._calls.await_all()
        export_policy(self._policy, setup.output / run_files.POLICY)

    def _precompute_reference(self) -> None:
        """Compute the reference's log-probs that the cache lacks, while the policy has its initial weights."""
        batches = self._setup.batches
        for step in self._calls.get(batches.reference_steps.remote(), "the steps to compute log-probs of"):
            call: Any = batches.reference_share.remote(step, self._rank)
            share = self._calls.get(call, f"the rows of step {step}", more_s=self._setup.start_timeout_s)
            if share:
                logprobs = self._learner.reference_logprobs(share)
                self._calls.get(batches.add_reference.remote(logprobs), "the dataset actor to store log-probs")

    def _post_messages(self) -> None:
        """Post, from the first rank, the notes on the policy that are new since the last call."""
        notes = self._policy.notes if self._rank == 0 else []
        for note in notes[self._num_notes :]:
            self._calls.get(self._setup.batches.note.remote("model", "learner", note), "a message to be recorded")
        self._num_notes = len(notes)

    def _evaluation_due(self, version: int) -> bool:
        every = self._setup.evaluate_every
        return every > 0 and version % every == 0

    def _evaluate(self, held_out: Sequence[MiniBatch], version: int) -> dict[int, dict[str, float]]:
        return {version: self._learner.evaluate(held_out)} if held_out else {}

    @property
    def _waiter(self) -> AnswerWaiter:
        return self._publisher if self._features is None else self._features

    def _next_batch(self, step: int) -> tuple[TrainBatch | None, float]:
        """Return the rank's share of the step, or None if the run stops, and the seconds spent waiting for it."""
        started = time.perf_counter()
        call: Any = self._setup.batches.next_batch.remote(step, self._rank)
        self._await(call, f"the batch of step {step}")
        batch: TrainBatch | None = ray.get(call)
        return batch, time.perf_counter() - started

    def _score_remaining(self) -> None:
        """Score the groups of evaluations that are still under way, until no more will come."""
        if self._features is not None:
            self._await(self._setup.batches.features_ended.remote(), "the end of the evaluations")

    def _await(self, call: Any, what: str) -> None:
        """Wait for a call's answer, and meanwhile publish and score what is due; raise ``WaitTimeout``."""
        started = time.perf_counter()
        limit = self._setup.start_timeout_s + self._setup.step_timeout_s
        while not self._waiter.wait(call, min(POLL_S, limit)):
            if time.perf_counter() - started >= limit:
                raise WaitTimeout(
                    f"learner rank {self._rank} has waited {limit:g} seconds (cluster.start_timeout_s and "
                    f"cluster.step_timeout_s) for {what}; the replay actor's state: {self._describe_batches()}"
                )
            self._publisher.publish_again()

    def _describe_batches(self) -> str:
        limit = self._setup.call_timeout_s
        try:
            return str(ray.get(self._setup.batches.describe.remote(), timeout=limit))
        except (TimeoutError, RayActorError, RayTaskError):
            return f"unknown, as it has not answered for {limit:g} seconds (cluster.call_timeout_s)"

    def _report(
        self, batch: TrainBatch, metrics: dict[str, float], evaluations: dict[int, dict[str, float]], *, last: bool
    ) -> None:
        differences = self._learner.token_differences(batch)
        if self._rank == 0:
            report = StepReport(
                step=batch.step, metrics=metrics, last=last, evaluations=evaluations, differences=differences
            )
            self._calls.in_order("report", self._setup.batches.complete_step, report)

    def _checkpoint(self, step: int, batch: TrainBatch) -> None:
        """Write a checkpoint; report each failure to write one, after which the run goes on with the last whole one."""
        self._calls.await_answer("report")  # no step before a checkpoint may go unreported
        setup = self._setup
        # The config has paths as the user wrote them, the model has them resolved.
        extra: dict[str, Any] = {"resume": batch.resume, "config": dict(setup.resolved_config)}
        extra |= {"model": to_tree(setup.model), "losses": self._target.losses}
        try:
            self._store.save(self._learner, step=step, extra=extra, add=self._add_ledger)
        except OSError as error:
            if self._rank == 0:
                message = f"the checkpoint after step {step} can't be written, the last complete one is kept: {error}"
                self._calls.get(
                    self._setup.batches.note.remote("checkpoint", "learner", message), "a message to be recorded"
                )
            return
        self._saved_step = step
        self._record_checkpoint(step)

    def _record_checkpoint(self, step: int) -> None:
        if self._rank == 0:
            recorded: Any = self._setup.batches.checkpointed.remote(step, self._publisher.digest_of(step))
            self._calls.get(recorded, "the ledger to record the checkpoint")

    def _add_ledger(self, folder: Path) -> dict[str, Any]:
        """Copy the ledger into the checkpoint and return its run's id; raise ``OSError`` if it can't be written."""
        try:
            call: Any = self._setup.batches.back_up.remote(folder / run_files.LEDGER)
            # A ledger of many long completions has tens of gigabytes.
            run_id = self._calls.get(call, "the ledger to be copied", more_s=self._setup.step_timeout_s)
        except RlpipeError as error:
            raise OSError(str(error)) from error
        return {"run_id": run_id}

    def _send_heartbeats(self) -> None:
        while True:
            self._setup.batches.heartbeat.remote(self._rank, self._step)
            time.sleep(POLL_S)

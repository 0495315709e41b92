"""The learner group: the loop that every rank runs under Ray Train."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import WORKER_GROUP_START_TIMEOUT_S_ENV_VAR
from ray.train.v2._internal.execution.callback import RayTrainCallback

from rlpipe.configs.schema import (
    AlgorithmConfig,
    CheckpointConfig,
    LearnerConfig,
    ModelConfig,
    SamplingConfig,
    WeightsConfig,
)
from rlpipe.errors import WaitTimeout
from rlpipe.learner.checkpoint import CheckpointStore
from rlpipe.learner.export import export_policy
from rlpipe.learner.policy import load_policy
from rlpipe.learner.publish import publish_weights
from rlpipe.learner.step import Learner
from rlpipe.learner.stopping import LossTarget
from rlpipe.replay.steps import StepReport
from rlpipe.types import TrainBatch
from rlpipe.weights import BucketMemory


@dataclass(kw_only=True, frozen=True)
class LearnerSetup:
    """What a rank needs for a run; ``weights_actor`` is None where no engine follows, as in SFT."""

    model: ModelConfig
    algorithm: AlgorithmConfig
    learner: LearnerConfig
    sampling: SamplingConfig
    weights: WeightsConfig
    checkpoint: CheckpointConfig
    output: Path
    seed: int
    resume_from: Path | None
    resolved_config: Mapping[str, Any]
    batches: ActorHandle
    weights_actor: ActorHandle | None
    timeout_s: float


class LearnerTrainer(TorchTrainer):
    """Ray Train without the helper that looks for its controller in whatever cluster this machine started last.

    Where that is another cluster, the helper finds no controller and removes the learner's placement group. What it
    is for, freeing the group after a crash, Ray does by itself when the job ends.
    """

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        callbacks: list[RayTrainCallback] = super()._create_default_callbacks()  # type: ignore[misc]
        return [callback for callback in callbacks if not isinstance(callback, PlacementGroupCleanerCallback)]


def make_trainer(setup: LearnerSetup, run_name: str, *, schedule_timeout_s: float) -> TorchTrainer:
    """The Ray Train job whose workers are the learner ranks.

    ``fit`` raises ``ControllerError`` if the cluster has no room for them within ``schedule_timeout_s``.
    """
    learner = setup.learner
    per_rank = {"CPU": learner.num_cpus, "GPU": learner.num_gpus, **learner.resources}
    os.environ[WORKER_GROUP_START_TIMEOUT_S_ENV_VAR] = str(schedule_timeout_s)  # Ray Train has no other way
    return LearnerTrainer(
        train_loop,
        train_loop_config={"setup": setup},
        scaling_config=ScalingConfig(
            num_workers=learner.num_ranks, use_gpu=learner.num_gpus > 0, resources_per_worker=per_rank
        ),
        run_config=RunConfig(
            name=run_name,
            storage_path=str(setup.output / "ray_train"),
            failure_config=FailureConfig(  # type: ignore[call-arg]
                max_failures=0, max_preemption_failures=0, controller_failure_limit=0
            ),
        ),
    )


def train_loop(config: dict[str, Any]) -> None:
    """Runs on every rank, until the last step is trained, checkpointed and exported."""
    LearnerLoop(config["setup"]).run()


class LearnerLoop:
    """One rank: pulls its share of a step, trains it, publishes the new version, and checkpoints."""

    def __init__(self, setup: LearnerSetup) -> None:
        self._setup = setup
        self._rank = ray.train.get_context().get_world_rank()
        torch.set_num_threads(setup.learner.num_threads or max(1, int(setup.learner.num_cpus)))
        torch.manual_seed(setup.seed)
        self._policy = load_policy(setup.model, setup.learner, _device(), seed=setup.seed)
        self._learner = Learner(
            self._policy,
            setup.learner,
            setup.algorithm,
            temperature=setup.sampling.temperature,
            max_completion_tokens=setup.sampling.max_tokens,
        )
        self._bucket_memory = BucketMemory()
        self._unanswered: dict[str, ray.ObjectRef] = {}
        self._target = LossTarget(setup.algorithm.stop_loss)
        self._store = CheckpointStore(setup.output / "checkpoints", keep=setup.checkpoint.keep)

    def run(self) -> None:
        setup, num_steps = self._setup, self._setup.algorithm.num_steps
        first_step = 0
        if setup.resume_from is not None:
            first_step = self._store.load(setup.resume_from, self._learner).step
        self._publish(first_step)
        follows = setup.weights_actor is not None
        for step in range(first_step, num_steps):
            batch, waited = self._next_batch(step)
            metrics = self._learner.train_step(batch)
            self._publish(step + 1)
            last = step + 1 == num_steps or self._target.reached(metrics.get("loss", math.nan))
            self._report(step, {**batch.metrics, **metrics, "time/wait": waited}, last=last and not follows)
            self._checkpoint(step + 1, batch, last=last)
            if last:
                break
        if follows:
            batch, _ = self._next_batch(num_steps)
            self._report(num_steps, self._learner.compare(batch), last=True)
        export_policy(self._policy, setup.output / "policy")

    def _next_batch(self, step: int) -> tuple[TrainBatch, float]:
        """The rank's share of the step, and the seconds that it had to wait."""
        started = time.perf_counter()
        limit = self._setup.timeout_s
        try:
            call: Any = self._setup.batches.next_batch.remote(step, self._rank)
            batch: TrainBatch = ray.get(call, timeout=limit)
        except GetTimeoutError:
            describe: Any = self._setup.batches.describe.remote()
            state = ray.get(describe, timeout=limit)
            raise WaitTimeout(
                f"learner rank {self._rank} has waited {limit:g} seconds (cluster.step_timeout_s) for the batch of "
                f"step {step}; the replay actor's state: {state}"
            ) from None
        return batch, time.perf_counter() - started

    def _publish(self, version: int) -> None:
        """Puts the weights into the object store, one object a bucket, and tells the weights actor."""
        if self._setup.weights_actor is None:
            return
        buckets: list[ray.ObjectRef] = []
        manifest = publish_weights(
            self._policy,
            version=version,
            bucket_bytes=self._setup.weights.bucket_bytes,
            emit=lambda bucket: buckets.append(ray.put(bucket)),
            memory=self._bucket_memory,
        )
        if self._rank == 0:
            self._in_order("publish", self._setup.weights_actor.publish, manifest, buckets)

    def _report(self, step: int, metrics: dict[str, float], *, last: bool) -> None:
        if self._rank == 0:
            report = StepReport(step=step, metrics=metrics, last=last)
            self._in_order("report", self._setup.batches.complete_step, report)

    def _in_order(self, kind: str, method: Any, *arguments: Any) -> None:
        """Calls an actor once the last call of the same kind has been answered: an actor may take calls that wait
        for it at one time in any order."""
        if kind in self._unanswered:
            ray.get(self._unanswered.pop(kind), timeout=self._setup.timeout_s)
        self._unanswered[kind] = method.remote(*arguments)

    def _checkpoint(self, step: int, batch: TrainBatch, *, last: bool) -> None:
        every = self._setup.checkpoint.every_steps
        if last or (every and step % every == 0):
            extra = {"resume": batch.resume, "config": dict(self._setup.resolved_config)}
            self._store.save(self._learner, step=step, extra=extra)


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

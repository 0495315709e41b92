"""The Ray Train job of the learner group; imports nothing that only ranks need, as its controller imports this."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.constants import TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S
from ray.train.torch import TorchConfig, TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import (
    ENABLE_PREEMPTION_WATCHER_ENV_VAR,
    HEALTH_CHECK_INTERVAL_S_ENV_VAR,
    WORKER_GROUP_START_TIMEOUT_S_ENV_VAR,
    get_env_vars_to_propagate,
)
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError as WorkerGroupStartupFailedError
from ray.train.v2._internal.exceptions import WorkerGroupStartupTimeoutError as WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.callback import RayTrainCallback
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2.api.callback import UserCallback
from ray.train.v2.api.result import Result

from rlpipe.actors.learner_setup import LearnerSetup
from rlpipe.actors.ray_internals import own_node
from rlpipe.actors.remote import describe_failure
from rlpipe.common import run_files

UNUSED = (PlacementGroupCleanerCallback, DatasetsCallback)
ENVIRONMENT = {
    HEALTH_CHECK_INTERVAL_S_ENV_VAR: "0.5",  # 2 by default; the delay until a death, or the run's end, is noticed
    ENABLE_PREEMPTION_WATCHER_ENV_VAR: "0",  # a process that warns of preemptions, which no rank asks for
    TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S: "5",  # 30 by default; the time until a hung rank is killed
}
"""Environment variables of Ray Train's controller, unless the driver's environment sets them."""
RESULT_TIMEOUT_S = 120.0


class ReportDeaths(UserCallback):
    """Callback that reports to the replay actor why the learner group died; Ray Train then restarts the group."""

    def __init__(self, batches: ActorHandle, timeout_s: float) -> None:
        self._batches, self._timeout_s = batches, timeout_s

    def after_exception(self, run_context: TrainRunContext, worker_exceptions: dict[int, Exception]) -> None:
        causes = {rank: describe_failure(error) for rank, error in sorted(worker_exceptions.items())}
        ray.get(
            self._batches.learner_died.remote("; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())),
            timeout=self._timeout_s,
        )


class LearnerTrainer(TorchTrainer):
    """Trainer without two of Ray Train's default callbacks (``UNUSED``).

    The first looks for its controller in the cluster that this machine started last; if that is another cluster, it
    finds no controller and removes the learner's placement group. Its purpose is to free the group after a crash,
    which Ray does anyway when the job ends. The second starts a process that serves Ray datasets, which are not used.

    ``started`` is called with the controller's handle, which Ray Train does not expose; ``environment`` holds the
    controller's environment variables.
    """

    def __init__(
        self, *args: Any, started: Callable[[ActorHandle], None], environment: Mapping[str, str], **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._started, self._environment = started, environment

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        environment = {"env_vars": {**get_env_vars_to_propagate(), **self._environment}}
        options: Any = ray.remote(num_cpus=0, label_selector=own_node(), runtime_env=environment)
        controller = options(TrainController).remote(**arguments)
        self._started(controller)
        ray.get(controller.run.remote())  # as long as the run; Ray ends it if the controller dies
        result: Result = ray.get(controller.get_result.remote(), timeout=RESULT_TIMEOUT_S)
        return result

    def _create_default_callbacks(self) -> list[RayTrainCallback]:
        callbacks: list[RayTrainCallback] = super()._create_default_callbacks()  # type: ignore[misc]
        return [callback for callback in callbacks if not isinstance(callback, UNUSED)]


def make_trainer(
    setup: LearnerSetup,
    run_name: str,
    *,
    schedule_timeout_s: float,
    started: Callable[[ActorHandle], None],
    controller_variables: Mapping[str, str],
    rank_variables: Mapping[str, str],
) -> TorchTrainer:
    """Return the Ray Train job whose workers are the learner ranks; ``started`` is called with its controller.

    ``controller_variables`` and ``rank_variables`` are environment variables of the controller's and ranks' processes.

    ``fit`` raises ``ControllerError`` if the cluster has no room for the ranks within ``schedule_timeout_s``.
    """
    learner = setup.learner
    per_rank = {"CPU": learner.num_cpus, "GPU": learner.num_gpus, **learner.resources}
    environment = {name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()} | dict(
        controller_variables
    )
    return LearnerTrainer(
        train_loop,
        started=started,
        environment=environment | {WORKER_GROUP_START_TIMEOUT_S_ENV_VAR: str(schedule_timeout_s)},
        train_loop_config={"setup": setup},
        scaling_config=ScalingConfig(
            num_workers=learner.num_ranks, use_gpu=learner.num_gpus > 0, resources_per_worker=per_rank
        ),
        torch_config=TorchConfig(timeout_s=max(1, int(learner.collective_timeout_s))),
        run_config=RunConfig(
            name=run_name,
            storage_path=str(setup.output / run_files.RAY_TRAIN),
            # The replay actor limits the group's deaths, because it knows whether there were steps in between.
            failure_config=FailureConfig(  # type: ignore[call-arg]
                max_failures=-1, max_preemption_failures=-1, controller_failure_limit=0
            ),
            worker_runtime_env={"env_vars": dict(rank_variables)} if rank_variables else None,
            callbacks=[ReportDeaths(setup.batches, setup.call_timeout_s)],  # type: ignore[list-item]
        ),
    )


def train_loop(config: dict[str, Any]) -> None:
    """Run a learner rank; Ray Train calls this on every rank."""
    from rlpipe.actors.learner import run_rank

    run_rank(config["setup"])

"""The group of learner ranks of a run: start, training steps, restarts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from threading import Event

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.train import ControllerError, WorkerGroupError

from rlpipe.actors.learner_setup import LearnerSetup
from rlpipe.actors.remote import describe_failure, get_remote
from rlpipe.actors.trainer import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError, make_trainer
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import LearnerFailed, RlpipeError
from rlpipe.preload import preloading
from rlpipe.run import workers
from rlpipe.run.cluster import insufficient_resources, placement_groups, release_placement_groups
from rlpipe.tracking.phases import PHASES

Started = Callable[[ActorHandle], None]


def fit(config: Config, setup: LearnerSetup, *, is_over: Event, started: Started) -> Exception | None:
    """Run the group until it ends, and return its error, or None; ``started`` is called with each controller."""
    try:
        _fit_until_over(config, setup, is_over, started)
    except WorkerGroupError as failure:
        return _learner_error(failure)
    except ControllerError as failure:
        return _controller_error(config, failure)
    except RlpipeError as failure:
        return failure
    except Exception as failure:  # noqa: BLE001 - the thread's boundary; raised again where it is awaited
        return LearnerFailed(f"the learner group failed: {failure}")
    return None


def _fit_until_over(config: Config, setup: LearnerSetup, is_over: Event, started: Started) -> None:
    existing = placement_groups()
    while not is_over.is_set():
        trainer = make_trainer(
            setup,
            config.name,
            schedule_timeout_s=config.cluster.schedule_timeout_s,
            started=started,
            controller_variables=preloading.stage_variables("torch"),
            rank_variables=preloading.stage_variables("learner"),
        )
        try:
            trainer.fit()
        except ControllerError as failure:
            if not isinstance(failure.controller_failure, WorkerGroupStartupFailedError):
                raise
            cause = f"a rank did not start: {describe_failure(failure)}"
        except RayActorError as death:
            cause = f"Ray Train's controller: {describe_failure(death)}"
        else:
            return
        if is_over.is_set():
            return
        get_remote(
            setup.batches.learner_died.remote(cause),
            "the batch actor to record the learner group's death",
            within=config.cluster.call_timeout_s,
            option="cluster.call_timeout_s",
        )
        release_placement_groups(placement_groups() - existing)


def _learner_error(failure: WorkerGroupError) -> RlpipeError:
    """Return rlpipe's own error among those of the ranks, or else a ``LearnerFailed`` with the tracebacks."""
    for error in failure.worker_failures.values():
        cause = getattr(error, "cause", error)
        if isinstance(cause, RlpipeError):
            return cause
    return LearnerFailed(f"the learner group failed: {failure}")


def _controller_error(config: Config, failure: ControllerError) -> RlpipeError:
    if isinstance(failure.controller_failure, WorkerGroupStartupTimeoutError):
        requested = {need.name: need.requested for need in workers.learner_needs(config)}
        return insufficient_resources(requested, config.cluster.schedule_timeout_s)
    return LearnerFailed(f"the learner group failed: {failure}")


THREAD_END_S = 10.0
"""Seconds that the thread may take to end once its controller is killed."""


def start_learner(config: Config, setup: LearnerSetup) -> asyncio.Future[None]:
    """Start the learner group on its own thread; cancelling the future does not end it, ``end_learner`` does."""
    thread = LearnerThread(config, setup)
    thread.start()
    return thread.ended


def end_learner() -> None:
    """End a learner group that is left over from a failed run.

    Must be called before the driver leaves the cluster: Ray ends the process of a thread that calls it afterwards.
    """
    for thread in threading.enumerate():
        if isinstance(thread, LearnerThread):
            thread.end()


def loading_phase(setup: LearnerSetup) -> str:
    """Return the name of the phase before the ranks publish their first version of the weights."""
    return "loading the learner" if setup.resume_from is None else f"restoring {setup.resume_from.name}"


class LearnerThread(threading.Thread):
    """Thread that runs Ray Train's controller of the learner group until the group ends.

    Ray Train restarts ranks that die. If they die at their start, or if the controller dies and the ranks with it, the
    thread starts another controller.
    """

    def __init__(self, config: Config, setup: LearnerSetup) -> None:
        super().__init__(name="learner-group", daemon=True)
        PHASES.begin(loading_phase(setup))
        self._config, self._setup = config, setup
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._controller: ActorHandle | None = None
        self._is_over = threading.Event()

    def run(self) -> None:

        try:
            error = fit(self._config, self._setup, is_over=self._is_over, started=self._take_controller)
        except SystemExit:  # Ray raises it in threads that wait for something when the driver disconnects
            return
        with suppress(RuntimeError):  # the loop is closed if another part of the run failed
            self._loop.call_soon_threadsafe(self._finish, error)

    def end(self) -> None:
        """Kill the controller, which ends the ranks too, and wait for the thread."""
        self._is_over.set()
        if self._controller is not None:
            ray.kill(self._controller)
        self.join(THREAD_END_S)

    def _finish(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    def _take_controller(self, controller: ActorHandle) -> None:
        self._controller = controller
        if self._is_over.is_set():  # it started too late for ``end`` to kill it
            ray.kill(controller)

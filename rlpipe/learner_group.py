"""Runs the learner group on Ray Train, from a thread of the driver, and says why it ended."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayActorError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError

from rlpipe import launch
from rlpipe.actors.trainer import LearnerSetup, make_trainer
from rlpipe.configs.schema import Config
from rlpipe.errors import LearnerFailed, RlpipeError
from rlpipe.placement import no_room, placement_groups, release_placement_groups
from rlpipe.preload import preloading
from rlpipe.waiting import describe_failure, get_answer

THREAD_END_S = 10.0
"""Seconds that the thread may take to end once its controller is killed."""


def start_learner(config: Config, setup: LearnerSetup) -> asyncio.Future[None]:
    """Runs the learner group on a thread of its own; cancelling the future leaves it to ``end_learner``."""
    thread = LearnerThread(config, setup)
    thread.start()
    return thread.ended


def end_learner() -> None:
    """Ends a learner group that is left of a failed run.

    Called before the driver leaves the cluster: Ray ends the process of a thread that calls it after that.
    """
    for thread in threading.enumerate():
        if isinstance(thread, LearnerThread):
            thread.end()


class LearnerThread(threading.Thread):
    """Ray Train restarts ranks that die. Where they die at their start, or its own controller dies, and the ranks with
    it, another controller begins."""

    def __init__(self, config: Config, setup: LearnerSetup) -> None:
        super().__init__(name="learner-group", daemon=True)
        self._config, self._setup = config, setup
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self._controller: ActorHandle | None = None
        self._is_over = threading.Event()

    def run(self) -> None:
        error: Exception | None = None
        try:
            self._fit()
        except WorkerGroupError as failure:
            error = _learner_error(failure)
        except ControllerError as failure:
            error = _controller_error(self._config, failure)
        except RlpipeError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - the thread's boundary; raised again where it is awaited
            error = LearnerFailed(f"the learner group failed: {failure}")
        except SystemExit:  # Ray raises it in threads that wait for something when the driver disconnects
            return
        with suppress(RuntimeError):  # the loop is closed where the run has failed elsewhere
            self._loop.call_soon_threadsafe(self._finish, error)

    def end(self) -> None:
        """Kills the controller, with which the ranks end, and waits for the thread."""
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

    def _fit(self) -> None:
        others = placement_groups()
        while not self._is_over.is_set():
            trainer = make_trainer(
                self._setup,
                self._config.name,
                schedule_timeout_s=self._config.cluster.schedule_timeout_s,
                controller_variables=preloading.stage_variables("torch"),
                rank_variables=preloading.stage_variables("learner"),
                started=self._take_controller,
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
            if self._is_over.is_set():
                return
            get_answer(
                self._setup.batches.learner_died.remote(cause),
                "the death of the learner group to be noted",
                within=self._config.cluster.call_timeout_s,
                option="cluster.call_timeout_s",
            )
            release_placement_groups(placement_groups() - others)

    def _take_controller(self, controller: ActorHandle) -> None:
        self._controller = controller
        if self._is_over.is_set():  # it was too late to be ended with the others
            ray.kill(controller)


def _learner_error(failure: WorkerGroupError) -> RlpipeError:
    """rlpipe's own error out of those of the ranks; any other becomes ``LearnerFailed`` with its traceback."""
    for error in failure.worker_failures.values():
        cause = getattr(error, "cause", error)
        if isinstance(cause, RlpipeError):
            return cause
    return LearnerFailed(f"the learner group failed: {failure}")


def _controller_error(config: Config, failure: ControllerError) -> RlpipeError:
    if isinstance(failure.controller_failure, WorkerGroupStartupTimeoutError):
        asked = {need.name: need.asked for need in launch.learner_needs(config)}
        return no_room(asked, config.cluster.schedule_timeout_s)
    return LearnerFailed(f"the learner group failed: {failure}")

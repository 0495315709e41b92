"""Runs the learner group on Ray Train, from a thread of the driver, and says why it ended."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

from ray.exceptions import RayActorError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError

from rlpipe import launch
from rlpipe.actors.trainer import LearnerSetup, make_trainer
from rlpipe.configs.schema import Config
from rlpipe.errors import LearnerFailed, RlpipeError
from rlpipe.placement import no_room, placement_groups, release_placement_groups
from rlpipe.waiting import describe_failure, get_answer

THREAD = "learner-group"
THREAD_END_S = 10.0
"""Seconds that this thread may take to end once the driver has disconnected."""


def start_learner(config: Config, setup: LearnerSetup) -> asyncio.Future[None]:
    """Runs the learner group on a thread of its own; cancelling the future leaves the thread behind."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def finish(error: Exception | None) -> None:
        if ended.done():
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    def fit() -> None:
        error: Exception | None = None
        try:
            _fit(config, setup, is_over=loop.is_closed)
        except WorkerGroupError as failure:
            error = _learner_error(failure)
        except ControllerError as failure:
            error = _controller_error(config, failure)
        except RlpipeError as failure:
            error = failure
        except Exception as failure:  # noqa: BLE001 - the thread's boundary; raised again where it is awaited
            error = LearnerFailed(f"the learner group failed: {failure}")
        except SystemExit:  # Ray raises it in threads that wait for something when the driver disconnects
            return
        with suppress(RuntimeError):  # the loop is closed where the run has failed elsewhere
            loop.call_soon_threadsafe(finish, error)

    threading.Thread(target=fit, name=THREAD, daemon=True).start()
    return ended


def wait_for_thread() -> None:
    """Python may crash at its end while a thread is in Ray's code; disconnecting has ended what it waits for."""
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(THREAD_END_S)


def _fit(config: Config, setup: LearnerSetup, *, is_over: Callable[[], bool]) -> None:
    """Ray Train restarts ranks that die. Where they die at their start, or its own controller dies, and the ranks with
    it, another controller begins."""
    others = placement_groups()
    while True:
        try:
            make_trainer(setup, config.name, schedule_timeout_s=config.cluster.schedule_timeout_s).fit()
        except ControllerError as failure:
            if not isinstance(failure.controller_failure, WorkerGroupStartupFailedError):
                raise
            cause = f"a rank did not start: {describe_failure(failure)}"
        except RayActorError as death:
            cause = f"Ray Train's controller: {describe_failure(death)}"
        else:
            return
        if is_over():  # the driver has ended its actors, and may have left the cluster
            return
        get_answer(
            setup.batches.learner_died.remote(cause),
            "the death of the learner group to be noted",
            within=config.cluster.call_timeout_s,
            option="cluster.call_timeout_s",
        )
        release_placement_groups(placement_groups() - others)


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

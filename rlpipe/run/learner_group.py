"""The learner group, run by Ray Train from a thread of the driver."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

import ray
from ray.actor import ActorHandle

from rlpipe.actors.learner_setup import LearnerSetup
from rlpipe.configs.schema.root_config import Config
from rlpipe.tracking.phases import PHASES

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
        from rlpipe.run.learner_fit import fit  # imported here, so that Ray Train and torch load while the engines load

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

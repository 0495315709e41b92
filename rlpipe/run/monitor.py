"""Monitoring of the replay or dataset actor: passes its reports on, and stops a run that makes no progress."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from ray.actor import ActorHandle

from rlpipe.actors.remote import answer
from rlpipe.actors.step_server import News
from rlpipe.configs.schema.root_config import ClusterConfig
from rlpipe.errors import WaitTimeout
from rlpipe.replay.step_queue import StepReport

POLL_S = 10.0
"""Seconds after which a request for news is repeated; news itself arrives without delay."""


class Follower:
    """Forwarder of one run's reports and messages from the actor called ``name``; for one event loop."""

    def __init__(
        self,
        name: str,
        batches: ActorHandle,
        cluster: ClusterConfig,
        *,
        report: Callable[[StepReport], None],
        message: Callable[[str], None],
        first_step: int,
        last_event: int = 0,
    ) -> None:
        self._name, self._batches, self._cluster = name, batches, cluster
        self._report, self._message = report, message
        self._last_step, self._last_event = first_step - 1, last_event
        self._stops = False
        self.ended = asyncio.Event()
        """Set once the last step is reported."""

    async def follow(self) -> None:
        """Forward reports and messages until cancelled; raise the error with which a rank has ended the run."""
        while True:
            call: Any = self._batches.wait_news.remote(self._last_step, self._last_event, POLL_S)
            news: News = await self.ask(call, "news of the run", more_s=POLL_S)
            for event in news.events:
                self._last_event = event.number
                self._message(event.message)
            for report in news.reports:
                self._last_step = report.step
                self._report(report)
                if report.last:
                    self.ended.set()

    async def watch(self, describe: Callable[[], Any] = dict) -> None:
        """Watch the progress until cancelled; raise ``WaitTimeout`` if no step ends for ``cluster.step_timeout_s``.

        ``describe`` adds the state that only the driver knows to the error message.
        """
        limit, started = self._cluster.step_timeout_s, time.monotonic()
        while True:
            await asyncio.sleep(min(POLL_S, limit / 4))
            if self._stops:
                await self.stop_learner()  # again, because the actor may be a new process
            state = await self.ask(self._batches.describe.remote(), "the state of the run")
            if self.ended.is_set():
                state["learner_group"] = "has reported its last step, but Ray Train has not ended it"
            if min(state["seconds_since_a_step"], time.monotonic() - started) > limit:
                raise WaitTimeout(
                    f"no step has ended for cluster.step_timeout_s={limit:g} seconds: {state | describe()}"
                )

    async def stop_learner(self) -> None:
        """Make the learner write a checkpoint and end after its current step."""
        self._stops = True
        await self.ask(self._batches.stop.remote(), "the learner to be stopped")

    async def ask(self, call: Any, what: str, *, more_s: float = 0.0) -> Any:
        """Return the actor's answer; raise ``WaitTimeout`` after ``cluster.call_timeout_s`` plus ``more_s`` seconds."""
        limit = self._cluster.call_timeout_s + more_s
        return await answer(call, f"{what} from the {self._name} actor", within=limit, option="cluster.call_timeout_s")

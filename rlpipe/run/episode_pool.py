"""The pool of processes that play a run's episodes on its engines, and the replacement of those that die or hang."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from rlpipe.actors.remote import describe_failure, root_cause
from rlpipe.actors.rollout import Receipt
from rlpipe.configs.schema.root_config import ClusterConfig
from rlpipe.errors import EnvironmentFailed
from rlpipe.run.cluster import until_ready
from rlpipe.tracking.phases import PHASES
from rlpipe.types import GroupRequest

POLL_S = 5.0
"""Longest wait for finished groups in one call, in seconds."""
MAX_GROUPS_PER_COLLECT = 64
MAX_DEATHS = 5
"""Deaths of a process without a finished group in between, after which the run ends."""

Finished = Callable[[ObjectRef, Sequence[Receipt]], Coroutine[Any, Any, None]]
"""Takes the reference to a list of groups, and their receipts."""


@dataclass(slots=True)
class _Playing:
    request: GroupRequest
    process: str
    engine: str


class EpisodePool:
    """Processes that play episodes; for one event loop.

    A group goes to the process with the fewest. The groups of a process that dies, or does not answer within
    ``cluster.dead_after_s``, begin again once Ray has replaced it. ``start`` makes a process import the environment.
    """

    def __init__(
        self, processes: Mapping[str, ActorHandle], *, start: Callable[[str], ObjectRef], cluster: ClusterConfig
    ) -> None:
        self._processes, self._start, self._cluster = processes, start, cluster
        self._playing: dict[int, _Playing] = {}
        self._messages: list[str] = []

    async def start(self) -> None:
        """Wait until all processes have imported the environment; raise as ``until_ready``."""
        with PHASES.phase("loading the environment"):
            async with asyncio.TaskGroup() as tasks:
                for name in self._processes:
                    tasks.create_task(self._start_one(name))

    async def _start_one(self, name: str) -> None:
        started = self._start(name)

        def again() -> tuple[str, ObjectRef]:
            nonlocal started
            started = self._start(name)
            return name, started

        await until_ready(name, started, again, self._cluster.start_timeout_s)
        self._messages = await started

    def play(self, engine: str, requests: Sequence[GroupRequest]) -> None:
        """Play groups on an engine; those that are being played already continue there."""
        shares: dict[str, list[GroupRequest]] = {}
        for request in requests:
            own = self._playing.get(request.group_id)
            if own is None:
                own = self._playing[request.group_id] = _Playing(request, self._least_busy(), engine)
            own.engine = engine
            shares.setdefault(own.process, []).append(request)
        for process, share in shares.items():
            self._processes[process].play.remote(share, engine)

    def _least_busy(self) -> str:
        busy = dict.fromkeys(self._processes, 0)
        for own in self._playing.values():
            busy[own.process] += 1
        return min(busy, key=lambda name: busy[name])

    async def run(self, finished: Finished, notice: Callable[[str, str], None]) -> None:
        """Collect finished groups until cancelled; raise ``EnvironmentFailed`` if a process keeps dying."""
        for message in self._messages:
            notice("episodes", message)
        async with asyncio.TaskGroup() as tasks:
            for name in self._processes:
                tasks.create_task(self._serve(name, tasks, finished, notice))

    async def _serve(
        self, name: str, tasks: asyncio.TaskGroup, finished: Finished, notice: Callable[[str, str], None]
    ) -> None:
        num_deaths = 0
        while True:
            call: Any = self._processes[name].collect.options(num_returns=2)
            receipts_ref, groups = call.remote(POLL_S, MAX_GROUPS_PER_COLLECT)
            try:
                async with asyncio.timeout(POLL_S + self._cluster.dead_after_s):
                    receipts: Sequence[Receipt] = await receipts_ref
            except RayTaskError as error:
                raise root_cause(error, f"{name} failed") from None
            except (RayError, TimeoutError) as error:
                num_deaths += 1
                if isinstance(error, TimeoutError):
                    reason = f"it has not answered for {self._cluster.dead_after_s:g} s (cluster.dead_after_s)"
                    ray.kill(self._processes[name], no_restart=False)
                else:
                    reason = describe_failure(error)
                if num_deaths > MAX_DEATHS:
                    raise EnvironmentFailed(
                        f"{name} died {num_deaths} times without finishing a group, the last time: {reason}"
                    ) from None
                await self._replace(name, reason, notice)
                continue
            if receipts:
                num_deaths = 0
                for receipt in receipts:
                    del self._playing[receipt.group_id]
                tasks.create_task(finished(groups, receipts))

    async def _replace(self, name: str, reason: str, notice: Callable[[str, str], None]) -> None:
        """Wait until Ray has replaced a process, and begin its groups again."""
        await self._start_one(name)
        lost = [own for own in self._playing.values() if own.process == name]
        notice("episodes", f"{name} died: {reason}; its {len(lost)} groups begin again")
        for own in lost:
            self._processes[name].play.remote([own.request], own.engine)

"""The pools of engines, and of processes that play episodes on them, and the replacement of those that die or hang."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayError, RayTaskError

from rlpipe.actors.remote import KILLED, describe_failure, root_cause, wait_within
from rlpipe.actors.rollout import Receipt
from rlpipe.actors.weights import NotLoaded
from rlpipe.configs.schema.root_config import ClusterConfig
from rlpipe.errors import EngineFailed, EngineNotStarted, EnvironmentFailed
from rlpipe.rollout.routing import Fleet, Router
from rlpipe.run.cluster import until_ready
from rlpipe.tracking.part_states import PartState
from rlpipe.tracking.phases import PHASES
from rlpipe.types import GroupRequest

POLL_S = 5.0
"""Longest wait for finished groups in one call of an engine, in seconds; a third of ``suspect_after_s`` if shorter."""
RESTART_PAUSE_S = 1.0
"""Seconds between attempts to start an engine that Ray can't reach."""
MAX_GROUPS_PER_COLLECT = 64
MAX_DEATHS = 5
"""Deaths of a process without a finished group in between, after which the run ends."""


class Notice(Protocol):
    """A function that records an event of one of the run's processes."""

    def __call__(self, subject: str, message: str, kind: str = "engine", /) -> None:
        """Record what happened to a part; ``kind`` is the event's."""


Collected = Callable[[ObjectRef, Sequence[Receipt]], Coroutine[Any, Any, None]]
"""Takes the reference to a list of groups, and their receipts."""
Finished = Callable[[ObjectRef, Mapping[int, GroupRequest]], Coroutine[Any, Any, list[GroupRequest]]]
"""Takes the reference to a list of groups, and the requests of those that count, by their index in the list; returns
the requests whose groups are lost."""
LoadNewest = Callable[[str], Awaitable[int | NotLoaded]]
"""Makes an engine load the newest version; returns the version that it then serves, or why loading failed."""


class EngineDied(Exception):
    """Exception that ends the collection from one engine; its message is the reason."""

    def __init__(self, reason: str, *, process_alive: bool = True) -> None:
        super().__init__(reason)
        self.process_alive = process_alive


class EnginePool:
    """Engines that share one queue of requests; for one event loop.

    The groups of a dead engine go to the others. Ray restarts the engine (one that hangs is killed first), and it gets
    work again once it has loaded the newest version. While no engine serves, requests wait; ``outage_s`` is the
    duration. An engine that dies more than ``cluster.max_engine_failures`` times in a row without finishing a group is
    retired; when all are retired, ``give_up`` is called.

    With ``episodes``, its processes play the groups, and ask the engine that a group is assigned to for turns.
    """

    def __init__(
        self,
        engines: Mapping[str, ActorHandle],
        *,
        cluster: ClusterConfig,
        start: Callable[[str], ObjectRef],
        load_newest: LoadNewest,
        collected: Finished,
        notice: Notice,
        give_up: Callable[[EngineFailed], Awaitable[None]],
        episodes: EpisodePool | None = None,
    ) -> None:
        self._engines, self._cluster = engines, cluster
        self._start, self._load_newest, self._collected, self._notice = start, load_newest, collected, notice
        self._give_up, self._episodes = give_up, episodes
        self._router = Router()
        self._waiting: list[GroupRequest] = []
        self._fleet = Fleet(
            engines, suspect_after_s=cluster.suspect_after_s, dead_after_s=cluster.dead_after_s, clock=time.monotonic
        )
        self._deaths: dict[str, asyncio.Future[None]] = {}
        self._retired: set[str] = set()
        for name in engines:
            self._fleet.started(name)

    @property
    def outage_s(self) -> float:
        return self._fleet.outage_s

    @property
    def num_groups(self) -> int:
        """Number of groups that are being generated or wait for an engine."""
        return self._router.num_groups + len(self._waiting)

    def describe(self) -> dict[str, Any]:
        """Return every engine's state and outstanding tokens, for error messages."""
        return {"engines": self._fleet.describe(), "outstanding_tokens": self._router.outstanding}

    def parts(self) -> list[PartState]:
        """Return the state, version and groups of every engine."""
        return [
            PartState(
                kind="engine",
                name=name,
                state="retired" if name in self._retired else self._fleet.state(name).value,
                version=None if self._fleet.version(name) < 0 else self._fleet.version(name),
                queue=len(self._router.groups_of(name)),
                heard_s=round(self._fleet.silence_s(name), 1),
                note=f"last died because {reason}" if (reason := self._fleet.last_death(name)) else "",
            )
            for name in self._engines
        ]

    def dispatch(self, requests: Sequence[GroupRequest]) -> None:
        """Send each request to the serving engine with the fewest outstanding tokens."""
        serving = self._fleet.serving
        if not serving:
            self._waiting.extend(requests)
            return
        for name, share in self._router.assign(requests, serving).items():
            if self._episodes is not None:
                self._episodes.play(name, share)
            else:
                self._engines[name].submit.remote(share)

    def published(self, version: int) -> None:
        """Record that a new version was published."""
        self._fleet.published(version)

    def loaded(self, name: str, version: int) -> None:
        """Record the version that an engine serves, and give the engine work if that is the newest."""
        self._fleet.loaded(name, version)
        if name in self._fleet.serving:
            self._router.add(name)
            self._dispatch_waiting()

    def fail_all_but(self, version: int) -> None:
        """Replace the engines that serve another version: they have missed an update and will not receive it again."""
        for name in self._fleet.serving:
            if self._fleet.version(name) != version:
                reason = f"it serves version {self._fleet.version(name)}, and missed version {version}"
                self._end_collection(name, EngineDied(reason))

    def failed(self, name: str, failure: NotLoaded) -> None:
        """Replace an engine that failed to load a version."""
        self._end_collection(name, EngineDied(failure.reason, process_alive=failure.process_alive))

    async def run(self) -> None:
        """Serve requests until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._engines:
                tasks.create_task(self._serve(name, tasks))
            if self._episodes is not None:
                tasks.create_task(self._episodes.run(self._played, self._notice))
            pause_s = min(1.0, self._cluster.suspect_after_s / 2)
            while True:
                began = time.monotonic()
                await asyncio.sleep(pause_s)
                if time.monotonic() - began >= pause_s + self._cluster.suspect_after_s:
                    continue  # this process was suspended, and is yet to read what engines answered
                for name in self._fleet.check():
                    reason = f"it has not answered for {self._cluster.dead_after_s:g} s (cluster.dead_after_s)"
                    self._end_collection(name, EngineDied(reason))

    def _end_collection(self, name: str, death: EngineDied) -> None:
        """End the collection from an engine, whose process may still be alive."""
        if name in self._deaths and not self._deaths[name].done():
            self._deaths[name].set_exception(death)

    async def _serve(self, name: str, tasks: asyncio.TaskGroup) -> None:
        while True:
            death: EngineDied | None = await self._until_death(name, tasks)
            while death is not None:
                self._on_engine_death(name, str(death))
                if self._fleet.failures_in_row(name) > self._cluster.max_engine_failures:
                    await self._retire(name, str(death))
                    return
                death = await self._replace(name, death)

    async def _retire(self, name: str, reason: str) -> None:
        """Retire an engine that died too often; if it was the last one, give up the run."""
        limit = self._cluster.max_engine_failures
        message = (
            f"engine {name} died {limit + 1} times without finishing a group (cluster.max_engine_failures={limit}); "
            f"the last time: {reason}"
        )
        self._retired.add(name)
        if len(self._retired) == len(self._engines):
            await self._give_up(EngineFailed(message))
        else:
            self._notice(name, f"{message}; the run continues without it", "death")

    async def _until_death(self, name: str, tasks: asyncio.TaskGroup) -> EngineDied:
        """Collect finished groups until the engine dies, and return the reason."""
        death: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._deaths[name] = death
        collecting = asyncio.ensure_future(self._collect(name, tasks))
        try:
            await asyncio.wait((collecting, death), return_when=asyncio.FIRST_COMPLETED)
            await (death if death.done() else collecting)
        except EngineDied as died:
            return died
        finally:
            collecting.cancel()
            death.cancel()
        raise AssertionError("collecting ends with the engine only")

    async def _collect(self, name: str, tasks: asyncio.TaskGroup) -> None:
        while True:
            call: Any = self._engines[name].collect.options(num_returns=2)
            receipts_ref, groups = call.remote(min(POLL_S, self._cluster.suspect_after_s / 3), MAX_GROUPS_PER_COLLECT)
            try:
                receipts: Sequence[Receipt] = await receipts_ref
            except RayTaskError as error:
                if isinstance(error.cause, EngineNotStarted):
                    raise EngineDied(KILLED, process_alive=False) from None
                raise EngineDied(describe_failure(error)) from None
            except RayError as error:  # it died, Ray killed it for its memory use, or Ray can't reach it
                is_alive = isinstance(error, ActorUnavailableError)
                raise EngineDied(describe_failure(error), process_alive=is_alive) from None
            self._fleet.answered(name, finished=bool(receipts))
            self._dispatch_waiting()  # the engine may have been the last suspect
            finished = [self._router.finish(receipt.group_id) for receipt in receipts]
            if receipts:
                tasks.create_task(self._redispatch(name, groups, finished))

    async def _played(self, groups: ObjectRef, receipts: Sequence[Receipt]) -> None:
        """Take groups whose episodes are over; their engine may have died meanwhile."""
        waiting = {request.group_id: request for request in self._waiting}
        finished = []
        for group_id in (receipt.group_id for receipt in receipts):
            if (engine := self._router.engine_of(group_id)) is not None:
                self._fleet.finished_group(engine)
            finished.append(self._router.finish(group_id) or waiting.pop(group_id, None))
        self._waiting = list(waiting.values())
        await self._redispatch("episodes", groups, finished)

    def _dispatch_waiting(self) -> None:
        if self._waiting and self._fleet.serving:
            waiting, self._waiting = self._waiting, []
            self.dispatch(waiting)

    async def _redispatch(self, name: str, groups: ObjectRef, finished: Sequence[GroupRequest | None]) -> None:
        """Pass finished groups on; ``finished`` are their requests, None for what another engine has finished."""
        requests = {index: request for index, request in enumerate(finished) if request is not None}
        if num_dropped := len(finished) - len(requests):  # a living engine that was given up still samples its groups
            self._notice(name, f"{num_dropped} groups from {name} are dropped: other engines sample them by now")
        if not requests:
            return
        if lost := await self._collected(groups, requests):
            self._notice(name, f"{len(lost)} groups from {name} are generated again: their machine was lost")
            self.dispatch(lost)

    def _on_engine_death(self, name: str, reason: str) -> None:
        """Report an engine's death, and give its work to the others."""
        self._fleet.died(name, reason)
        lost = self._router.remove(name)
        consequence = f"; its {len(lost)} groups are generated again" if lost else ""
        self._notice(name, f"engine {name} died: {reason}{consequence}", "death")
        self.dispatch(lost)

    async def _until_started(self, name: str) -> None:
        """Start the engine; retry until Ray knows that the last host is dead, since calls go there until then."""
        while True:
            try:
                await self._start(name)
            except ActorUnavailableError:
                await asyncio.sleep(RESTART_PAUSE_S)
            else:
                return

    async def _replace(self, name: str, death: EngineDied) -> EngineDied | None:
        """Start a new process that serves the newest version; return why that failed, or None."""
        self._fleet.restarting(name)
        limit = self._cluster.start_timeout_s
        if death.process_alive:
            ray.kill(self._engines[name], no_restart=False)
        try:
            await wait_within(limit, self._until_started(name))
        except TimeoutError:
            return EngineDied(f"it has not started again within {limit:g} seconds (cluster.start_timeout_s)")
        except RayTaskError as error:  # it has started with this config before: GPU memory or a file may be gone
            return EngineDied(describe_failure(error))
        except RayError as error:
            return EngineDied(describe_failure(error), process_alive=False)
        self._fleet.started(name)
        version = await self._load_newest(name)
        if isinstance(version, NotLoaded):
            return EngineDied(version.reason, process_alive=version.process_alive)
        self.published(version)  # the learner may have restarted from an older one
        self.loaded(name, version)
        self._notice(name, f"engine {name} serves again, version {version}", "recovery")
        return None


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
                    tasks.create_task(self._start_process(name))

    async def _start_process(self, name: str) -> None:
        started = self._start(name)

        def again() -> tuple[str, ObjectRef]:
            nonlocal started
            started = self._start(name)
            return name, started

        await until_ready(name, started, again, self._cluster.start_timeout_s)
        self._messages = await started

    def play(self, engine: str, requests: Sequence[GroupRequest]) -> None:
        """Play groups on an engine; those that are being played already continue there.

        Of these, some may have ended in their process, and are not played again.
        """
        new: dict[str, list[GroupRequest]] = {}
        moved: dict[str, list[int]] = {}
        for request in requests:
            playing = self._playing.get(request.group_id)
            if playing is None:
                playing = self._playing[request.group_id] = _Playing(request, self._least_busy(), engine)
                new.setdefault(playing.process, []).append(request)
            else:
                playing.engine = engine
                moved.setdefault(playing.process, []).append(request.group_id)
        for process, share in new.items():
            self._processes[process].play.remote(share, engine)
        for process, group_ids in moved.items():
            self._processes[process].move.remote(group_ids, engine)

    def _least_busy(self) -> str:
        busy = dict.fromkeys(self._processes, 0)
        for playing in self._playing.values():
            busy[playing.process] += 1
        return min(busy, key=lambda name: busy[name])

    async def run(self, finished: Collected, notice: Notice) -> None:
        """Collect finished groups until cancelled; raise ``EnvironmentFailed`` if a process keeps dying."""
        for message in self._messages:
            notice("episodes", message)
        async with asyncio.TaskGroup() as tasks:
            for name in self._processes:
                tasks.create_task(self._serve(name, tasks, finished, notice))

    async def _serve(self, name: str, tasks: asyncio.TaskGroup, finished: Collected, notice: Notice) -> None:
        num_deaths = 0
        receipts: Sequence[Receipt] = []
        while True:
            call: Any = self._processes[name].collect.options(num_returns=2)
            # A group that was lost after it came is played again, and not received yet.
            received = [receipt.group_id for receipt in receipts if receipt.group_id not in self._playing]
            receipts_ref, groups = call.remote(POLL_S, MAX_GROUPS_PER_COLLECT, received)
            try:
                receipts = await wait_within(POLL_S + self._cluster.dead_after_s, receipts_ref)
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
                    self._playing.pop(receipt.group_id, None)  # one that Ray could not reach may have been played twice
                tasks.create_task(finished(groups, receipts))

    async def _replace(self, name: str, reason: str, notice: Notice) -> None:
        """Wait until Ray has replaced a process, and begin its groups again."""
        await self._start_process(name)
        lost = [playing for playing in self._playing.values() if playing.process == name]
        notice("episodes", f"{name} died: {reason}; its {len(lost)} groups begin again", "death")
        for playing in lost:
            self._processes[name].play.remote([playing.request], playing.engine)

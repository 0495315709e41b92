"""Actor that plays the episodes of groups against the run's engines."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ray.actor import ActorHandle

from rlpipe.actors.rollout import Receipt, with_receipts
from rlpipe.actors.turns import TurnClient
from rlpipe.common.imports import describe_error, enter_folder
from rlpipe.configs.schema.root_config import Config
from rlpipe.episodes.groups import GroupPlayer, open_player
from rlpipe.errors import RunError
from rlpipe.scoring.processes import start_reaper
from rlpipe.types import GroupRequest, RolloutGroup

THREADS_PER_EPISODE = 2
"""Threads for methods and tools that block, beside those that hang beyond their time limit."""


@dataclass(kw_only=True, frozen=True)
class EpisodeSetup:
    """Settings of a process that plays episodes; ``folder`` is the driver's working directory."""

    config: Config
    engines: Mapping[str, ActorHandle]
    folder: str
    is_scored: bool = True
    """Whether the run has reward functions."""


class EpisodeActor:
    """Ray actor around a ``GroupPlayer``; its methods are coroutines on one event loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._player: GroupPlayer | None = None
        self._started, self._starting = asyncio.Event(), asyncio.Lock()
        self._engines: dict[str, ActorHandle] = {}
        """The run's engines, once it has started; Ray warns of handles in the arguments of actors that restart."""
        self._client = TurnClient(name, self._engines)
        self._playing: dict[int, asyncio.Task[None]] = {}
        self._finished: list[RolloutGroup] = []
        """Groups that the driver has not received yet, as far as this process knows."""
        self._error: RunError | None = None
        self._changed = asyncio.Event()

    async def start(self, setup: EpisodeSetup) -> list[str]:
        """Import the environment, and try the template's bridges; return messages for the user."""
        async with self._starting:  # Ray may repeat the call while the first one runs
            return await self._start(setup) if self._player is None else []

    async def _start(self, setup: EpisodeSetup) -> list[str]:
        self._engines.update(setup.engines)
        enter_folder(setup.folder)
        start_reaper()  # of programs, servers of tools, and what environments start
        threads = THREADS_PER_EPISODE * setup.config.environment.concurrency
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(threads, thread_name_prefix="episode"))
        player, messages = open_player(setup.config, self._client.sample, is_scored=setup.is_scored)
        await player.start()
        self._player = player
        self._started.set()
        return messages

    async def play(self, requests: Sequence[GroupRequest], engine: str) -> None:
        """Play groups with an engine once the environment is there.

        A call may be repeated after this process was replaced; what is being played, or is over, is not played again.
        """
        existing = self._playing.keys() | {group.group_id for group in self._finished}
        for request in requests:
            if request.group_id not in existing:
                self._playing[request.group_id] = asyncio.create_task(self._play(request))
        self._client.assign([request.group_id for request in requests], engine)

    async def move(self, group_ids: Sequence[int], engine: str) -> None:
        """Continue the groups that are not over yet with another engine, on which open turns are sampled again."""
        self._client.assign([group_id for group_id in group_ids if group_id in self._playing], engine)

    async def _play(self, request: GroupRequest) -> None:
        try:
            await self._started.wait()
            assert self._player is not None, "it has started"
            group = await self._player.play(request)
            self._finished.append(group)  # looked up now: ``collect`` may have replaced the list meanwhile
        except RunError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - a group that is lost in silence would hold up the run
            self._error = RunError(f"episodes of group {request.group_id}: {describe_error(error)}")
        finally:
            del self._playing[request.group_id]
            self._client.release(request.group_id)
            self._changed.set()

    async def collect(
        self, timeout_s: float, max_groups: int, received: Sequence[int]
    ) -> tuple[list[Receipt], list[RolloutGroup]]:
        """Return finished groups with their receipts, as soon as there is one; none after ``timeout_s``.

        A group is returned until a call names it as ``received``: the answer to a call may not reach the driver. Raises
        ``EnvironmentFailed`` if a failure is to stop the run.
        """
        self._finished = [group for group in self._finished if group.group_id not in received]
        if not self._finished and self._error is None:
            self._changed.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait()
            except TimeoutError:
                pass
        if self._error is not None:
            raise self._error
        return with_receipts(self._finished[:max_groups], self._name)

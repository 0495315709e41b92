"""Pools that score groups: the base class, and a pool of actors that are replaced if they hang or die."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError, TaskCancelledError

from rlpipe.configs.schema.scoring_config import RewardConfig
from rlpipe.errors import RlpipeError
from rlpipe.run.cluster import until_ready
from rlpipe.scoring.memory import MemoryLimit
from rlpipe.scoring.pools import split_calls
from rlpipe.scoring.sandbox.sandbox import OVERHEAD_S
from rlpipe.scoring.scorer import GroupScores
from rlpipe.scoring.validation import describe_exception

logger = logging.getLogger(__name__)

Spawn = Callable[[str, str], tuple[ActorHandle, ObjectRef]]
"""Starts an actor with a name (first) in a reserved place (second); returns it and the reference of its ``start``."""


@dataclass(slots=True)
class _Process:
    """Place of the pool, with the actor that currently occupies it."""

    place: str
    name: str
    actor: ActorHandle
    num_restarts: int = 0


class ScoringPool(ABC):
    """Pool that scores groups for some of the rewards; for one event loop.

    If a call fails, each of its groups is scored once more on its own; a group that fails again counts as failed, with
    the reason.
    """

    def __init__(self, rewards: Mapping[str, RewardConfig], size: int) -> None:
        self._rewards, self._size = rewards, size
        self._timeout_s = sum(map(longest_call_s, rewards.values()))

    @abstractmethod
    async def start(self) -> None:
        """Wait until the whole pool is ready."""

    async def score(self, groups: ObjectRef, group_ids: Mapping[int, int]) -> list[GroupScores]:
        """Score the groups at the keys of ``group_ids``, which maps indices in ``groups`` to group ids."""
        calls = split_calls(list(group_ids), self._size)
        parts = await asyncio.gather(*(self._score_chunk(groups, chunk, group_ids) for chunk in calls))
        return [scores for part in parts for scores in part]

    async def _score_chunk(
        self, groups: ObjectRef, chunk: Sequence[int], group_ids: Mapping[int, int]
    ) -> list[GroupScores]:
        scores = await self._call(groups, chunk)
        if not isinstance(scores, str):
            return scores
        retried: list[GroupScores] = []
        for index in chunk:
            again = await self._call(groups, [index])
            retried += again if not isinstance(again, str) else [self._failed(group_ids[index], again)]
        return retried

    @abstractmethod
    async def _call(self, groups: ObjectRef, indices: Sequence[int]) -> list[GroupScores] | str:
        """Return the scores, or the reason why the call failed."""

    def _failed(self, group_id: int, reason: str) -> GroupScores:
        return GroupScores(group_id=group_id, failures=dict.fromkeys(self._rewards, reason))


class ScorerPool(ScoringPool):
    """Pool of actors that the run starts itself.

    A process whose call exceeds the rewards' timeouts, or raises, is killed; it is replaced by another one, as is a
    process that dies. The run fails if the new process is not ready within ``start_timeout_s``.
    """

    def __init__(
        self,
        name: str,
        rewards: Mapping[str, RewardConfig],
        *,
        size: int,
        spawn: Spawn,
        start_timeout_s: float,
        memory: MemoryLimit | None = None,
    ) -> None:
        super().__init__(rewards, size)
        self._spawn, self._start_timeout_s = spawn, start_timeout_s
        self._memory = memory
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._starting: list[tuple[_Process, ObjectRef]] = []
        for place in (f"{name}-{index}" for index in range(size)):
            actor, ready = spawn(place, place)
            process = _Process(place=place, name=place, actor=actor)
            self._starting.append((process, ready))

    async def start(self) -> None:
        """Wait until all processes are ready; raise ``WaitTimeout`` naming a late process, or a process's own error."""
        starting, self._starting = self._starting, []
        await asyncio.gather(*(self._first_start(process, ready) for process, ready in starting))

    async def _first_start(self, process: _Process, ready: ObjectRef) -> None:
        await until_ready(process.name, ready, lambda: self._replace(process), self._start_timeout_s)
        self._idle.put_nowait(process)

    async def _call(self, groups: ObjectRef, indices: Sequence[int]) -> list[GroupScores] | str:
        process = await self._idle.get()
        limit = self._timeout_s * len(indices)
        reason = None
        try:
            async with asyncio.timeout(limit):
                scores: list[GroupScores] = await process.actor.score.remote(groups, list(indices))
                return scores
        except TimeoutError:
            reason = f"process {process.name} took longer than {limit:g} seconds (timeout_s) for {len(indices)} groups"
        except (RayActorError, OutOfMemoryError):
            allowed = f", or took more memory than {self._memory} allows" if self._memory else ""
            reason = f"process {process.name} died while it scored {len(indices)} groups: it crashed, ended{allowed}"
        except (RayTaskError, TaskCancelledError) as error:
            cause = getattr(error, "cause", error)
            if isinstance(cause, RlpipeError):
                raise
            reason = f"process {process.name} broke off: {describe_exception(cause)}"
        finally:
            if reason is not None:
                await self._restart(process, reason)
            self._idle.put_nowait(process)
        return reason

    async def _restart(self, process: _Process, reason: str) -> None:
        logger.warning("scoring: %s; another takes its place", reason)
        name, ready = self._replace(process)
        await until_ready(name, ready, lambda: self._replace(process), self._start_timeout_s)

    def _replace(self, process: _Process) -> tuple[str, ObjectRef]:
        """Start another actor in the place; return its name and the reference of its ``start``."""
        ray.kill(process.actor)
        process.num_restarts += 1
        process.name = f"{process.place}.{process.num_restarts}"
        process.actor, ready = self._spawn(process.name, process.place)
        return process.name, ready


def longest_call_s(reward: RewardConfig) -> float:
    """Return the longest time for one group, in seconds; a sandbox enforces the timeout itself, with some overhead."""
    return reward.timeout_s + (OVERHEAD_S if reward.isolation == "sandbox" else 0.0)

"""Pools of scorers (actors, the learner's ranks), and how groups reach them."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import ObjectLostError, OutOfMemoryError, RayActorError, RayTaskError, TaskCancelledError

from rlpipe.actors.remote import ObjectsLost, await_remote, check_lost, root_cause, wait_within
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.configs.schema.root_config import ClusterConfig
from rlpipe.errors import RlpipeError, WaitTimeout
from rlpipe.run.cluster import until_ready
from rlpipe.run.engine_pool import Notice
from rlpipe.scoring.pools import split_calls
from rlpipe.scoring.processes import MemoryLimit
from rlpipe.scoring.sandbox.sandbox import OVERHEAD_S
from rlpipe.scoring.scorer import GroupScores
from rlpipe.scoring.validation import describe_exception
from rlpipe.tracking.part_states import PartState
from rlpipe.types import GroupRequest, RolloutGroup

logger = logging.getLogger(__name__)

Spawn = Callable[[str, str], tuple[ActorHandle, ObjectRef]]
"""Starts an actor with a name (first) in a reserved slot (second); returns it and the reference of its ``start``."""


def _log(subject: str, message: str, kind: str = "") -> None:
    logger.warning("scoring: %s", message)


@dataclass(slots=True)
class _Process:
    """A slot of the pool, with the actor that currently occupies it."""

    slot: str
    name: str
    actor: ActorHandle
    num_restarts: int = 0


class ScoringPool(ABC):
    """Pool that scores groups for some of the rewards; for one event loop.

    If a call fails, each of its groups is scored once more on its own; a group that fails again counts as failed, with
    the reason.
    """

    def __init__(self, rewards: Mapping[str, RewardConfig], size: int) -> None:
        self.notice: Notice = _log
        self._rewards, self._size = rewards, size
        self._timeout_s = sum(map(longest_call_s, rewards.values()))

    def parts(self, queue: int) -> list[PartState]:
        """Return the state of the pool, in which ``queue`` groups are being scored or wait."""
        return [PartState(kind="scorer", name=", ".join(self._rewards), state=_scoring(queue), queue=queue)]

    @abstractmethod
    async def start(self) -> None:
        """Wait until the whole pool is ready."""

    async def score(self, groups: ObjectRef, group_ids: Mapping[int, int]) -> list[GroupScores]:
        """Score the groups at the keys of ``group_ids``, which maps indices in ``groups`` to group ids."""
        calls = split_calls(list(group_ids), self._size)
        results = await asyncio.gather(*(self._score_chunk(groups, chunk, group_ids) for chunk in calls))
        return [scores for result in results for scores in result]

    async def _score_chunk(
        self, groups: ObjectRef, chunk: Sequence[int], group_ids: Mapping[int, int]
    ) -> list[GroupScores]:
        scores = await self._call(groups, chunk)
        if not isinstance(scores, str):
            return scores
        retried: list[GroupScores] = []
        for index in chunk:
            result = await self._call(groups, [index])
            retried += result if not isinstance(result, str) else [self.failed(group_ids[index], result)]
        return retried

    @abstractmethod
    async def _call(self, groups: ObjectRef, indices: Sequence[int]) -> list[GroupScores] | str:
        """Return the scores, or the reason why the call failed."""

    def failed(self, group_id: int, reason: str) -> GroupScores:
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
        self._working: set[str] = set()
        """Places of the processes that have a call."""
        self._slots = [f"{name}-{index}" for index in range(size)]
        for slot in self._slots:
            actor, ready = spawn(slot, slot)
            process = _Process(slot=slot, name=slot, actor=actor)
            self._starting.append((process, ready))

    async def start(self) -> None:
        """Wait until all processes are ready; raise ``WaitTimeout`` naming a late process, or a process's own error."""
        starting, self._starting = self._starting, []
        await asyncio.gather(*(self._first_start(process, ready) for process, ready in starting))

    def parts(self, queue: int) -> list[PartState]:
        """Return the state of the pool, and of each of its processes."""
        busy = {slot: _scoring(slot in self._working) for slot in self._slots}
        states = busy | {process.slot: "starting" for process, _ in self._starting}
        processes = [PartState(kind="scorer", name=slot, state=state) for slot, state in states.items()]
        return [*super().parts(queue), *processes]

    async def _first_start(self, process: _Process, ready: ObjectRef) -> None:
        await until_ready(process.name, ready, lambda: self._replace(process), self._start_timeout_s)
        self._idle.put_nowait(process)

    async def _call(self, groups: ObjectRef, indices: Sequence[int]) -> list[GroupScores] | str:
        process = await self._idle.get()
        self._working.add(process.slot)
        limit = self._timeout_s * len(indices)
        reason = None
        try:
            scores: list[GroupScores] = await wait_within(limit, process.actor.score.remote(groups, list(indices)))
            return scores
        except TimeoutError:
            reason = f"process {process.name} took longer than {limit:g} seconds (timeout_s) for {len(indices)} groups"
        except (RayActorError, OutOfMemoryError):
            allowed = f", or used more memory than {self._memory} allows" if self._memory else ""
            reason = f"process {process.name} died while it scored {len(indices)} groups: it crashed, ended{allowed}"
        except (RayTaskError, TaskCancelledError, ObjectLostError) as error:
            check_lost(error, f"process {process.name} to score {len(indices)} groups")
            cause = getattr(error, "cause", error)
            if isinstance(cause, RlpipeError):
                raise
            reason = f"process {process.name} aborted: {describe_exception(cause)}"
        finally:
            if reason is not None:
                await self._restart(process, reason)
            self._working.remove(process.slot)
            self._idle.put_nowait(process)
        return reason

    async def _restart(self, process: _Process, reason: str) -> None:
        self.notice(process.slot, f"{reason}; another process replaces it", "death")
        name, ready = self._replace(process)
        await until_ready(name, ready, lambda: self._replace(process), self._start_timeout_s)

    def _replace(self, process: _Process) -> tuple[str, ObjectRef]:
        """Start another actor in the slot; return its name and the reference of its ``start``."""
        ray.kill(process.actor)
        process.num_restarts += 1
        process.name = f"{process.slot}.{process.num_restarts}"
        process.actor, ready = self._spawn(process.name, process.slot)
        return process.name, ready


def _scoring(is_busy: object) -> str:
    return "scoring" if is_busy else "idle"


def longest_call_s(reward: RewardConfig) -> float:
    """Return the longest time for one group, in seconds; a sandbox enforces the timeout itself, with some overhead."""
    return reward.timeout_s + (OVERHEAD_S if reward.isolation == "sandbox" else 0.0)


class LearnerPool(ScoringPool):
    """Pool that passes groups to the replay actor, where the ranks fetch them once their current step ends."""

    def __init__(self, rewards: Mapping[str, RewardConfig], replay: ActorHandle, cluster: ClusterConfig) -> None:
        super().__init__(rewards, size=1)
        self._replay = replay
        self._limit_s = cluster.start_timeout_s + cluster.step_timeout_s

    async def start(self) -> None:
        """Do nothing, because the ranks are started by the learner group."""

    async def _call(self, groups: ObjectRef, indices: Sequence[int]) -> list[GroupScores] | str:
        call: Any = self._replay.score_features.remote(groups, list(indices))
        try:
            scores: list[GroupScores] = await await_remote(
                call,
                f"the learner to score {len(indices)} groups",
                within=self._limit_s,
                option="cluster.start_timeout_s and cluster.step_timeout_s",
            )
        except WaitTimeout as late:
            return str(late)
        return scores


GroupIds = Mapping[int, int]
"""Group ids by index in a list of groups."""
Generated = Callable[[ObjectRef, GroupIds], Awaitable[None]]
Stored = Callable[[Sequence[GroupRequest]], Awaitable[Sequence[RolloutGroup]]]
Scored = Callable[[ObjectRef, GroupIds, Sequence[Sequence[GroupScores]]], Awaitable[None]]


class ScoringDispatch:
    """Dispatcher of groups to all scoring pools; for one event loop.

    Groups stay in the object store; only their ids and scores pass through here. ``generated`` is called with the
    reference to a list of groups and with their ids while they are scored; ``scored`` is called afterwards, with the
    scores of every pool as well. Groups that are lost with their machine before they are scored are requested from
    ``stored``, which returns those that were stored and have no scores yet. Without ``streaming``, groups are held
    back until there are enough for a step, or until ``num_generating`` returns 0.
    """

    def __init__(
        self,
        pools: Sequence[ScoringPool],
        *,
        generated: Generated,
        stored: Stored,
        scored: Scored,
        num_generating: Callable[[], int],
        groups_per_step: int = 1,
        streaming: bool = True,
    ) -> None:
        self._pools, self._generated, self._stored, self._scored = pools, generated, stored, scored
        self._num_generating = num_generating
        self._batch_size = 1 if streaming else groups_per_step
        self._held: list[tuple[ObjectRef, Mapping[int, GroupRequest], asyncio.Future[None]]] = []
        self._queues = [0] * len(pools)
        """Groups that each pool has to score."""

    def parts(self) -> list[PartState]:
        """Return the states of all pools and their processes."""
        return [part for pool, queue in zip(self._pools, self._queues, strict=True) for part in pool.parts(queue)]

    async def collected(self, groups: ObjectRef, requests: Mapping[int, GroupRequest]) -> list[GroupRequest]:
        """Record and score the groups that an engine has finished; return requests whose groups are lost.

        ``requests`` are given by index in ``groups``. Groups that were stored before their machine was lost are scored
        from there: generated again, their scores would be those of other tokens.
        """
        try:
            await self._record(groups, requests)
        except ObjectsLost as loss:
            logger.warning("scoring: %s", loss)
            stored = await self._stored([*requests.values()])
            if stored:
                await self.score_stored(stored)
            stored_ids = {group.group_id for group in stored}
            return [request for request in requests.values() if request.group_id not in stored_ids]
        return []

    async def _record(self, groups: ObjectRef, requests: Mapping[int, GroupRequest]) -> None:
        """Record the groups, and score them once there are enough; raise ``ObjectsLost`` if they are gone."""
        stored = asyncio.ensure_future(self._generated(groups, _ids(requests)))
        self._held.append((groups, requests, stored))
        if sum(len(ids) for _, ids, _ in self._held) >= self._batch_size or not self._num_generating():
            held, self._held = self._held, []
            results = await asyncio.gather(*(self._score_batch(*batch) for batch in held), return_exceptions=True)
            for batch, result in zip(held, results, strict=True):
                # Batches that are lost are generated again by their own calls.
                if isinstance(result, BaseException) and (batch[2] is stored or not isinstance(result, ObjectsLost)):
                    raise result
        try:
            await stored
        except ObjectsLost:
            self._held = [batch for batch in self._held if batch[2] is not stored]
            raise

    async def score_stored(self, groups: Sequence[RolloutGroup]) -> None:
        """Score groups whose tokens are stored already, in all pools, and pass the scores on."""
        pools = range(len(self._pools))
        scores = await self._score_again(groups, pools)
        ids = {index: group.group_id for index, group in enumerate(groups)}
        await self._scored(ray.put(groups), ids, [scores[pool] for pool in pools])

    async def _score_batch(
        self, groups: ObjectRef, requests: Mapping[int, GroupRequest], stored: asyncio.Future[None]
    ) -> None:
        """Score groups while their tokens are being stored; the scores wait for ``stored``."""
        pools = range(len(self._pools))
        results = await self._score_in(pools, groups, _ids(requests))
        scores = {pool: result for pool, result in results.items() if not isinstance(result, ObjectsLost)}
        if losses := {pool: result for pool, result in results.items() if isinstance(result, ObjectsLost)}:
            await stored
            loss = next(iter(losses.values()))
            logger.warning("scoring: groups that the replay actor has stored are scored from there: %s", loss)
            scores |= await self._score_again(await self._stored([*requests.values()]), [*losses])
        await stored
        await self._scored(groups, _ids(requests), [scores[pool] for pool in pools])

    async def _score_again(self, groups: Sequence[RolloutGroup], pools: Sequence[int]) -> dict[int, list[GroupScores]]:
        """Score groups that the driver holds in some pools; they fail if they do not reach the scorers either.

        Generating them again would give scores of other tokens than the stored ones.
        """
        group_ids = {index: group.group_id for index, group in enumerate(groups)}
        results = await self._score_in(pools, ray.put(groups), group_ids)
        return {
            pool: [self._pools[pool].failed(group_id, str(result)) for group_id in group_ids.values()]
            if isinstance(result, ObjectsLost)
            else result
            for pool, result in results.items()
        }

    async def _score_in(
        self, pools: Sequence[int], groups: ObjectRef, group_ids: GroupIds
    ) -> dict[int, list[GroupScores] | ObjectsLost]:
        """Return the scores of some pools, or the loss of the groups on the way there."""
        try:
            results = await asyncio.gather(*(self._try_in(pool, groups, group_ids) for pool in pools))
        except RayTaskError as error:
            raise root_cause(error, "scoring failed") from None
        return dict(zip(pools, results, strict=True))

    async def _try_in(self, pool: int, groups: ObjectRef, group_ids: GroupIds) -> list[GroupScores] | ObjectsLost:
        self._queues[pool] += len(group_ids)
        try:
            return await self._pools[pool].score(groups, group_ids)
        except ObjectsLost as loss:
            return loss
        finally:
            self._queues[pool] -= len(group_ids)


def _ids(requests: Mapping[int, GroupRequest]) -> GroupIds:
    return {index: request.group_id for index, request in requests.items()}

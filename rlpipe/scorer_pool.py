"""A pool of scoring actors: spreads groups over them, and replaces one that hangs or dies."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError

from rlpipe.configs.schema import RewardConfig
from rlpipe.placement import Need
from rlpipe.scoring.scorer import GroupScores

logger = logging.getLogger(__name__)

MAX_GROUPS_PER_CALL = 32
"""Groups of one call, so that a slow reward still spreads over the pool."""


class ScorerPool:
    """Scores groups for some of the rewards; for one event loop.

    ``spawn(name)`` starts an actor and returns it with the reference to wait for. A call that takes longer than the
    rewards' timeouts allow, or whose process dies, ends that process; its groups are scored once more, each alone,
    and then count as failed, with the reason.
    """

    def __init__(
        self,
        name: str,
        rewards: Mapping[str, RewardConfig],
        need: Need,
        *,
        size: int,
        spawn: Callable[[str], tuple[ActorHandle, ObjectRef]],
    ) -> None:
        self.name, self.need = name, need
        self._rewards, self._spawn = rewards, spawn
        self._timeout_s = sum(reward.timeout_s for reward in rewards.values())
        self._num_spawned = 0
        self.started = dict(self._start() for _ in range(size))
        """The pool's actors by name, with the reference that says when each is ready."""
        self._idle: asyncio.Queue[tuple[str, ActorHandle]] = asyncio.Queue()
        for actor_name, (actor, _) in self.started.items():
            self._idle.put_nowait((actor_name, actor))
        self._size = size

    async def score(self, groups: ObjectRef, group_ids: Mapping[int, int]) -> list[GroupScores]:
        """Scores the groups at the keys of ``group_ids`` (index in ``groups`` to group id)."""
        indices = list(group_ids)
        share = min(max(1, -(-len(indices) // self._size)), MAX_GROUPS_PER_CALL)
        chunks = [indices[start : start + share] for start in range(0, len(indices), share)]
        parts = await asyncio.gather(*(self._score_chunk(groups, chunk, group_ids) for chunk in chunks))
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

    async def _call(self, groups: ObjectRef, indices: Sequence[int]) -> list[GroupScores] | str:
        """The scores, or the reason why the process that should have given them is gone."""
        name, actor = await self._idle.get()
        limit = self._timeout_s * len(indices)
        reason = None
        try:
            return await asyncio.wait_for(_result(actor.score.remote(groups, list(indices))), limit)
        except TimeoutError:
            reason = f"process {name} took longer than {limit:g} seconds (timeout_s) for {len(indices)} groups"
        except RayActorError:
            reason = f"process {name} died while it scored {len(indices)} groups"
        finally:
            if reason is not None:
                name, actor = await self._replace(actor, reason)
            self._idle.put_nowait((name, actor))
        return reason

    async def _replace(self, actor: ActorHandle, reason: str) -> tuple[str, ActorHandle]:
        logger.warning("scoring: %s; a new one takes its place", reason)
        ray.kill(actor)
        name, (fresh, started) = self._start()
        await started
        return name, fresh

    def _start(self) -> tuple[str, tuple[ActorHandle, ObjectRef]]:
        name = f"{self.name}-{self._num_spawned}"
        self._num_spawned += 1
        return name, self._spawn(name)

    def _failed(self, group_id: int, reason: str) -> GroupScores:
        return GroupScores(group_id=group_id, failures=dict.fromkeys(self._rewards, reason))


async def _result(call: ObjectRef) -> list[GroupScores]:
    return await call

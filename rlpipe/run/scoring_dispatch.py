"""The path of finished groups: from the engines through the scoring pools to the controller."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

from ray import ObjectRef
from ray.exceptions import RayTaskError

from rlpipe.actors.remote import root_cause
from rlpipe.actors.rollout import Receipt
from rlpipe.run.scorer_pool import ScoringPool
from rlpipe.scoring.scorer import GroupScores

GroupIds = Mapping[int, int]
"""Group ids by index in a list of groups."""
Generated = Callable[[ObjectRef, GroupIds], Awaitable[None]]
Scored = Callable[[ObjectRef, GroupIds, Sequence[Sequence[GroupScores]]], Awaitable[None]]


class GroupFlow:
    """Dispatcher of groups to all scoring pools; for one event loop.

    Groups stay in the object store; only their ids and scores pass through here. ``generated`` is called with the
    reference to a list of groups and with their ids while they are scored; ``scored`` is called afterwards, with the
    scores of every pool as well. Without ``streaming``, groups are held back until there are enough for a step, or
    until ``num_generating`` returns 0.
    """

    def __init__(
        self,
        pools: Sequence[ScoringPool],
        *,
        generated: Generated,
        scored: Scored,
        num_generating: Callable[[], int],
        groups_per_step: int = 1,
        streaming: bool = True,
    ) -> None:
        self._pools, self._generated, self._scored = pools, generated, scored
        self._num_generating = num_generating
        self._batch_size = 1 if streaming else groups_per_step
        self._held: list[tuple[ObjectRef, GroupIds, asyncio.Future[None]]] = []

    async def collected(self, groups: ObjectRef, receipts: Sequence[Receipt]) -> None:
        """Record and score the groups that an engine has finished."""
        group_ids = {index: receipt.group_id for index, receipt in enumerate(receipts)}
        kept = asyncio.ensure_future(self._generated(groups, group_ids))
        self._held.append((groups, group_ids, kept))
        if sum(len(ids) for _, ids, _ in self._held) >= self._batch_size or not self._num_generating():
            held, self._held = self._held, []
            await asyncio.gather(*(self.score(*part) for part in held))
        await kept

    async def score(self, groups: ObjectRef, group_ids: GroupIds, kept: Awaitable[None] | None = None) -> None:
        """Score groups in all pools, and pass the scores on once ``kept``, which stores the groups' tokens, is done."""
        try:
            scores = await asyncio.gather(*(pool.score(groups, group_ids) for pool in self._pools))
        except RayTaskError as error:
            raise root_cause(error, "scoring failed") from None
        if kept is not None:
            await kept
        await self._scored(groups, group_ids, scores)

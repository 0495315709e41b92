"""Takes the groups that engines finish through the scoring pools, to whoever asked for them."""

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
"""Index in a list of groups to group id."""
Generated = Callable[[ObjectRef, GroupIds], Awaitable[None]]
Scored = Callable[[ObjectRef, GroupIds, Sequence[Sequence[GroupScores]]], Awaitable[None]]


class GroupFlow:
    """Has groups scored; for one event loop.

    Groups stay in the object store: only their ids and the scores pass through here. ``generated`` gets the reference
    to a list of groups and their ids while these are scored, and then ``scored`` the same with what every pool said of
    them. Without
    ``streaming``, groups wait until a step's worth of them is there, or until ``num_generating`` says that none is
    left to wait for.
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
        """Takes the groups that an engine has finished."""
        group_ids = {index: receipt.group_id for index, receipt in enumerate(receipts)}
        kept = asyncio.ensure_future(self._generated(groups, group_ids))
        self._held.append((groups, group_ids, kept))
        if sum(len(ids) for _, ids, _ in self._held) >= self._batch_size or not self._num_generating():
            held, self._held = self._held, []
            await asyncio.gather(*(self.score(*part) for part in held))
        await kept

    async def score(self, groups: ObjectRef, group_ids: GroupIds, kept: Awaitable[None] | None = None) -> None:
        """Has groups scored; ``kept`` is over once their tokens are kept, without it they are already."""
        try:
            scores = await asyncio.gather(*(pool.score(groups, group_ids) for pool in self._pools))
        except RayTaskError as error:
            raise root_cause(error, "scoring failed") from None
        if kept is not None:
            await kept
        await self._scored(groups, group_ids, scores)

"""Moves groups from the engines through the scoring pools to whoever asked for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayTaskError

from rlpipe.actors.rollout import Receipt
from rlpipe.errors import EngineFailed
from rlpipe.placement import root_cause
from rlpipe.rollout.router import Router
from rlpipe.scorer_pool import ScorerPool
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import GroupRequest

POLL_S = 10.0
"""Seconds after which an engine is asked again; a finished group is answered at once."""
MAX_GROUPS_PER_COLLECT = 64

GroupIds = Mapping[int, int]
"""Index in a list of groups to group id."""
Deliver = Callable[[ObjectRef, GroupIds, Sequence[Sequence[GroupScores]]], Awaitable[None]]


class GroupFlow:
    """Dispatches requests, collects what the engines finish, and has it scored; for one event loop.

    Groups stay in the object store: only their ids and the scores pass through here. ``deliver`` gets the reference
    to a list of groups, their ids, and what every pool said of them.
    """

    def __init__(
        self, engines: Mapping[str, ActorHandle], pools: Sequence[ScorerPool], *, timeout_s: float, deliver: Deliver
    ) -> None:
        self._engines, self._pools, self._timeout_s, self._deliver = engines, pools, timeout_s, deliver
        self._router = Router(list(engines))

    @property
    def outstanding(self) -> dict[str, int]:
        """Tokens that each engine may still have to draw."""
        return self._router.outstanding

    def dispatch(self, requests: Sequence[GroupRequest]) -> None:
        """Sends each request to the engine with the least outstanding tokens."""
        for name, share in self._router.assign(requests).items():
            self._engines[name].submit.remote(share)

    async def run(self) -> None:
        """Serves all engines until it is cancelled; raises ``EngineFailed`` if one dies or no longer answers."""
        async with asyncio.TaskGroup() as tasks:
            for name in self._engines:
                tasks.create_task(self._collect(name, tasks))

    async def _collect(self, name: str, tasks: asyncio.TaskGroup) -> None:
        while True:
            receipts, groups = await self._finished(name)
            if receipts:
                tasks.create_task(self._score(groups, receipts))

    async def _finished(self, name: str) -> tuple[Sequence[Receipt], ObjectRef]:
        collect: Any = self._engines[name].collect.options(num_returns=2)
        receipts, groups = collect.remote(POLL_S, MAX_GROUPS_PER_COLLECT)
        try:
            return await asyncio.wait_for(_value(receipts), POLL_S + self._timeout_s), groups
        except TimeoutError:
            raise EngineFailed(
                f"engine {name} has not answered for {self._timeout_s:g} seconds (cluster.step_timeout_s); "
                f"it works on groups {self._router.groups_of(name)[:8]}"
            ) from None
        except RayTaskError as error:
            raise root_cause(error, f"engine {name} failed") from None
        except RayActorError as error:
            raise EngineFailed(f"engine {name} died: {error}") from None

    async def _score(self, groups: ObjectRef, receipts: Sequence[Receipt]) -> None:
        for receipt in receipts:
            self._router.finish(receipt.group_id)
        group_ids = {index: receipt.group_id for index, receipt in enumerate(receipts)}
        try:
            scores = await asyncio.gather(*(pool.score(groups, group_ids) for pool in self._pools))
            await self._deliver(groups, group_ids, scores)
        except RayTaskError as error:
            raise root_cause(error, "scoring failed") from None


async def _value(call: ObjectRef) -> Any:
    return await call

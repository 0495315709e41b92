"""What makes and scores groups: the engines' actors and the scoring pools of a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ray import ObjectRef
from ray.actor import ActorHandle

from rlpipe.run.cluster import until_ready
from rlpipe.run.scorer_pool import ScoringPool
from rlpipe.tracking.phases import PHASES


@dataclass(kw_only=True, frozen=True)
class Parts:
    """Engines and scoring pools that are running, or about to."""

    engines: Mapping[str, ActorHandle]
    start_engine: Callable[[str], ObjectRef]
    """Has an engine's process load its model."""
    pools: Sequence[ScoringPool]

    async def start(self, timeout_s: float) -> None:
        """Waits until all have loaded what they need; raises as ``until_ready``."""
        async with asyncio.TaskGroup() as tasks:
            for name in self.engines:
                tasks.create_task(self._start_engine(name, timeout_s))
            tasks.create_task(self._start_pools())

    async def _start_pools(self) -> None:
        with PHASES.phase("loading rewards"):
            async with asyncio.TaskGroup() as tasks:
                for pool in self.pools:
                    tasks.create_task(pool.start())

    async def _start_engine(self, name: str, timeout_s: float) -> None:
        # Ray itself puts another process in the place of one that died, and repeats the call, but not at every moment.
        with PHASES.phase(f"loading engine {name}"):
            await until_ready(name, self.start_engine(name), lambda: (name, self.start_engine(name)), timeout_s)

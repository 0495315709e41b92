"""The parts of a run that generate and score groups: the engines' actors and the scoring pools."""

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
    """Engines and scoring pools that are running or about to start."""

    engines: Mapping[str, ActorHandle]
    start_engine: Callable[[str], ObjectRef]
    """Makes an engine's process load its model."""
    pools: Sequence[ScoringPool]

    async def start(self, timeout_s: float) -> None:
        """Load the models of all engines and pools, and wait until they are ready; raise as ``until_ready``."""
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
        # Ray itself replaces a process that died and repeats the call, but not in every case.
        with PHASES.phase(f"loading engine {name}"):
            await until_ready(name, self.start_engine(name), lambda: (name, self.start_engine(name)), timeout_s)

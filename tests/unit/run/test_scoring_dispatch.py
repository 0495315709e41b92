"""Groups on their way from the engines through scoring, with pools and a ledger that answer on the test's command."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from rlpipe.actors.remote import ObjectsLost, run_event_loop
from rlpipe.configs.schema.rollout_config import RewardConfig, ServeConfig
from rlpipe.errors import RunError, WaitTimeout
from rlpipe.run.scoring_pools import ScoringDispatch, ScoringPool, ServedPool


class Stations:
    """The calls of a flow, in order; the receipt for the tokens arrives once ``receipt`` is set."""

    def __init__(self, *, num_generating: int = 0, **options: Any) -> None:
        self.calls: list[str] = []
        self.receipt = asyncio.Event()
        self.num_generating = num_generating
        self.flow = ScoringDispatch(
            [self],  # type: ignore[list-item]
            generated=self.generated,
            scored=self.scored,
            num_generating=lambda: self.num_generating,
            **options,
        )

    async def score(self, groups: Any, group_ids: Mapping[int, int]) -> list[Any]:
        self.calls.append(f"score {groups}")
        return []

    async def generated(self, groups: Any, group_ids: Mapping[int, int]) -> None:
        self.calls.append(f"keep {groups}")
        await self.receipt.wait()
        self.calls.append(f"kept {groups}")

    async def scored(self, groups: Any, group_ids: Mapping[int, int], scores: Any) -> None:
        self.calls.append(f"scored {groups}")

    def collect(self, groups: str, *group_ids: int) -> asyncio.Task[None]:
        call: Any = self.flow.collected(groups, dict(enumerate(group_ids)))  # type: ignore[arg-type]
        return asyncio.create_task(call)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def test_groups_are_scored_while_their_tokens_are_kept() -> None:
    async def scenario() -> None:
        stations = Stations()
        task = stations.collect("a", 0)
        await settle()
        assert sorted(stations.calls) == ["keep a", "score a"]
        stations.receipt.set()
        await task
        assert stations.calls[2:] == ["kept a", "scored a"], "scores of groups that the ledger does not know yet"

    asyncio.run(scenario())


def test_without_streaming_groups_wait_for_a_step_of_them() -> None:
    async def scenario() -> None:
        stations = Stations(num_generating=1, groups_per_step=3, streaming=False)
        stations.receipt.set()
        await stations.collect("a", 0, 1)
        assert stations.calls == ["keep a", "kept a"]
        await stations.collect("b", 2)
        assert [call for call in stations.calls if call.startswith("scored")] == ["scored a", "scored b"]

    asyncio.run(scenario())


def test_a_ledger_that_fails_ends_the_flow() -> None:
    class Failing(Stations):
        async def generated(self, groups: Any, group_ids: Mapping[int, int]) -> None:
            raise OSError("no space left")

    async def scenario() -> None:
        stations = Failing()
        with pytest.raises(OSError, match="no space left"):
            await stations.collect("a", 0)
        assert "scored a" not in stations.calls

    asyncio.run(scenario())


def test_the_queue_of_a_pool_is_what_it_has_to_score() -> None:
    class Slow(ScoringPool):
        def __init__(self) -> None:
            super().__init__({"right": RewardConfig(path="none")}, size=1)
            self.goes_on = asyncio.Event()

        async def start(self) -> None: ...

        async def _call(self, groups: Any, indices: Any) -> list[Any]:
            await self.goes_on.wait()
            return []

    async def scenario() -> None:
        pool = Slow()
        stations = Stations()
        stations.receipt.set()
        stations.flow = ScoringDispatch(
            [pool], generated=stations.generated, scored=stations.scored, num_generating=lambda: 0
        )
        assert [(part.name, part.state, part.queue) for part in stations.flow.parts()] == [("right", "idle", 0)]
        task = stations.collect("a", 0, 1)
        await settle()
        assert [(part.state, part.queue) for part in stations.flow.parts()] == [("scoring", 2)]
        pool.goes_on.set()
        await task
        assert [(part.state, part.queue) for part in stations.flow.parts()] == [("idle", 0)]

    asyncio.run(scenario())


def test_a_batch_that_is_lost_is_generated_again_alone() -> None:
    class Losing(Stations):
        async def generated(self, groups: Any, group_ids: Mapping[int, int]) -> None:
            if groups in lost:
                raise ObjectsLost("its host is gone")
            await super().generated(groups, group_ids)

    async def scenario() -> None:
        stations = Losing(num_generating=1, groups_per_step=3, streaming=False)
        stations.receipt.set()
        lost.add("a")
        with pytest.raises(ObjectsLost):
            await stations.collect("a", 0, 1)
        waiting = stations.collect("b", 2, 3)
        await waiting
        assert not any(call.startswith("score") for call in stations.calls), "what is lost counts for the batch"
        lost.add("c")
        with pytest.raises(ObjectsLost):
            await stations.collect("c", 4)
        assert stations.calls.count("scored b") == 1
        assert not stations.flow._held

    lost = set[str]()
    asyncio.run(scenario())


def test_replicas_that_never_start_do_not_keep_the_run_from_its_end() -> None:
    """Check that nothing waits for the thread in which Serve deploys them, not even the end of the event loop."""
    end = threading.Event()
    pool = ServedPool(
        "judge",
        {"judge": RewardConfig(path="none", serve=ServeConfig(replicas=1))},
        deploy=lambda: end.wait(10),
        start_timeout_s=0.1,
    )
    began = time.monotonic()
    try:
        with pytest.raises(WaitTimeout, match=r"judge have not started within cluster\.start_timeout_s=0\.1 seconds"):
            run_event_loop(pool.start())
        assert time.monotonic() - began < 2
    finally:
        end.set()


def test_why_replicas_cannot_start_is_told() -> None:
    def deploy() -> None:
        raise RuntimeError("no room")

    served = {"judge": RewardConfig(path="none", serve=ServeConfig(replicas=1))}
    pool = ServedPool("judge", served, deploy=deploy, start_timeout_s=5.0)
    with pytest.raises(RunError, match=r"the replicas of judge can't start: .*no room"):
        run_event_loop(pool.start())

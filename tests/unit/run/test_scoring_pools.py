"""Groups on their way from the engines through scoring, with pools and a ledger that answer on the test's command."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import ObjectLostError, RayTaskError

from rlpipe.actors.remote import ObjectsLost, run_event_loop
from rlpipe.configs.schema.rollout_config import RewardConfig, ServeConfig
from rlpipe.errors import RunError, WaitTimeout
from rlpipe.run.scoring_pools import ScorerPool, ScoringDispatch, ScoringPool
from rlpipe.run.served_pool import ServedPool
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import GroupRequest


class Stations:
    """The calls of a flow, in order; the receipt for the tokens arrives once ``receipt`` is set."""

    def __init__(self, *, num_generating: int = 0, **options: Any) -> None:
        self.calls: list[str] = []
        self.receipt = asyncio.Event()
        self.num_generating = num_generating
        self.flow = ScoringDispatch(
            [self],  # type: ignore[list-item]
            generated=self.generated,
            stored=self.stored,
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

    async def stored(self, requests: Sequence[GroupRequest]) -> list[Any]:
        self.calls.append(f"restore {[request.group_id for request in requests]}")
        return [SimpleNamespace(group_id=request.group_id) for request in requests]

    async def scored(self, groups: Any, group_ids: Mapping[int, int], scores: Any) -> None:
        self.calls.append(f"scored {groups}")

    def collect(self, groups: str, *group_ids: int) -> asyncio.Task[list[GroupRequest]]:
        requests = {index: SimpleNamespace(group_id=group_id) for index, group_id in enumerate(group_ids)}
        call: Any = self.flow.collected(groups, requests)  # type: ignore[arg-type]
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
            [pool],
            generated=stations.generated,
            stored=stations.stored,
            scored=stations.scored,
            num_generating=lambda: 0,
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

        async def stored(self, requests: Sequence[GroupRequest]) -> list[Any]:
            return []

    async def scenario() -> None:
        stations = Losing(num_generating=1, groups_per_step=3, streaming=False)
        stations.receipt.set()
        lost.add("a")
        assert [request.group_id for request in await stations.collect("a", 0, 1)] == [0, 1]
        waiting = stations.collect("b", 2, 3)
        await waiting
        assert not any(call.startswith("score") for call in stations.calls), "what is lost counts for the batch"
        lost.add("c")
        assert [request.group_id for request in await stations.collect("c", 4)] == [4]
        assert stations.calls.count("scored b") == 1
        assert not stations.flow._held

    lost = set[str]()
    asyncio.run(scenario())


def test_groups_that_were_stored_before_their_machine_was_lost_are_scored_and_not_generated_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Losing(Stations):
        async def generated(self, groups: Any, group_ids: Mapping[int, int]) -> None:
            raise ObjectsLost("the replay actor died after it stored them, and then their host")

        async def stored(self, requests: Sequence[GroupRequest]) -> list[Any]:
            return [SimpleNamespace(group_id=request.group_id) for request in requests if request.group_id != 1]

    async def scenario() -> None:
        stations = Losing()
        assert [request.group_id for request in await stations.collect("a", 0, 1, 2)] == [1]
        assert stations.calls == ["score a", "score [0, 2]", "scored [0, 2]"]

    monkeypatch.setattr(ray, "put", lambda groups: [group.group_id for group in groups])
    asyncio.run(scenario())


LOST = ObjectLostError("00" * 28, None, "")


class FakeScorer:
    """A stand-in for the handle of a process or of replicas, whose calls raise ``losses`` first."""

    def __init__(self, losses: list[Exception]) -> None:
        self.score, self.losses = self, losses
        self.scored: list[Any] = []

    def remote(self, groups: Any, indices: Any, *alone: bool) -> Any:
        answer = asyncio.get_running_loop().create_future()
        if self.losses:
            answer.set_exception(self.losses.pop(0))
        else:
            indices = [indices] if alone else indices
            self.scored.append(groups)
            answer.set_result([GroupScores(group_id=groups[index].group_id) for index in indices])
        return answer


def pool_of(kind: str, scorer: FakeScorer) -> ScoringPool:
    """Return a started pool of one process, or of replicas."""
    if kind == "replicas":
        rewards = {"right": RewardConfig(path="none", serve=ServeConfig(replicas=1))}
        return ServedPool("right", rewards, deploy=lambda: scorer, start_timeout_s=5.0)

    def spawn(name: str, place: str) -> Any:
        ready = asyncio.get_running_loop().create_future()
        ready.set_result(None)
        return scorer, ready

    return ScorerPool("scorer", {"right": RewardConfig(path="none")}, size=1, spawn=spawn, start_timeout_s=5.0)


@pytest.mark.parametrize("kind", ["processes", "replicas"])
@pytest.mark.parametrize("loss", [LOST, RayTaskError("score", "", LOST)], ids=["lost", "within"])
def test_groups_that_are_lost_while_they_wait_for_scores_are_scored_as_they_were_stored(
    monkeypatch: pytest.MonkeyPatch, kind: str, loss: Exception
) -> None:
    """Check that their machine's death is no fault of the scorer, and that it costs no group, not even a held one."""
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", killed.append)
    monkeypatch.setattr(ray, "put", lambda groups: groups)

    async def scenario() -> None:
        stations = Stations(num_generating=1, groups_per_step=3, streaming=False)
        scorer = FakeScorer([loss, loss])
        pool = pool_of(kind, scorer)
        await pool.start()
        stations.flow._pools = [pool]
        stations.receipt.set()
        await stations.collect("a", 7, 8)
        await stations.collect([SimpleNamespace(group_id=9)], 9)  # type: ignore[arg-type]
        assert "restore [7, 8]" in stations.calls
        assert sum(call.startswith("scored") for call in stations.calls) == 2
        assert {group.group_id for groups in scorer.scored for group in groups} == {7, 8, 9}
        assert not scorer.losses

    asyncio.run(scenario())
    assert not killed


def test_groups_that_reach_no_scorer_from_the_driver_either_have_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "put", lambda groups: groups)
    delivered: list[Any] = []

    class Delivering(Stations):
        async def scored(self, groups: Any, group_ids: Mapping[int, int], scores: Any) -> None:
            delivered.extend(scores)

    async def scenario() -> None:
        stations = Delivering()
        stations.flow._pools = [pool_of("processes", FakeScorer([LOST, LOST]))]
        await stations.flow._pools[0].start()
        stations.receipt.set()
        await stations.collect("a", 7)

    asyncio.run(scenario())
    ((scores,),) = delivered
    assert scores.group_id == 7
    assert "ObjectLostError" in scores.failures["right"]


def test_replicas_that_never_start_do_not_keep_the_run_from_its_end() -> None:
    """Check that nothing waits for the thread in which Serve deploys them, not even the end of the event loop."""
    end = threading.Event()
    pool = ServedPool(
        "judge",
        {"judge": RewardConfig(path="none", serve=ServeConfig(replicas=1))},
        deploy=lambda: end.wait(60),
        start_timeout_s=0.1,
    )
    began = time.monotonic()
    try:
        with pytest.raises(WaitTimeout, match=r"judge have not started within cluster\.start_timeout_s=0\.1 seconds"):
            run_event_loop(pool.start())
        assert time.monotonic() - began < 20
    finally:
        end.set()


def test_why_replicas_cannot_start_is_reported() -> None:
    def deploy() -> None:
        raise RuntimeError("no room")

    served = {"judge": RewardConfig(path="none", serve=ServeConfig(replicas=1))}
    pool = ServedPool("judge", served, deploy=deploy, start_timeout_s=5.0)
    with pytest.raises(RunError, match=r"the replicas of judge can't start: .*no room"):
        run_event_loop(pool.start())

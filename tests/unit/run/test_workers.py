"""Tests that engines that die while they start are restarted, but not forever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError

from rlpipe.errors import RunError
from rlpipe.run import cluster
from rlpipe.run.cluster import MAX_STARTS
from rlpipe.run.workers import Workers


class Engine:
    """An engine whose first ``deaths`` starts fail, as while Ray replaces a dead process."""

    def __init__(self, deaths: int, error: RayActorError | None = None) -> None:
        self.deaths, self.starts, self.error = deaths, 0, error or RayActorError()

    async def start(self) -> None:
        self.starts += 1
        if self.starts <= self.deaths:
            raise self.error


def start(engine: Engine) -> None:
    parts = Workers(engines={"rollout-0": None}, start_engine=lambda name: engine.start(), pools=[])
    asyncio.run(parts.start(timeout_s=5))


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "RESTART_PAUSE_S", 0)


def test_an_engine_that_dies_at_its_start_is_started_again() -> None:
    engine = Engine(deaths=MAX_STARTS - 1)
    start(engine)
    assert engine.starts == MAX_STARTS


def test_an_engine_that_always_dies_at_its_start_ends_the_run() -> None:
    engine = Engine(deaths=MAX_STARTS)
    with pytest.raises(ExceptionGroup) as raised:
        start(engine)
    assert raised.group_contains(RunError, match="3 processes in a row .* actor rollout-0 died at its start")
    assert engine.starts == MAX_STARTS


def test_calls_that_ray_does_not_send_while_it_restarts_an_engine_are_no_deaths() -> None:
    engine = Engine(deaths=4 * MAX_STARTS, error=ActorUnavailableError("the actor is restarting", None))
    start(engine)
    assert engine.starts == 4 * MAX_STARTS + 1


def test_an_engine_that_dies_in_its_start_though_ray_restarts_it_counts_as_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster, "AT_ONCE_S", 0)
    engine = Engine(deaths=MAX_STARTS, error=ActorUnavailableError("the actor is restarting", None))
    with pytest.raises(ExceptionGroup) as raised:
        start(engine)
    assert raised.group_contains(RunError, match="3 processes in a row .* actor rollout-0 died at its start")


def test_engines_that_may_share_a_gpu_start_one_after_another_before_the_pools() -> None:
    order: list[str] = []

    async def start(name: str) -> None:
        order.append(f"{name} begins")
        await asyncio.sleep(0.01)
        order.append(f"{name} is ready")

    class Pool:
        async def start(self) -> None:
            await start("pool")

    names = ["rollout-0", "rollout-1", "pool"]
    for shares in (True, False):
        order.clear()
        engines: Any = dict.fromkeys(names[:2])
        pools: Any = [Pool()]
        parts = Workers(engines=engines, start_engine=start, pools=pools, engines_share_gpus=shares)  # type: ignore[arg-type]
        asyncio.run(parts.start(timeout_s=5))
        begins = [f"{name} begins" for name in names]
        expected = [f"{name} {state}" for name in names for state in ("begins", "is ready")]
        assert order == expected if shares else order[:3] == begins

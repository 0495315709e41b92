"""A run's monitor passes on every report and event once, and ends a run that is silent, idle or has failed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from rlpipe.actors.step_server import SILENT_AFTER_S, RunUpdates
from rlpipe.configs.schema.root_config import ClusterConfig
from rlpipe.errors import LearnerFailed, RunError, WaitTimeout
from rlpipe.replay.ledger.run_ledger import LedgerEvent
from rlpipe.replay.step_queue import StepReport
from rlpipe.run import monitor
from rlpipe.run.monitor import RunMonitor
from rlpipe.tracking.jsonl import StepLog, read_rows
from rlpipe.tracking.part_states import read_parts


def monitor_of(methods: Mapping[str, Callable[..., Any]], shown: list[Any], **options: Any) -> RunMonitor:
    """Return the monitor of an actor with these methods; the steps and messages that it passes on are ``shown``."""
    batches: Any = SimpleNamespace(**{name: SimpleNamespace(remote=method) for name, method in methods.items()})
    options = {"cluster": ClusterConfig(), "first_step": 0, "show_message": shown.append} | options
    return RunMonitor("replay", batches, report=lambda report: shown.append(report.step), **options)


def event(number: int) -> LedgerEvent:
    return LedgerEvent(number=number, time=0.0, kind="death", subject="learner", message=f"death {number}")


def test_what_is_new_is_passed_on_once_and_in_order_until_the_run_fails(tmp_path: Path) -> None:
    first, second, third = (StepReport(step=step, metrics={}, last=step == 3) for step in (1, 2, 3))
    rounds = [
        [event(1), StepReport(step=0, metrics={}), first],
        [event(2), second],
        [],
        [event(3)],
        [first, second, third],
    ]
    known: list[Any] = []  # it begins with what an earlier driver has passed on, and ends with steps trained again

    async def wait_updates(after_step: int, after_event: int, timeout_s: float) -> RunUpdates:
        if not rounds:
            raise RayTaskError("wait_updates", "", LearnerFailed("the learner group died 4 times"))
        known.extend(rounds.pop(0))
        reports = {entry.step: entry for entry in known if isinstance(entry, StepReport) and entry.step > after_step}
        events = [entry for entry in known if isinstance(entry, LedgerEvent) and entry.number > after_event]
        return RunUpdates(reports=list(reports.values()), events=events)

    async def run() -> None:
        log = StepLog(tmp_path / "events.jsonl", 0)
        watched = monitor_of({"wait_updates": wait_updates}, shown, first_step=1, last_event=1, events=log)
        assert not watched.has_steps
        with pytest.raises(LearnerFailed, match="died 4 times"):
            await watched.follow()
        assert watched.ended.is_set()
        assert watched.has_steps

    shown: list[Any] = []
    asyncio.run(run())
    assert shown == [1, "death 2", 2, "death 3", 3]
    rows = [(row["step"], row["message"]) for row in read_rows(tmp_path / "events.jsonl")]
    assert rows == [(2, "death 2"), (3, "death 3")]


@pytest.mark.parametrize(
    ("method", "limit", "what"),
    [
        ("follow", "0.15", "report updates"),
        ("watch", "0.05", "describe its state"),
        ("stop_learner", "0.05", "stop the learner"),
    ],
)
def test_an_actor_that_does_not_answer_within_its_limit_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, method: str, limit: str, what: str
) -> None:
    async def never(*arguments: Any) -> None:
        await asyncio.Event().wait()

    async def run() -> None:
        silent = dict.fromkeys(("wait_updates", "describe", "stop"), never)
        async with asyncio.timeout(30):
            await getattr(monitor_of(silent, [], cluster=ClusterConfig(call_timeout_s=0.05)), method)()

    monkeypatch.setattr(monitor, "POLL_S", 0.1)
    with pytest.raises(
        WaitTimeout, match=rf"waited {limit} seconds \(cluster.call_timeout_s\) for the replay .* {what};"
    ):
        asyncio.run(run())


@pytest.mark.parametrize(
    ("late", "stepped_at", "evaluated_at", "ends_at"),
    [({}, 0, -1, 50), ({}, 30, -1, 80), ({}, 0, 20, 70), ({10: 5}, 0, -1, 45), ({10: 100}, 0, -1, 170)],
    ids=["idle", "a step ends", "an evaluation ends", "late", "suspended"],
)
def test_a_run_without_progress_ends_but_not_because_it_was_suspended(
    monkeypatch: pytest.MonkeyPatch, late: Mapping[float, float], stepped_at: float, evaluated_at: float, ends_at: float
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    polled: list[float] = []
    stopped: list[float] = []

    async def sleep(seconds: float) -> None:
        clock.now += seconds + late.get(clock.now, 0.0)
        assert clock.now < 1000, "nothing ends the run"

    async def describe() -> dict[str, float]:
        polled.append(clock.now)
        if clock.now == evaluated_at:
            watched.evaluated()
        return {"step_wanted": 7, "seconds_since_a_step": clock.now - (stepped_at if clock.now >= stepped_at else 0)}

    async def stop() -> None:
        stopped.append(clock.now)

    async def run() -> None:
        await watched.stop_learner()
        await watched.watch(lambda: {"engines": 2})

    monkeypatch.setattr(monitor, "time", clock)
    monkeypatch.setattr(monitor, "asyncio", SimpleNamespace(sleep=sleep, Event=asyncio.Event))
    watched = monitor_of({"describe": describe, "stop": stop}, [], cluster=ClusterConfig(step_timeout_s=40.0))
    with pytest.raises(WaitTimeout, match=r"no step .*step_timeout_s=40 seconds: .*'step_wanted': 7.*'engines': 2"):
        asyncio.run(run())
    assert clock.now == ends_at
    assert stopped == [0.0, *polled], "the actor may be a new process each time"


def test_a_silent_rank_is_recorded_as_silent_until_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silences, states = [SILENT_AFTER_S - 1, SILENT_AFTER_S + 1, 0.5], []

    async def heartbeats() -> dict[int, tuple[float, int]]:
        if not silences:
            raise RunError("the test is over")
        return {0: (0.1, 5), 1: (silences.pop(0), 4)}

    async def sleep(seconds: float) -> None:
        recorded = read_parts(tmp_path)
        assert recorded is not None
        states.append([(part.name, part.step, part.state) for part in recorded[1]])

    monkeypatch.setattr(monitor, "asyncio", SimpleNamespace(sleep=sleep, Event=asyncio.Event))
    with pytest.raises(RunError, match="the test is over"):
        asyncio.run(monitor_of({"heartbeats": heartbeats}, []).record_parts(tmp_path))
    assert states == [
        [("rank 0", 5, "in a step"), ("rank 1", 4, is_now)] for is_now in ("in a step", "silent", "in a step")
    ]

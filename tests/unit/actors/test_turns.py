"""Tests of the turns that a process of episodes samples: what the death of an engine does to them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError

from rlpipe.actors import turns
from rlpipe.actors.turns import TurnClient
from rlpipe.episodes.session import Deadline
from rlpipe.types import GroupRequest, Prompt, RolloutGroup

LIMIT_S = 1.0
PROMPT = Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(1, np.int32), prompt="", task={})


class Engine:
    """Stands in for an engine's actor, with the calls that a client makes of it."""

    def __init__(self) -> None:
        self.is_dead = self.is_frozen = False
        self.version = 0
        self.lost: set[str] = set()
        """Names of methods whose next call is carried out, or not, and has no answer."""
        self.asked: list[GroupRequest] = []
        self.finished: list[RolloutGroup] = []
        self.submit_turns, self.poll_turns, self.cancel = map(
            self._method, (self._submit_turns, self._poll_turns, self._cancel)
        )

    def _method(self, function: Any) -> Any:
        def call(_: str, argument: Any) -> Any:
            return asyncio.ensure_future(function(argument))

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=call))

    async def _submit_turns(self, requests: list[GroupRequest]) -> None:
        self._check()
        if "submit_turns" in self.lost:
            self.lost.remove("submit_turns")
            raise ActorUnavailableError("a cut", None)
        self.asked += requests

    async def _poll_turns(self, _: float) -> tuple[list[RolloutGroup], int]:
        for _step in range(3):
            await asyncio.sleep(0.01)
            while self.is_frozen:
                await asyncio.sleep(0.01)
            self._check()
        found, self.finished = self.finished, []
        if found and "poll_turns" in self.lost:
            self.lost.remove("poll_turns")
            raise ActorUnavailableError("a cut", None)
        return found, self.version

    async def _cancel(self, _: list[int]) -> None:
        self._check()

    def _check(self) -> None:
        if self.is_dead:
            raise ActorDiedError

    def answer(self) -> None:
        for request in self.asked:
            group = RolloutGroup(group_id=request.group_id, prompt=PROMPT, rollouts=["answer"])  # type: ignore[list-item]
            self.finished.append(group)


def request(group_id: int, min_version: int = 0) -> GroupRequest:
    return GroupRequest(
        group_id=group_id, prompt=PROMPT, group_size=1, max_tokens=4, temperature=1.0, seed=0, min_version=min_version
    )


def test_no_time_passes_between_the_death_of_an_engine_and_the_next_one() -> None:
    async def run() -> None:
        engines = {"a": Engine(), "b": Engine()}
        client = TurnClient("episodes-0", engines)  # type: ignore[arg-type]
        client.assign([1], "a")
        client.assign([2], "b")
        deadline, other = Deadline(LIMIT_S), Deadline(LIMIT_S)

        async def play(group_id: int, limit: Deadline) -> Any:
            async with limit:
                return await client.sample(request(group_id), limit)

        playing = asyncio.create_task(play(1, deadline)), asyncio.create_task(play(2, other))
        await asyncio.sleep(0.1)
        assert [own.group_id for own in engines["a"].asked] == [0]
        engines["a"].is_dead = True
        await asyncio.sleep(2 * LIMIT_S)
        with pytest.raises(TimeoutError):
            await playing[1]
        assert not playing[0].done(), "its engine has died"
        client.assign([1], "b")
        await asyncio.sleep(0.1)
        engines["b"].answer()
        assert await playing[0] == "answer"
        client.assign([1], "b")
        with pytest.raises(TimeoutError):  # the time of the next turn passes as ever
            await play(1, Deadline(LIMIT_S))

    asyncio.run(run())


def test_only_the_turn_that_was_open_is_sampled_again() -> None:
    async def run() -> None:
        engines = {"a": Engine(), "b": Engine()}
        client = TurnClient("episodes-0", engines)  # type: ignore[arg-type]
        client.assign([1, 2], "a")

        async def play(group_id: int) -> list[Any]:
            return [await client.sample(replace(request(group_id), seed=turn), Deadline(60)) for turn in range(2)]

        playing = [asyncio.create_task(play(1)), asyncio.create_task(play(2))]
        await asyncio.sleep(0.05)
        engines["a"].answer()
        engines["a"].asked.clear()
        while len(engines["a"].asked) < 2:
            await asyncio.sleep(0.01)
        assert [own.seed for own in engines["a"].asked] == [1, 1]
        engines["a"].is_dead = True
        client.assign([1, 2], "b")
        while len(engines["b"].asked) < 2:
            await asyncio.sleep(0.01)
        engines["b"].answer()
        assert await asyncio.gather(*playing) == [["answer"] * 2] * 2
        assert [own.seed for own in engines["b"].asked] == [1, 1]

    asyncio.run(run())


def test_no_time_passes_until_an_engine_serves_a_new_enough_version() -> None:
    async def run() -> None:
        engine = Engine()
        client = TurnClient("episodes-0", {"a": engine})  # type: ignore[dict-item]
        client.assign([1, 2], "a")

        async def play(group_id: int) -> Any:
            deadline = Deadline(LIMIT_S)
            async with deadline:
                return await client.sample(request(group_id, min_version=3), deadline)

        waiting = [asyncio.create_task(play(1))]
        await asyncio.sleep(0.1)
        waiting.append(asyncio.create_task(play(2)))  # now it is known that the engine is behind
        await asyncio.sleep(2 * LIMIT_S)
        assert not any(turn.done() for turn in waiting)
        engine.version = 3
        await asyncio.sleep(0.1)
        engine.answer()
        assert await asyncio.gather(*waiting) == ["answer", "answer"]
        with pytest.raises(TimeoutError):  # time passes again
            await play(1)

    asyncio.run(run())


def test_no_time_passes_while_an_engine_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "POLL_S", 0.1)
    monkeypatch.setattr(turns, "SILENCE_S", 0.1)

    async def run() -> None:
        engine = Engine()
        client = TurnClient("episodes-0", {"a": engine})  # type: ignore[dict-item]
        client.assign([1], "a")
        deadline = Deadline(LIMIT_S)

        async def play() -> Any:
            async with deadline:
                return await client.sample(request(1), deadline)

        playing = asyncio.create_task(play())
        await asyncio.sleep(0.1)
        engine.is_frozen = True
        await asyncio.sleep(2 * LIMIT_S)
        assert not playing.done(), "its engine is frozen"
        engine.is_frozen = False
        with pytest.raises(TimeoutError):  # it goes on, and takes too long
            await playing

    asyncio.run(run())


@pytest.mark.parametrize("method", ["submit_turns", "poll_turns"])
def test_a_turn_whose_call_is_lost_is_sent_again(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PAUSE_S", 0.01)

    async def run() -> None:
        engine = Engine()
        engine.lost = {method}
        client = TurnClient("episodes-0", {"a": engine})  # type: ignore[dict-item]
        client.assign([1], "a")
        playing = asyncio.create_task(client.sample(request(1), Deadline(60)))
        async with asyncio.timeout(5):
            while not playing.done():
                await asyncio.sleep(0.05)
                engine.answer()
                engine.asked.clear()
        assert await playing == "answer"  # type: ignore[comparison-overlap]
        assert not engine.lost

    asyncio.run(run())


def test_an_answer_that_an_abandoned_call_takes_later_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"PAUSE_S": 0.01, "POLL_S": 0.01, "SILENCE_S": 1.0}.items():
        monkeypatch.setattr(turns, name, seconds)

    async def run() -> None:
        engine = Engine()
        client = TurnClient("episodes-0", {"a": engine})  # type: ignore[dict-item]
        client.assign([1], "a")
        playing = asyncio.create_task(client.sample(request(1), Deadline(60)))
        await asyncio.sleep(0.02)
        engine.is_dead = True
        await asyncio.sleep(0.05)
        engine.is_dead = False
        async with asyncio.timeout(10):
            while len(engine.asked) < 2:
                await asyncio.sleep(0.01)
            engine.asked.clear()  # it was sent again at once, and its answer went to nobody
            while not engine.asked:
                await asyncio.sleep(0.01)
        engine.answer()
        assert await playing == "answer"  # type: ignore[comparison-overlap]

    asyncio.run(run())


@pytest.mark.slow
def test_time_continues_where_the_deadline_stood_still() -> None:
    async def wait(deadline: Deadline) -> None:
        async with deadline:
            await asyncio.sleep(LIMIT_S / 2)
            deadline.stop()
            deadline.stop()
            await asyncio.sleep(LIMIT_S)
            deadline.go_on()
            await asyncio.sleep(LIMIT_S)
            deadline.go_on()
            await asyncio.sleep(60)

    async def run() -> float:
        deadline, now = Deadline(LIMIT_S), asyncio.get_running_loop().time
        began = now()
        with pytest.raises(TimeoutError):
            await wait(deadline)
        assert deadline.has_passed
        deadline.stop()
        deadline.go_on()
        return now() - began

    assert 3 * LIMIT_S <= asyncio.run(run()) < 20

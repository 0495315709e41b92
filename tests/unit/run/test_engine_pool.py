"""Requests in an engine pool whose fake engines die, hang and come back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from rlpipe.actors.remote import KILLED
from rlpipe.actors.rollout import Receipt
from rlpipe.actors.weights import Cause, NotLoaded
from rlpipe.configs.schema.root_config import ClusterConfig
from rlpipe.errors import ConfigError, EngineFailed, EngineNotStarted
from rlpipe.run import engine_pool
from rlpipe.run.engine_pool import EnginePool, EpisodePool
from rlpipe.types import GroupRequest, Prompt

CLUSTER = ClusterConfig(suspect_after_s=0.4, dead_after_s=30.0, start_timeout_s=5.0, max_engine_failures=1)


class FakeEngine:
    """A stand-in for a rollout actor's handle, with ``method.remote(...)`` and ``method.options(...).remote(...)``."""

    def __init__(self) -> None:
        self.submitted: list[int] = []
        self.answers: asyncio.Queue[list[int] | Exception] = asyncio.Queue()
        self.submit = self.collect = self
        self._is_collect = False

    def options(self, **options: Any) -> FakeEngine:
        self._is_collect = True
        return self

    def remote(self, *arguments: Any) -> Any:
        if not self._is_collect:
            self.submitted += [request.group_id for request in arguments[0]]
            return None
        self._is_collect = False
        return asyncio.ensure_future(self._next()), object()

    async def _next(self) -> list[Receipt]:
        answer = await self.answers.get()
        if isinstance(answer, Exception):
            raise answer
        return [Receipt(group_id=group_id, num_tokens=1) for group_id in answer]


class Scene:
    """A pool of fake engines, with its messages and the groups that it collected."""

    def __init__(self, *names: str) -> None:
        self.engines = {name: FakeEngine() for name in names}
        self.collected: list[int] = []
        self.loses = 0
        self.said: list[str] = []
        self.kinds: list[str] = []
        self.given_up: list[EngineFailed] = []
        self.failures: list[NotLoaded] = []
        """The errors of the next loads of returning engines."""
        self.pool = EnginePool(
            self.engines,  # type: ignore[arg-type]
            cluster=CLUSTER,
            start=self.start,  # type: ignore[arg-type]
            load_newest=self.load_newest,
            collected=self.take,
            notice=self.note,
            give_up=self.give_up,
        )
        for name in names:
            self.pool.loaded(name, 0)

    def note(self, subject: str, message: str, kind: str = "engine", /) -> None:
        self.said.append(message)
        self.kinds.append(kind)

    def start(self, name: str) -> asyncio.Future[None]:
        return asyncio.ensure_future(asyncio.sleep(0))

    async def load_newest(self, name: str) -> int | NotLoaded:
        return self.failures.pop(0) if self.failures else 0

    async def take(self, groups: object, requests: Mapping[int, GroupRequest]) -> list[GroupRequest]:
        self.loses -= 1
        if self.loses == 0:
            return [*requests.values()]
        self.collected += [request.group_id for request in requests.values()]
        return []

    async def give_up(self, failure: EngineFailed) -> None:
        self.given_up.append(failure)

    def ends(self) -> list[str]:
        return [*self.said, *map(str, self.given_up)]

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.01)


def request(group_id: int) -> GroupRequest:
    prompt = Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(1, np.int32), prompt="", task={})
    return GroupRequest(group_id=group_id, prompt=prompt, group_size=1, max_tokens=1, temperature=1.0, seed=0)


def play(scene: Callable[[], Scene], act: Callable[[Scene], Any]) -> Scene:
    async def run() -> Scene:
        stage = scene()
        serving = asyncio.create_task(stage.pool.run())
        acting = asyncio.ensure_future(act(stage))
        await asyncio.wait((serving, acting), return_when=asyncio.FIRST_COMPLETED)
        if serving.done():
            acting.cancel()
            await serving
        await acting
        serving.cancel()
        return stage

    return asyncio.run(run())


def test_the_work_of_a_dead_engine_goes_to_the_others_and_it_comes_back() -> None:
    async def act(scene: Scene) -> None:
        scene.pool.dispatch([request(0), request(1), request(2)])
        assert scene.engines["a"].submitted == [0, 2]
        scene.engines["a"].answers.put_nowait(RayActorError())
        await scene.until(lambda: sorted(scene.engines["b"].submitted) == [0, 1, 2])
        await scene.until(lambda: len(scene.said) == 2)
        scene.engines["b"].answers.put_nowait([0, 1, 2])
        await scene.until(lambda: sorted(scene.collected) == [0, 1, 2])
        scene.pool.dispatch([request(3)])
        assert scene.engines["a"].submitted == [0, 2, 3]

    scene = play(lambda: Scene("a", "b"), act)
    assert "engine a died: " in scene.said[0]
    assert scene.said[0].endswith("its 2 groups are generated again")
    assert scene.said[1] == "engine a serves again, version 0"


@pytest.mark.parametrize("noticed_by", ["collecting", "weights"])
def test_a_process_that_has_taken_the_place_of_a_dead_one_is_not_killed(
    monkeypatch: pytest.MonkeyPatch, noticed_by: str
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))

    async def act(scene: Scene) -> None:
        await asyncio.sleep(0)  # lets the pool collect
        if noticed_by == "collecting":
            scene.engines["a"].answers.put_nowait(RayTaskError("collect", "", EngineNotStarted("no model yet")))
        else:
            scene.pool.failed("a", NotLoaded(Cause.PROCESS, KILLED))
        await scene.until(lambda: len(scene.said) == 2)

    scene = play(lambda: Scene("a"), act)
    assert scene.said == ["engine a died: its process died or was killed", "engine a serves again, version 0"]
    assert scene.kinds == ["death", "recovery"]
    assert not killed


def test_groups_that_a_living_engine_finishes_though_it_was_given_up_are_dropped() -> None:
    """Check a late report of a load that failed, about an engine whose next process serves that version already."""

    async def act(scene: Scene) -> None:
        await asyncio.sleep(0)
        for name in scene.engines:
            scene.pool.loaded(name, 6)
        scene.pool.dispatch([request(0), request(1)])
        scene.pool.failed("a", NotLoaded(Cause.PROCESS, KILLED))
        await scene.until(lambda: scene.engines["b"].submitted == [1, 0])
        scene.engines["b"].answers.put_nowait([0])
        await scene.until(lambda: scene.collected == [0])
        await scene.until(lambda: len(scene.said) == 2)
        scene.engines["a"].answers.put_nowait([])  # to the call of the collection that has ended
        scene.engines["a"].answers.put_nowait([0])
        scene.engines["b"].answers.put_nowait([0, 1])
        await scene.until(lambda: scene.collected == [0, 1])
        await scene.until(lambda: len(scene.said) == 4)

    scene = play(lambda: Scene("a", "b"), act)
    dropped = {f"1 groups from {name} are dropped: other engines sample them by now" for name in ("a", "b")}
    assert set(scene.said[2:]) == dropped


def test_an_engine_that_cannot_load_what_it_comes_back_to_is_killed_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))

    async def act(scene: Scene) -> None:
        scene.failures = [NotLoaded(Cause.ENGINE, "no room for it")]
        scene.engines["a"].answers.put_nowait(RayActorError())
        await scene.until(lambda: len(scene.said) == 3)

    monkeypatch.setattr(CLUSTER, "max_engine_failures", 2)
    scene = play(lambda: Scene("a"), act)
    assert scene.said[1:] == ["engine a died: no room for it", "engine a serves again, version 0"]
    assert len(killed) == 1


def test_a_restart_that_fails_for_want_of_memory_is_tried_again_and_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: None)
    monkeypatch.setattr(CLUSTER, "max_engine_failures", 2)
    refusals = [ConfigError("vllm can't be started: Free memory on device is less than desired")]

    class Full(Scene):
        def start(self, name: str) -> asyncio.Future[None]:
            started = super().start(name)
            if refusals:
                started = asyncio.get_running_loop().create_future()
                started.set_exception(RayTaskError("start", "", refusals.pop()))
            return started

    async def act(scene: Scene) -> None:
        scene.engines["a"].answers.put_nowait(RayActorError())
        await scene.until(lambda: len(scene.said) == 3)

    scene = play(lambda: Full("a", "b"), act)
    assert "Free memory on device" in scene.said[1]
    assert scene.said[2] == "engine a serves again, version 0"
    assert not scene.given_up


def test_an_engine_that_ray_cannot_reach_is_ended_and_started_once_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check an engine that may be alive but cut off, whose groups other engines generate meanwhile."""
    killed: list[Any] = []
    monkeypatch.setattr(ray, "kill", lambda actor, no_restart: killed.append(actor))
    monkeypatch.setattr(engine_pool, "RESTART_PAUSE_S", 0.01)
    unreachable = [ActorUnavailableError("no connection", None) for _ in range(10)]

    class CutOff(Scene):
        def start(self, name: str) -> asyncio.Future[None]:
            started = super().start(name)
            if unreachable:
                started = asyncio.get_running_loop().create_future()
                started.set_exception(unreachable.pop())
            return started

    async def act(scene: Scene) -> None:
        scene.engines["a"].answers.put_nowait(ActorUnavailableError("no connection", None))
        await scene.until(lambda: len(scene.said) == 2)

    scene = play(lambda: CutOff("a"), act)
    assert "no connection" in scene.said[0]
    assert scene.said[1] == "engine a serves again, version 0", "that is no death for each attempt"
    assert len(killed) == 1


def test_groups_that_are_lost_on_their_way_are_generated_again() -> None:
    async def act(scene: Scene) -> None:
        scene.loses = 1
        scene.pool.dispatch([request(0)])
        scene.engines["a"].answers.put_nowait([0])
        await scene.until(lambda: scene.engines["a"].submitted == [0, 0])
        scene.engines["a"].answers.put_nowait([0])
        await scene.until(lambda: scene.collected == [0])

    scene = play(lambda: Scene("a"), act)
    assert scene.said == ["1 groups from a are generated again: their machine was lost"]


def test_requests_wait_while_no_engine_serves() -> None:
    async def act(scene: Scene) -> None:
        scene.engines["a"].answers.put_nowait(RayActorError())
        scene.pool.dispatch([request(0)])
        await scene.until(lambda: scene.engines["a"].submitted == [0, 0])
        assert scene.pool.num_groups == 1

    play(lambda: Scene("a"), act)


def test_requests_that_waited_for_a_suspect_are_sent_once_it_answers() -> None:
    async def act(scene: Scene) -> None:
        await scene.until(lambda: "suspect" in scene.pool.describe()["engines"]["a"])
        scene.pool.dispatch([request(0)])
        assert scene.engines["a"].submitted == []
        scene.engines["a"].answers.put_nowait([])
        await scene.until(lambda: scene.engines["a"].submitted == [0])

    play(lambda: Scene("a"), act)


def test_an_engine_that_dies_again_and_again_is_retired_and_without_any_the_run_gives_up() -> None:
    async def act(scene: Scene) -> None:
        for name in ("a", "b"):
            for _ in range(2):
                scene.engines[name].answers.put_nowait(RayActorError())
            await scene.until(lambda name=name: any(f"engine {name} died 2 times" in text for text in scene.ends()))
        assert len(scene.given_up) == 1

    scene = play(lambda: Scene("a", "b"), act)
    assert any(text.endswith("; the run continues without it") for text in scene.said)
    assert "engine b died 2 times without finishing a group (cluster.max_engine_failures=1); the last time: " in str(
        scene.given_up[0]
    )


def test_the_states_of_engines_are_recorded_with_their_work() -> None:
    async def act(scene: Scene) -> None:
        scene.pool.dispatch([request(0), request(1), request(2)])
        first, second = scene.pool.parts()
        assert (first.kind, first.name, first.state, first.version, first.queue) == ("engine", "a", "healthy", 0, 2)
        assert (second.queue, second.note) == (1, "")
        assert first.heard_s is not None
        assert first.heard_s < 5
        scene.engines["a"].answers.put_nowait(RayActorError())
        await scene.until(lambda: scene.pool.parts()[0].note != "")
        assert scene.pool.parts()[1].queue == 3  # those of the dead engine have moved
        assert scene.pool.parts()[0].note.startswith("last died because")

    play(lambda: Scene("a", "b"), act)


# Episodes -------------------------------------------------------------------------------------------------------------


class FakePlayers:
    """A stand-in for the handle of a process that plays episodes; it keeps the calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int], str]] = []
        self.play, self.move = self._method("play"), self._method("move")

    def _method(self, name: str) -> SimpleNamespace:
        def remote(groups: Sequence[Any], engine: str) -> None:
            self.calls.append((name, [getattr(group, "group_id", group) for group in groups], engine))

        return SimpleNamespace(remote=remote)


def test_groups_of_a_dead_engine_are_moved_and_not_begun_again() -> None:
    """Check that a group which has ended in its process, unknown to the driver, is not played a second time."""
    players = FakePlayers()
    pool = EpisodePool({"episodes-0": players}, start=lambda name: None, cluster=CLUSTER)  # type: ignore[dict-item, arg-type, return-value]
    pool.play("rollout-0", [request(0), request(1)])
    pool.play("rollout-1", [request(0), request(2)])
    assert players.calls == [("play", [0, 1], "rollout-0"), ("play", [2], "rollout-1"), ("move", [0], "rollout-1")]


def test_groups_whose_answer_did_not_arrive_are_asked_for_again() -> None:
    """Check that a process names what it has received, and only that, after a call that failed."""
    answers: list[list[int] | Exception] = [[0, 1], ActorUnavailableError("a cut", None), [2]]
    players, asked = FakePlayers(), []

    async def answer(received: list[int]) -> list[Receipt]:
        asked.append(received)
        if not answers:
            await asyncio.sleep(60)
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return [Receipt(group_id=own, num_tokens=1) for own in found]

    def collect(wait_s: float, max_groups: int, received: list[int]) -> Any:
        return asyncio.ensure_future(answer(received)), object()

    players.collect = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=collect))  # type: ignore[attr-defined]

    async def scenario() -> None:
        def start(name: str) -> Any:
            found = asyncio.get_running_loop().create_future()
            found.set_result([])
            return found

        async def finished(groups: Any, receipts: Sequence[Receipt]) -> None:
            pass

        pool = EpisodePool({"episodes-0": players}, start=start, cluster=CLUSTER)  # type: ignore[dict-item]
        running = asyncio.create_task(pool.run(finished, lambda *_: None))
        async with asyncio.timeout(5):
            while len(asked) < 4:
                await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(scenario())
    assert asked == [[], [0, 1], [0, 1], [2]]

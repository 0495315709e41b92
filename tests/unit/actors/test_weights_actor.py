"""The versions that each engine, here a fake, receives, whatever dies in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import ray
import weights_actor_cases
from ray.exceptions import ActorUnavailableError, ObjectLostError, RayActorError, RayTaskError
from weights_actor_cases import next_answer, place_engines, served

from rlpipe.actors.remote import KILLED
from rlpipe.actors.weights import Cause, NotLoaded, ServedVersion, WeightsActor
from rlpipe.errors import EngineNotStarted, WeightsMismatch
from rlpipe.types import WeightsKind, WeightsManifest

DIGEST = "right"


class FakeEngine:
    """A stand-in for a rollout actor's handle, whose loads return ``answers`` first, and then the right digest."""

    def __init__(self) -> None:
        self.load = self
        self.versions: list[int] = []
        self.answers: list[str | Exception] = []

    def remote(self, manifest: WeightsManifest, timeout_s: float, *buckets: Any) -> asyncio.Future[str]:
        return asyncio.ensure_future(self._load(manifest.version))

    async def _load(self, version: int) -> str:
        await asyncio.sleep(0)
        answer = next_answer(self.answers, DIGEST)
        self.versions.append(version)
        return answer


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeEngine]:
    return place_engines(monkeypatch, FakeEngine)


def manifest(version: int) -> WeightsManifest:
    return WeightsManifest(version=version, kind=WeightsKind.LORA, digest=DIGEST, num_buckets=0, num_bytes=0)


def play(act: Callable[[WeightsActor], Coroutine[Any, Any, Any]]) -> Any:
    return weights_actor_cases.play(lambda: WeightsActor(engines=["a", "b"], timeout_s=1.0), act)


def test_every_engine_gets_every_version(engines: dict[str, FakeEngine]) -> None:
    async def act(actor: WeightsActor) -> ServedVersion:
        for version in (0, 1):
            await actor.publish(manifest(version), [], 1)
        return await served(actor, 1)

    news: ServedVersion = play(act)
    assert (news.version, news.engines, dict(news.lost)) == (1, ("a", "b"), {})
    assert engines["a"].versions == engines["b"].versions == [0, 1]


def test_a_version_waits_until_it_is_asked_for(engines: dict[str, FakeEngine]) -> None:
    async def act() -> None:
        actor = WeightsActor(engines=["a", "b"], timeout_s=1.0)
        publishing = asyncio.create_task(actor.publish(manifest(0), [], 1))
        await asyncio.sleep(0.01)
        assert await actor.newest() == 0, "so that the learner does not publish it again"
        assert not engines["a"].versions
        assert (await served(actor)).engines == ("a", "b")
        await publishing

    asyncio.run(act())


def test_a_version_that_is_published_again_is_not_loaded_again(engines: dict[str, FakeEngine]) -> None:
    async def act(actor: WeightsActor) -> None:
        for version in (1, 1, 0):
            await actor.publish(manifest(version), [], 1)
        assert await actor.newest() == 1

    play(act)
    assert engines["a"].versions == [1]


def test_a_learner_that_begins_again_publishes_older_versions(engines: dict[str, FakeEngine]) -> None:
    async def act(actor: WeightsActor) -> None:
        await actor.publish(manifest(7), [], 1)
        await actor.publish(manifest(4), [], 2)
        await actor.publish(manifest(8), [], 1)  # a late retry of the dead learner's call
        assert (await served(actor)).version == 4

    play(act)
    assert engines["a"].versions == [7, 4]


def test_an_engine_that_fails_is_named_and_gets_nothing_until_it_is_asked_for(engines: dict[str, FakeEngine]) -> None:
    engines["b"].answers = [WrongTensors()]

    async def act(actor: WeightsActor) -> ServedVersion:
        await actor.publish(manifest(0), [], 1)
        first = await served(actor)
        await actor.publish(manifest(1), [], 1)
        assert await actor.load_newest("b") == 1
        await actor.publish(manifest(2), [], 1)
        assert (await served(actor, 2)).engines == ("a", "b")
        return first

    first: ServedVersion = play(act)
    reason = "it could not load weights version 0: WrongTensors: no"
    assert (first.engines, dict(first.lost)) == (("a",), {"b": NotLoaded(Cause.ENGINE, reason)})
    assert engines["b"].versions == [1, 2]


class WrongTensors(ray.exceptions.RayError):
    def __str__(self) -> str:
        return "no"


@pytest.mark.parametrize(
    "death",
    [RayActorError(), RayTaskError("load", "", EngineNotStarted("another process, no model"))],
    ids=["dead", "restarted"],
)
def test_a_dead_engine_is_named(engines: dict[str, FakeEngine], death: Exception) -> None:
    engines["b"].answers = [death]

    async def act(actor: WeightsActor) -> ServedVersion:
        await actor.publish(manifest(0), [], 1)
        return await served(actor)

    news: ServedVersion = play(act)
    assert (news.engines, dict(news.lost)) == (("a",), {"b": NotLoaded(Cause.PROCESS, KILLED)})


def test_an_engine_that_ray_cannot_reach_may_be_alive(engines: dict[str, FakeEngine]) -> None:
    engines["b"].answers = [ActorUnavailableError("no connection", None)]

    async def act(actor: WeightsActor) -> ServedVersion:
        await actor.publish(manifest(0), [], 1)
        return await served(actor)

    assert play(act).lost["b"].process_alive


def test_an_engine_that_came_back_before_anyone_was_told_is_not_lost(engines: dict[str, FakeEngine]) -> None:
    engines["b"].answers = [RayActorError()]

    async def act(actor: WeightsActor) -> ServedVersion:
        await actor.publish(manifest(0), [], 1)
        assert await actor.load_newest("b") == 0
        return await served(actor)

    news: ServedVersion = play(act)
    assert (news.engines, dict(news.lost)) == (("a", "b"), {})


def test_weights_that_died_with_the_learner_blame_no_engine(engines: dict[str, FakeEngine]) -> None:
    engines["b"].answers = [ObjectLostError("00" * 28, None, "")]

    async def act(actor: WeightsActor) -> None:
        await actor.publish(manifest(3), [], 1)
        assert await actor.wait_served(0, 0.01) is None
        assert await actor.newest() == -1, "so that it is published again"
        waiting = asyncio.create_task(actor.load_newest("a"))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await actor.publish(manifest(2), [], 2)
        assert await waiting == 2
        assert (await served(actor)).engines == ("a", "b")

    play(act)


def test_the_first_version_of_a_new_process_is_news(engines: dict[str, FakeEngine]) -> None:
    async def publish(actor: WeightsActor) -> int:
        await actor.publish(manifest(0), [], 1)
        return (await served(actor)).number

    async def replaced(number: int) -> ServedVersion | None:
        actor = WeightsActor(engines=["a", "b"], timeout_s=1.0)
        waiting = asyncio.create_task(actor.wait_served(number, 4.0))
        await actor.publish(manifest(1), [], 1)
        return await waiting

    news = asyncio.run(replaced(play(publish)))
    assert news is not None
    assert news.version == 1


def test_a_wrong_digest_ends_the_run(engines: dict[str, FakeEngine]) -> None:
    engines["b"].answers = ["wrong"]

    async def act(actor: WeightsActor) -> None:
        await actor.publish(manifest(0), [], 1)
        await actor.wait_served(0, 1.0)

    with pytest.raises(WeightsMismatch, match="engine b does not serve weights version 0: its digest is wrong"):
        play(act)


def test_a_wrong_digest_of_an_engine_that_comes_late_ends_the_run_too(engines: dict[str, FakeEngine]) -> None:
    engines["b"].answers = [RayActorError(), "wrong"]

    async def act(actor: WeightsActor) -> None:
        await actor.publish(manifest(0), [], 1)
        number = (await served(actor)).number
        waiting = asyncio.create_task(actor.wait_served(number, 4.0))
        await asyncio.sleep(0.01)
        assert await actor.load_newest("b") == NotLoaded(Cause.ENGINE, "its digest is wrong")
        async with asyncio.timeout(1):
            await waiting

    with pytest.raises(WeightsMismatch, match="engine b does not serve weights version 0: its digest is wrong"):
        play(act)

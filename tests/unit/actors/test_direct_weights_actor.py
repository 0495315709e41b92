"""The engines, here fakes, that the actor connects to the learner, whatever dies in between."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import pytest
import weights_actor_cases
from ray.exceptions import RayActorError
from weights_actor_cases import next_answer, place_engines, served

from rlpipe.actors.remote import KILLED
from rlpipe.actors.weights import Cause, DirectWeightsActor, NotLoaded, ServedVersion
from rlpipe.errors import WeightsMismatch
from rlpipe.types import TensorSpec, Transfer, WeightsKind, WeightsManifest

WORKERS = 2
TRANSFER = Transfer(
    address="127.0.0.1", port=1, buffer_bytes=64, specs=[TensorSpec(name="weight", dtype="float32", shape=(2, 3))]
)


class FakeEngine:
    """A stand-in for a rollout actor's handle that answers with ``answers`` first, and then with the right digest."""

    def __init__(self) -> None:
        self.load = self
        self.transfers: list[Transfer] = []
        self.answers: list[str | Exception] = []
        self.hangs = False

    def remote(self, manifest: WeightsManifest, timeout_s: float, *buckets: Any) -> asyncio.Future[str]:
        assert manifest.transfer is not None
        self.transfers.append(manifest.transfer)
        return asyncio.ensure_future(self._load(manifest.version))

    async def _load(self, version: int) -> str:
        await asyncio.sleep(100 if self.hangs else 0)
        return next_answer(self.answers, f"digest of {version}")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> dict[str, FakeEngine]:
    return place_engines(monkeypatch, FakeEngine)


def manifest(version: int) -> WeightsManifest:
    digest = f"digest of {version}"
    return WeightsManifest(version=version, kind=WeightsKind.FULL, digest=digest, num_buckets=0, num_bytes=24)


async def send(actor: DirectWeightsActor, version: int, incarnation: int = 1) -> int:
    """Offer and publish a version, as the learner does."""
    num_processes = await actor.offer(replace(manifest(version), digest="", transfer=TRANSFER), incarnation)
    if num_processes:
        await actor.publish(manifest(version), [], incarnation)
    return num_processes


def play(act: Callable[[DirectWeightsActor], Coroutine[Any, Any, Any]], timeout_s: float = 1.0) -> Any:
    def make() -> DirectWeightsActor:
        return DirectWeightsActor(engines=["a", "b"], timeout_s=timeout_s, workers_per_engine=WORKERS)

    return weights_actor_cases.play(make, act)


def test_every_worker_of_every_engine_gets_a_rank_alongside_the_learner(engines: dict[str, FakeEngine]) -> None:
    async def act(actor: DirectWeightsActor) -> ServedVersion:
        assert await send(actor, 0) == 1 + 2 * WORKERS
        assert await send(actor, 0) == 0, "it is served already"
        assert await send(actor, 1) == 1 + 2 * WORKERS
        return await served(actor, 1)

    news: ServedVersion = play(act)
    assert (news.version, news.engines, dict(news.lost)) == (1, ("a", "b"), {})
    for name, first_rank in {"a": 1, "b": 3}.items():
        assert [(one.first_rank, one.num_processes) for one in engines[name].transfers] == [(first_rank, 5)] * 2


def test_another_digest_than_what_was_sent_ends_the_run(engines: dict[str, FakeEngine]) -> None:
    engines["b"].answers = ["another"]

    async def act(actor: DirectWeightsActor) -> None:
        await send(actor, 0)
        with pytest.raises(WeightsMismatch, match="engine b does not serve weights version 0"):
            await served(actor)

    play(act)


def test_an_engine_that_comes_back_gets_its_share_with_the_next_sending(engines: dict[str, FakeEngine]) -> None:
    engines["b"].answers = [RayActorError()]

    async def act(actor: DirectWeightsActor) -> None:
        await send(actor, 0)
        assert dict((await served(actor)).lost) == {"b": NotLoaded(Cause.PROCESS, KILLED)}
        assert await actor.newest() == 0
        coming = asyncio.create_task(actor.load_newest("b"))
        await asyncio.sleep(0.01)
        assert await actor.newest() == -1, "so that the learner sends again"
        assert not coming.done()
        assert await send(actor, 0) == 1 + 2 * WORKERS
        assert await coming == 0
        assert await actor.newest() == 0

    play(act)
    assert len(engines["a"].transfers) == 2


def test_one_that_comes_while_others_receive_waits_for_the_next_sending(engines: dict[str, FakeEngine]) -> None:
    engines["b"].answers = [RayActorError()]

    async def act(actor: DirectWeightsActor) -> None:
        await send(actor, 0)
        await actor.offer(replace(manifest(1), digest="", transfer=TRANSFER), 1)
        coming = asyncio.create_task(actor.load_newest("b"))
        await asyncio.sleep(0.01)
        await actor.publish(manifest(1), [], 1)
        assert (await served(actor, 1)).engines == ("a",)
        assert await actor.newest() == -1
        assert await send(actor, 1) == 1 + 2 * WORKERS
        assert await coming == 1

    play(act)


def test_an_engine_that_died_in_a_transfer_with_the_learner_has_died_once(engines: dict[str, FakeEngine]) -> None:
    engines["b"].answers = [RayActorError()]

    async def act(actor: DirectWeightsActor) -> None:
        await actor.offer(replace(manifest(0), digest="", transfer=TRANSFER), 1)  # the learner dies before it publishes
        await asyncio.sleep(0.01)
        coming = asyncio.create_task(actor.load_newest("b"))
        await asyncio.sleep(0.01)
        assert await send(actor, 0, incarnation=2) == 1 + 2 * WORKERS, "its new process takes part"
        assert await coming == 0
        assert not (await served(actor)).lost

    play(act)


def test_a_version_that_was_offered_to_a_dead_weights_actor_is_sent_again(engines: dict[str, FakeEngine]) -> None:
    async def act(actor: DirectWeightsActor) -> None:
        await actor.publish(manifest(3), [], 1)
        assert await actor.newest() == -1
        assert await actor.wait_served(0, 0.01) is None
        await send(actor, 3)
        assert (await served(actor)).version == 3

    play(act)


@pytest.mark.parametrize("failed", [False, True])
def test_an_engine_that_a_dead_learner_left_is_reported_and_not_waited_for(
    engines: dict[str, FakeEngine], failed: bool
) -> None:
    engines["b"].hangs = not failed
    engines["b"].answers = [RayActorError()] * failed

    async def act(actor: DirectWeightsActor) -> None:
        await actor.offer(replace(manifest(5), digest="", transfer=TRANSFER), 1)
        await asyncio.sleep(0.01)
        assert await send(actor, 4, incarnation=2) == 1 + WORKERS
        news = await served(actor)
        assert (news.version, news.engines) == (4, ("a",))
        assert (KILLED if failed else "within weights.timeout_s=0.2 seconds") in news.lost["b"].reason

    play(act, timeout_s=0.2)

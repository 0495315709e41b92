"""Groups that are sent to a process that plays episodes before it has started, or that it has played already."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from replay_cases import group

from rlpipe.actors import episodes
from rlpipe.actors.episodes import EpisodeActor, EpisodeSetup
from rlpipe.types import GroupRequest, RolloutGroup


class Player:
    """A player whose groups are over at once, but which takes a moment to start."""

    def __init__(self) -> None:
        self.played: list[int] = []
        self.num_starts = 0

    async def start(self) -> None:
        self.num_starts += 1
        await asyncio.sleep(0.05)

    async def play(self, request: GroupRequest) -> RolloutGroup:
        self.played.append(request.group_id)
        return group(request.group_id, [1.0])


def test_a_group_that_is_sent_early_or_twice_is_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    player = Player()
    monkeypatch.setattr(episodes, "open_player", lambda config, sample, is_scored: (player, []))
    monkeypatch.setattr(episodes, "start_reaper", lambda: None)
    config: Any = SimpleNamespace(environment=SimpleNamespace(concurrency=1))

    async def scenario() -> None:
        actor, setup = EpisodeActor("episodes-0"), EpisodeSetup(config=config, engines={}, folder=".")
        requests = [cast(GroupRequest, SimpleNamespace(group_id=number)) for number in range(2)]
        starting = asyncio.gather(actor.start(setup), actor.start(setup))  # again, as Ray repeats calls
        await actor.play(requests, "rollout-0")
        await starting
        assert player.num_starts == 1
        await actor.play(requests, "rollout-0")
        while len(actor._finished) < len(requests):
            await asyncio.sleep(0.01)
        await actor.play(requests, "rollout-0")  # again, as the first call's answer was lost
        for _ in range(2):  # the answer to the first call may not have reached the driver
            receipts, _ = await actor.collect(1.0, 8, [])
            assert [receipt.group_id for receipt in receipts] == [0, 1]
        assert player.played == [0, 1]
        waiting = [asyncio.create_task(actor.collect(1.0, 8, [0, 1])) for _ in range(2)]
        await asyncio.sleep(0)
        await actor.play([cast(GroupRequest, SimpleNamespace(group_id=2))], "rollout-0")
        for receipts, _ in await asyncio.gather(*waiting):
            assert [receipt.group_id for receipt in receipts] == [2]
        assert await actor.collect(0.0, 8, [2]) == ([], [])

    asyncio.run(scenario())

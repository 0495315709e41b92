"""Calls of a user's hook by the replay actor: in order, without waiting, and with dropped groups counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import RayActorError

from rlpipe.actors.replay import MAX_SHOWN, HookActor, HookFeed
from rlpipe.types import Prompt, RolloutGroup


def make_group(group_id: int) -> RolloutGroup:
    prompt = Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(1, np.int32), prompt="", task={})
    return RolloutGroup(group_id=group_id, prompt=prompt, rollouts=[])


class FakeHook:
    """A stand-in for Ray's handle, whose calls end once ``going_on`` is set."""

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[int] = []
        self.going_on = asyncio.Event()
        self._error = error
        self.call: Any = self

    async def remote(self, groups: Sequence[RolloutGroup]) -> None:
        await self.going_on.wait()
        self.seen += [group.group_id for group in groups]
        if self._error is not None:
            raise self._error


def test_groups_come_in_order() -> None:
    async def run() -> None:
        hook = FakeHook()
        hook.going_on.set()
        feed = HookFeed(hook, print)
        for group_id in range(5):
            feed.offer([make_group(group_id)])
        feed.offer([])
        await feed.drain(10)
        assert hook.seen == [0, 1, 2, 3, 4]
        assert feed.metrics() == {"hook/left_out": 0, "hook/failed": 0}

    asyncio.run(run())


def test_a_hook_that_hangs_is_not_waited_for() -> None:
    async def run() -> None:
        hook = FakeHook()
        feed = HookFeed(hook, print, max_waiting=3)
        for group_id in range(10):
            feed.offer([make_group(group_id), make_group(100 + group_id)])
        await feed.drain(0.01)
        assert feed.metrics() == {"hook/left_out": 14, "hook/failed": 0}
        hook.going_on.set()
        await feed.drain(10)
        assert hook.seen == [0, 100, 1, 101, 2, 102]
        feed.offer([make_group(7)])
        await feed.drain(10)
        assert hook.seen[-1] == 7

    asyncio.run(run())


def test_failures_are_counted_and_the_first_ones_told() -> None:
    async def run() -> None:
        hook, told = FakeHook(RayActorError()), list[str]()
        hook.going_on.set()
        feed = HookFeed(hook, told.append)
        for group_id in range(5):
            feed.offer([make_group(group_id)])
        await feed.drain(10)
        assert feed.metrics() == {"hook/left_out": 0, "hook/failed": 5}
        assert len(told) == MAX_SHOWN
        assert told[0].startswith("scoring.on_rollouts_scored failed on 1 groups: RayActorError")

    asyncio.run(run())


def test_a_coroutine_function_is_a_hook_as_well(tmp_path: Path) -> None:
    file = tmp_path / "hooks.py"
    file.write_text("seen = []\nasync def hook(groups):\n    seen.extend(groups)\n")
    actor = HookActor(f"{file}:hook", str(tmp_path))
    actor.call([make_group(3)])
    assert [group.group_id for group in actor._function.__globals__["seen"]] == [3]

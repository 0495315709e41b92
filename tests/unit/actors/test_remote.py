"""Tests of waiting for remote calls."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from rlpipe.actors.remote import await_remote
from rlpipe.replay.step_queue import Notifier


async def wait_for_answer(done: asyncio.Future[None]) -> None:
    await await_remote(done, "an answer", within=60, option="a.option")


async def wait_for_notice(done: asyncio.Future[None]) -> None:
    board = Notifier()
    done.add_done_callback(lambda _: running.append(asyncio.ensure_future(board.notify())))
    running: list[asyncio.Future[None]] = []
    await board.wait_for(done.done, 60)


@pytest.mark.parametrize("wait", [wait_for_answer, wait_for_notice])
@pytest.mark.parametrize("num_turns", range(6))
def test_what_is_cancelled_ends_though_its_answer_comes_at_that_moment(
    wait: Callable[[asyncio.Future[None]], Awaitable[None]], num_turns: int
) -> None:
    """Check that the cancelled task ends; otherwise a run that waits for it would never end."""

    async def run() -> None:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def forever() -> None:
            while True:
                await wait(done)
                await asyncio.sleep(0.05)

        task = asyncio.ensure_future(forever())
        await asyncio.sleep(0.01)
        done.set_result(None)
        for _ in range(num_turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=1)
        assert task.cancelled()

    asyncio.run(run())

"""Tests of waiting for remote calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable

import pytest

from rlpipe.actors import remote
from rlpipe.actors.remote import await_remote
from rlpipe.errors import WaitTimeout
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


@pytest.mark.parametrize("after_s", [0.0, 0.05])
def test_an_answer_counts_though_this_process_stood_still_past_the_limit(
    monkeypatch: pytest.MonkeyPatch, after_s: float
) -> None:
    """Check an answer that came while the process was suspended, and one that comes shortly after."""
    monkeypatch.setattr(remote, "SUSPENDED_S", 0.05)

    async def run() -> str:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[str] = loop.create_future()

        def stand_still() -> None:
            answering = threading.Timer(0.05, loop.call_soon_threadsafe, (answer,))
            answering.start()
            time.sleep(0.2)
            answering.join()

        def answer() -> None:
            if after_s:
                loop.call_later(after_s, done.set_result, "here")
            else:
                done.set_result("here")

        loop.call_soon(stand_still)
        return await await_remote(done, "an answer", within=0.1, option="a.option")

    assert asyncio.run(run()) == "here"


def test_a_call_without_an_answer_ends_at_its_limit_and_is_cancelled() -> None:
    async def run() -> bool:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with pytest.raises(WaitTimeout, match=r"waited 0\.05 seconds \(a\.option\) for an answer; it has not answered"):
            await await_remote(never, "an answer", within=0.05, option="a.option")
        return never.cancelled()

    assert asyncio.run(run())

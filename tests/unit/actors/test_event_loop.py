"""Tests that a run's event loop also works where another loop runs, as in a notebook."""

import asyncio
import signal
import threading

import pytest

from rlpipe.actors.remote import run_event_loop


async def thread_name() -> str:
    await asyncio.sleep(0)
    return threading.current_thread().name


def test_the_loop_runs_in_this_thread() -> None:
    assert run_event_loop(thread_name()) == threading.current_thread().name


def test_the_loop_runs_in_another_thread_alongside_a_loop() -> None:
    async def notebook() -> str:
        return run_event_loop(thread_name())

    assert asyncio.run(notebook()) != threading.current_thread().name


def test_errors_come_out_of_the_other_thread() -> None:
    async def fails() -> None:
        raise ValueError("no")

    async def notebook() -> None:
        run_event_loop(fails())

    with pytest.raises(ValueError, match="no"):
        asyncio.run(notebook())


def test_an_interrupt_cancels_the_run_and_waits_for_its_end() -> None:
    happened: list[str] = []

    async def lasts() -> None:
        await asyncio.sleep(0.2)  # until the other thread waits
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        try:
            await asyncio.sleep(10)
        finally:
            await asyncio.sleep(0.01)
            happened.append("cleaned up")

    def notebook() -> None:
        asyncio.events._set_running_loop(asyncio.new_event_loop())  # a loop whose handler of Ctrl-C is Python's own
        try:
            run_event_loop(lasts())
        finally:
            asyncio.events._set_running_loop(None)

    with pytest.raises(KeyboardInterrupt):
        notebook()
    assert happened == ["cleaned up"]

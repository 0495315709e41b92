"""Ctrl-C and SIGTERM: the first one stops the run in good order, a second one at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from rlpipe.errors import Interrupted, RunError

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(stop: Callable[[RunError], Awaitable[None]]) -> Iterator[None]:
    """Within the block, inside a running event loop, the first signal calls ``stop`` and the second one interrupts.

    Threads other than the first can't receive signals; there it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop, main = asyncio.get_running_loop(), asyncio.current_task()
    assert main is not None
    stopping: list[asyncio.Future[None]] = []

    def receive(number: signal.Signals) -> None:
        if stopping:
            main.cancel()
            return
        reason = Interrupted(f"stopped by {number.name}; the same command goes on from the checkpoint")
        stopping.append(asyncio.ensure_future(stop(reason)))

    earlier = {number: signal.getsignal(number) for number in STOPPING}
    for number in STOPPING:
        loop.add_signal_handler(number, receive, number)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)

"""Ctrl-C and SIGTERM: the first signal stops the run in an orderly way, the second one immediately."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

from rlpipe.errors import Interrupted, RunError

STOPPING = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(stop: Callable[[RunError], Awaitable[None]]) -> Iterator[None]:
    """Call ``stop`` at the first signal within the block, and end the process at the second.

    Needs a running event loop. In threads other than the main one, which can't receive signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    stopping: list[asyncio.Future[None]] = []

    def receive(number: signal.Signals) -> None:
        if stopping:
            # Skip Python's shutdown, in which a thread that waits in Ray may crash; Ray ends the driver's processes.
            print("rlpipe: interrupted", file=sys.stderr, flush=True)
            os._exit(Interrupted.exit_code)
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

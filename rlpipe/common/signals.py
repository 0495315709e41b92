"""The handler by which SIGTERM interrupts a command as Ctrl-C does, outside an event loop."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

ONE_SIGNAL_S = 0.3
"""Seconds within which several signals count as one; people press Ctrl-C twice more slowly."""


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raise ``KeyboardInterrupt`` at a SIGTERM within the block, as Python does at a SIGINT.

    ``timeout`` and batch systems signal both the process and its group, which is one signal here. In threads other than
    the main one, which can't receive signals, it does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received_at = -math.inf

    def receive(number: int, frame: object) -> None:
        nonlocal received_at
        before, received_at = received_at, time.monotonic()
        if received_at - before >= ONE_SIGNAL_S:
            raise KeyboardInterrupt

    earlier = signal.signal(signal.SIGTERM, receive)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, earlier)

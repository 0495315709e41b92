"""Hands on what is said of rows while they are opened and rendered, for a run's user, who does not see every log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SPOKEN = ("rlpipe.data.masks", "rlpipe.data.prepared")
"""Loggers whose lines at level INFO are for users, too."""


class _Relay(logging.Handler):
    def __init__(self, tell: Callable[[str], None], accepts: Callable[[int], bool]) -> None:
        super().__init__()
        self._tell = tell
        self.addFilter(lambda record: accepts(record.levelno))

    def emit(self, record: logging.LogRecord) -> None:
        self._tell(record.getMessage())


@contextmanager
def told(tell: Callable[[str], None], *, warnings: bool) -> Iterator[None]:
    """Calls ``tell`` with lines at level INFO that are for users, and with ``warnings`` of all that read rows."""
    relays = [(name, _Relay(tell, lambda level: level == logging.INFO)) for name in SPOKEN]
    if warnings:
        relays.append(("rlpipe.data", _Relay(tell, lambda level: level >= logging.WARNING)))
    for name in SPOKEN:
        logging.getLogger(name).setLevel(logging.INFO)
    for name, relay in relays:
        logging.getLogger(name).addHandler(relay)
    try:
        yield
    finally:
        for name, relay in relays:
            logging.getLogger(name).removeHandler(relay)

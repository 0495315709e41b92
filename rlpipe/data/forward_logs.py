"""Forwarding of log messages about opening and rendering rows to a run's user, who does not see every log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

MASKS = "rlpipe.data.masks"
SPOKEN = (MASKS, "rlpipe.data.cached_rows", "rlpipe.data.render_rows")
"""Loggers whose INFO messages are for users, too."""


class _Relay(logging.Handler):
    """A log handler that passes each message on once."""

    def __init__(self, tell: Callable[[str], None], accepts: Callable[[int], bool]) -> None:
        super().__init__()
        self._report, self._told = tell, set[str]()
        self.addFilter(lambda record: accepts(record.levelno))

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message not in self._told:
            self._told.add(message)
            self._report(message)


@contextmanager
def forward_logs(tell: Callable[[str], None], *, warnings: bool, spoken: Sequence[str] = SPOKEN) -> Iterator[None]:
    """Call ``tell`` with INFO messages of the ``spoken`` loggers and, if ``warnings``, warnings of ``rlpipe.data``."""
    relays = [(name, _Relay(tell, lambda level: level == logging.INFO)) for name in spoken]
    if warnings:
        relays.append(("rlpipe.data", _Relay(tell, lambda level: level >= logging.WARNING)))
    levels = {name: logging.getLogger(name).level for name in spoken}
    for name in spoken:
        logging.getLogger(name).setLevel(logging.INFO)
    for name, relay in relays:
        logging.getLogger(name).addHandler(relay)
    try:
        yield
    finally:
        for name, relay in relays:
            logging.getLogger(name).removeHandler(relay)
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


@contextmanager
def mask_notes() -> Iterator[list[str]]:
    """Collect the messages on how the loss mask is made while the context is open."""
    notes: list[str] = []
    with forward_logs(notes.append, warnings=False, spoken=[MASKS]):
        yield notes

"""Phases of a run until its first step, each shown while it lasts and recorded with its duration."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from rlpipe.common.formatting import print_line
from rlpipe.configs.schema.root_config import TrackingConfig

TICK_S = 0.5
"""Seconds between updates of the line at the bottom of a terminal."""
REMINDER_S = 10.0
"""Seconds after which an active phase is printed again, if there is no such line."""
WORTH_A_LINE_S = 1.0
CLEAR_LINE = "\r\x1b[2K"


@dataclass
class Start:
    """Start of one run; ``seconds`` holds the durations of finished phases, in the order in which they ended."""

    began: float
    seconds: dict[str, float] = field(default_factory=dict)
    first_step_s: float | None = None
    """Seconds from the start of the process, or of ``train``, to the end of the first step."""

    def summary(self) -> dict[str, object]:
        """Return the entries for ``summary.json``; none for a run that trained no step."""
        if self.first_step_s is None:
            return {}
        startup = {name: round(seconds, 3) for name, seconds in self.seconds.items()}
        return {"first_step_s": round(self.first_step_s, 3), "startup": startup}


class Phases:
    """Phases of this process's runs; a run may prepare itself by another run within one of its own phases.

    Nothing is printed before ``show``. All methods may be called from any thread.
    """

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._active: dict[str, tuple[float, Start | None]] = {}
        """Start time and run of each active phase."""
        self._start: Start | None = None
        self._is_pending = False
        """Whether ``show`` was called for a run that has not begun yet."""
        self._print: Callable[[str], None] | None = None
        self._stream: TextIO | None = None
        self._reminded = 0.0

    def show(self, tracking: TrackingConfig, *, began: float | None = None, stream: TextIO | None = None) -> None:
        """Show the phases of the run about to begin, as its config asks; ``began`` is when its process began."""
        stream = stream or sys.stdout
        with self._lock:
            self._start, self._is_pending = Start(self._clock() if began is None else began), True
            if tracking.progress == "none":
                return
            self._print = lambda text: print_line(text, stream)
            is_live = tracking.progress == "live" or (tracking.progress == "auto" and stream.isatty())
            self._stream = stream if is_live else None
            self._reminded = self._clock()
        threading.Thread(target=self._tick, name="phases", daemon=True).start()

    def hide(self) -> None:
        """Undo ``show``: another run of this process may be shown elsewhere, or not at all."""
        with self._lock:
            self._clear()
            self._print = self._stream = None
            if self._is_pending:
                self._start, self._is_pending = None, False

    def hand_over(self, show_message: Callable[[str], None]) -> None:
        """Print lines with ``show_message`` from now on; leave the live line to a display that calls ``describe``."""
        with self._lock:
            self._clear()
            self._stream = None
            if self._print is not None:
                self._print = show_message

    @contextmanager
    def run(self) -> Iterator[Start]:
        """Yield the start of a run, to which the phases within belong."""
        with self._lock:
            outer = None if self._is_pending else self._start
            if not self._is_pending or self._start is None:
                self._start = Start(self._clock())
            start, self._is_pending = self._start, False
        try:
            yield start
        finally:
            with self._lock:
                self._active = {name: entry for name, entry in self._active.items() if entry[1] is not start}
                self._start = outer
                if outer is None:
                    self.hide()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        self.begin(name)
        try:
            yield
        finally:
            self.end(name)

    def begin(self, name: str) -> None:
        with self._lock:
            self._active[name] = (self._clock(), self._start)
            if self._stream is None:
                self._line(name)

    def end(self, name: str) -> None:
        """End a phase; do nothing if it is over already."""
        with self._lock:
            if name not in self._active:
                return
            began, start = self._active.pop(name)
            duration = self._clock() - began
            if start is not None:
                start.seconds[name] = start.seconds.get(name, 0.0) + duration
            if duration >= WORTH_A_LINE_S or self._stream is not None:
                self._line(f"{name}: took {duration:.1f} s")

    def end_all(self) -> None:
        """End the phases of the current run; those of a run that contains it go on."""
        with self._lock:
            for name in [name for name, (_, start) in self._active.items() if start is self._start]:
                self.end(name)

    def first_step(self) -> None:
        """Record that the run has trained a step, which ends its start."""
        with self._lock:
            self.end_all()
            if self._start is not None and self._start.first_step_s is None:
                self._start.first_step_s = self._clock() - self._start.began
                self._line(f"first step, {self._start.first_step_s:.1f} s after the start")

    def active(self) -> Mapping[str, float]:
        """Return the seconds that each active phase has lasted so far."""
        with self._lock:
            now = self._clock()
            return {name: now - began for name, (began, _) in self._active.items()}

    def _line(self, text: str) -> None:
        if self._print is not None and self._start is not None:
            self._clear()
            self._reminded = self._clock()
            self._print(f"{self._clock() - self._start.began:6.1f} s  {text}")

    def _clear(self) -> None:
        if self._stream is not None:
            print_line(CLEAR_LINE, self._stream, end="")

    def _tick(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self._lock:
                if self._print is None:
                    return
                if self._stream is not None:
                    print_line(f"{CLEAR_LINE}  {self.describe()}"[:200], self._stream, end="")
                elif self._is_reminder_due():
                    self._line(f"still {self.describe()}")

    def _is_reminder_due(self) -> bool:
        starts = self._start is not None and self._start.first_step_s is None
        return bool(self._active) and starts and self._clock() - self._reminded > REMINDER_S

    def describe(self) -> str:
        """Return the active phases with their seconds, as text."""
        return ", ".join(f"{name} ({seconds:.0f} s)" for name, seconds in self.active().items())


PHASES = Phases()
"""Phases of this process."""

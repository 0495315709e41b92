"""Progress of a run on the terminal: a live display, or plain lines if the output is no terminal."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from typing import Protocol, TextIO

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlpipe.configs.schema.root_config import TrackingConfig
from rlpipe.tracking.phases import PHASES
from rlpipe.tracking.view import RunView, format_duration

logger = logging.getLogger(__name__)

EVERY_STEP_UNTIL = 20
LINES_AFTERWARDS = 50
LONGEST_SILENCE_S = 10.0
REFRESHES_PER_SECOND = 4


class Progress(Protocol):
    """Display of a run's steps; ``start`` is called first, ``close`` last."""

    def start(self, total: int, done: int = 0) -> None:
        """Expect ``total`` steps, of which an earlier process has done the first ``done``."""

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the end of a step, counted from 1; a second call for it adds metrics, such as ``eval/accuracy``."""

    def message(self, text: str) -> None:
        """Show ``text`` on a line of its own."""

    def close(self) -> None: ...


class NoProgress:
    """Display that shows nothing; messages go to the log."""

    def start(self, total: int, done: int = 0) -> None:
        pass

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        pass

    def message(self, text: str) -> None:
        logger.info(text)

    def close(self) -> None:
        pass


class PlainProgress:
    """Display of plain lines for the first steps, then every n-th, at least every ten seconds, and for the last."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._view = RunView(clock)
        self._first_step = 0
        self._printed_at = -math.inf

    def start(self, total: int, done: int = 0) -> None:
        self._first_step = done
        self._view.start(total, done)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._view.update(step, metrics)
        if "eval/accuracy" in metrics or self._is_due(step):
            self._printed_at = self._clock()
            self.message(self._line())

    def _is_due(self, step: int) -> bool:
        every = math.ceil(self._view.total / LINES_AFTERWARDS)
        return (
            step - self._first_step <= EVERY_STEP_UNTIL
            or step % every == 0
            or step == self._view.total
            or self._clock() - self._printed_at >= LONGEST_SILENCE_S
        )

    def _line(self) -> str:
        view = self._view
        parts = [f"step {view.step}/{view.total}", *(f"{name} {value}" for name, value in view.figures())]
        if view.phases():
            parts.append("time " + ", ".join(f"{name} {seconds}" for name, seconds in view.phases()))
        return "  ".join([*parts, f"ETA {format_duration(view.eta_s)}"])

    def message(self, text: str) -> None:
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        pass


class LiveProgress:
    """Display of a few live lines at the bottom of the terminal; whatever else is printed appears above them."""

    def __init__(self, console: Console, run_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_name = run_name
        self._view = RunView(clock)
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=REFRESHES_PER_SECOND)

    def start(self, total: int, done: int = 0) -> None:
        self._view.start(total, done)
        self._live.start(refresh=True)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._view.update(step, metrics)

    def message(self, text: str) -> None:
        self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        self._live.stop()

    def render(self) -> RenderableType:
        return Lines(self._bar(), *self._details())

    def _bar(self) -> Table:
        view = self._view
        row = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None, None, None):
            row.add_column(ratio=ratio, no_wrap=True)
        row.add_row(
            Text(self._run_name, style="bold"),
            ProgressBar(total=max(view.total, 1), completed=view.step),
            Text(f"{view.step}/{view.total}"),
            Text(format_duration(view.elapsed_s), style="dim"),
            Text(f"ETA {format_duration(view.eta_s)}", style="cyan"),
        )
        return row

    def _details(self) -> list[Columns]:
        """Return the figures and the phases; each entry wraps as a whole in a narrow terminal."""
        view = self._view
        figures = [Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in view.figures()]
        phases = [Text.assemble((f"{name} ", "dim"), f"{seconds} s") for name, seconds in view.phases()]
        if lasting := PHASES.describe():
            figures.insert(0, Text(lasting, style="cyan"))
        if sparkline := view.sparkline():
            phases.insert(0, Text(sparkline, style="green"))
        return [Columns(line, padding=(0, 2)) for line in (figures, phases) if line]


def open_progress(config: TrackingConfig, *, run_name: str, stream: TextIO | None = None) -> Progress:
    """Return the display that ``config.progress`` asks for; ``auto`` is live only on a terminal (default: stdout)."""
    stream = stream or sys.stdout
    if config.progress == "none":
        return NoProgress()
    console = Console(file=stream, force_terminal=True if config.progress == "live" else None)
    if config.progress == "live" or (config.progress == "auto" and stream.isatty() and not console.is_dumb_terminal):
        return LiveProgress(console, run_name)
    return PlainProgress(stream)

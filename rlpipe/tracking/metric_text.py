"""Metrics as text for people: a line a step, and tables."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlpipe.common.formatting import printable, shortened
from rlpipe.tracking.health_measures import reward_of

PACE_STEPS = 20
SPARKS = "▁▂▃▄▅▆▇█"
SPARK_STEPS = 24
PHASE_PREFIX = "time/"


def is_phase(metric: str) -> bool:
    """Return whether a metric is the seconds of one phase; ``time/step`` covers all of them."""
    return metric.startswith(PHASE_PREFIX) and metric != f"{PHASE_PREFIX}step"


def format_number(value: float) -> str:
    """Format a number with three decimals, or with three significant digits if it is very small or large."""
    return f"{value:.3f}" if value == 0 or 0.01 <= abs(value) < 1000 else f"{value:.3g}"


def format_duration(seconds: float | None) -> str:
    """Format seconds as ``1:02:03`` or ``2:03``, or as ``-:--`` while unknown."""
    if seconds is None:
        return "-:--"
    minutes, remainder = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{remainder:02}" if hours else f"{minutes}:{remainder:02}"


FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("loss", "loss", format_number),
    ("reward", "reward", format_number),
    ("completions/mean_length", "length", "{:.1f}".format),
    ("staleness/mean", "staleness", "{:.1f}".format),
    ("tokens_per_second", "tokens/s", "{:,.0f}".format),
)
"""Metrics with their labels and formats, in the order shown."""
EVALUATED = {"eval/accuracy": "accuracy", "eval/loss": "held-out loss"}
"""Metrics of evaluations with their labels; of an older version, they are shown with its step."""


class RunProgress:
    """State of a run, updated with its steps' metrics; ``clock`` counts seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._started = clock()
        self._ends: deque[float] = deque(maxlen=PACE_STEPS + 1)
        self._metrics: dict[str, float] = {}
        self._rewards: deque[float] = deque(maxlen=SPARK_STEPS)
        self._evaluated: dict[str, tuple[int, float]] = {}
        self.total = 0
        self.step = 0

    def start(self, total: int, done: int) -> None:
        self.total, self.step = total, done
        self._started = self._clock()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._metrics = {**self._metrics, **metrics}  # another thread, which draws, may be reading the earlier ones
        values = {label: (step, metrics[name]) for name, label in EVALUATED.items() if name in metrics}
        self._evaluated = {**self._evaluated, **values}
        if step <= self.step:
            return
        self.step = step
        self._ends.append(self._clock())
        if "reward" in metrics:
            self._rewards.append(metrics["reward"])

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    @property
    def step_s(self) -> float | None:
        """Typical seconds of the last steps, without the first, which includes one-time work.

        This is the median of means over a few steps each, so that one outage does not count, and steps that end in
        bursts, as in asynchronous training, count with the pause before them.
        """
        num_steps = len(self._ends) - 1
        if num_steps < 1:
            return None
        span = max(1, num_steps // 4)
        ends = list(self._ends)
        return median((end - begin) / span for begin, end in zip(ends, ends[span:], strict=False))

    @property
    def eta_s(self) -> float | None:
        """Seconds until the run's end, at the pace of its latest steps; during an outage, from its end on."""
        if self.step_s is None:
            return None
        elapsed = self._clock() - self._ends[-1]
        return max((self.total - self.step) * self.step_s - min(elapsed, self.step_s), 0.0)

    def figures(self) -> list[tuple[str, str]]:
        """Return the names and values of the figures reported so far."""
        shown = [(label, show(self._metrics[key])) for key, label, show in FIGURES if key in self._metrics]
        rewards = {name: value for key, value in self._metrics.items() if (name := reward_of(key)) is not None}
        if len(rewards) > 1:
            shown += [(name, format_number(value)) for name, value in rewards.items()]
        if self.step_s is not None:
            shown.append(("s/step", f"{self.step_s:.2f}"))
        return shown + [
            (label, f"{value:.3f}" if step == self.step else f"{value:.3f} (step {step})")
            for label, (step, value) in self._evaluated.items()
        ]

    def phases(self) -> list[tuple[str, str]]:
        """Return the names and seconds of the last step's phases, the longest first; phases may overlap."""
        times = {key.removeprefix(PHASE_PREFIX): value for key, value in self._metrics.items() if is_phase(key)}
        return [(name, f"{seconds:.2f}") for name, seconds in sorted(times.items(), key=lambda item: -item[1])]

    def sparkline(self) -> str:
        """Return the rewards of the last steps as small bars."""
        finite = [reward for reward in self._rewards if math.isfinite(reward)]
        if len(finite) < 2:
            return ""
        low, high = min(finite), max(finite)
        scale = (len(SPARKS) - 1) / (high - low) if high > low else 0.0
        return "".join(SPARKS[round((reward - low) * scale)] for reward in finite)


MAX_CELL_CHARS = 40


@dataclass(frozen=True, slots=True)
class Column:
    """Heading of a column, and a function for the text of a row's cell; None where the row has no value."""

    name: str
    show: Callable[[Any], str | None]
    is_text: bool = False
    """Whether the column is left-aligned, and shortened in a narrow terminal."""


def print_table(columns: Sequence[Column], rows: Sequence[Any], stream: TextIO) -> None:
    cells = [[column.show(row) or "" for column in columns] for row in rows]
    if stream.isatty():
        _print_rich(columns, cells, stream)
        return
    widths = [max(map(len, texts)) for texts in zip([column.name for column in columns], *cells, strict=True)]
    for line in [[column.name for column in columns], *cells]:
        texts = [
            text.ljust(width) if column.is_text else text.rjust(width)
            for column, text, width in zip(columns, line, widths, strict=True)
        ]
        print("  ".join(texts).rstrip(), file=stream)


def _print_rich(columns: Sequence[Column], cells: Sequence[Sequence[str]], stream: TextIO) -> None:
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column.name, no_wrap=True, justify="left" if column.is_text else "right")
    for line in cells:
        table.add_row(*map(Text, line))
    Console(file=stream).print(table)


def one_line(columns: Sequence[Column], row: Any) -> str:
    """Return the cells of a row that have a value, with the names of their columns, as one line."""
    return "  ".join(f"{column.name} {text}" for column in columns if (text := column.show(row)))


def show_number(value: float | None) -> str | None:
    return None if value is None else format_number(value)


def show_count(value: float | None) -> str | None:
    return None if value is None else f"{value:,.0f}"


def show_time(seconds: float | None) -> str | None:
    """Return the local date and time of ``seconds`` since 1970."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def show_start(text: str) -> str:
    """Return as much of a text as a cell holds, in one line."""
    return shortened(printable(" ".join(text.split())), MAX_CELL_CHARS)

"""Progress of a run on the terminal, and the summary at its end."""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Protocol, TextIO

from rich.columns import Columns
from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlpipe.common.atomic_io import write_whole
from rlpipe.common.formatting import drop_output, print_line, printable
from rlpipe.configs.schema.root_config import TrackingConfig
from rlpipe.tracking.health_measures import is_evaluation
from rlpipe.tracking.jsonl import read_rows
from rlpipe.tracking.metric_text import PHASE_PREFIX, RunProgress, format_duration, is_phase
from rlpipe.tracking.phases import PHASES

logger = logging.getLogger(__name__)

EVERY_STEP_UNTIL = 20
LINES_AFTERWARDS = 50
MAX_SILENCE_S = 10.0
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
        self._view = RunProgress(clock)
        self._first_step = 0
        self._printed_at = -math.inf

    def start(self, total: int, done: int = 0) -> None:
        self._first_step = done
        self._view.start(total, done)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._view.update(step, metrics)
        if is_evaluation(metrics) or self._is_due(step):
            self._printed_at = self._clock()
            self.message(self._line())

    def _is_due(self, step: int) -> bool:
        every = math.ceil(self._view.total / LINES_AFTERWARDS)
        return (
            step - self._first_step <= EVERY_STEP_UNTIL
            or step % every == 0
            or step == self._view.total
            or self._clock() - self._printed_at >= MAX_SILENCE_S
        )

    def _line(self) -> str:
        view = self._view
        columns = [f"step {view.step}/{view.total}", *(f"{name} {value}" for name, value in view.figures())]
        if view.phases():
            columns.append("time " + ", ".join(f"{name} {seconds}" for name, seconds in view.phases()))
        return "  ".join([*columns, f"ETA {format_duration(view.eta_s)}"])

    def message(self, text: str) -> None:
        print_line(printable(text), self._stream)

    def close(self) -> None:
        pass


class LiveConsole(Console):
    """Console that drops all that follows once nobody reads its file any more; rich's would exit."""

    def on_broken_pipe(self) -> None:
        drop_output(self.file)


class LiveProgress:
    """Display of a few live lines at the bottom of the terminal; whatever else is printed appears above them."""

    def __init__(self, console: Console, run_name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_name = run_name
        self._view = RunProgress(clock)
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=REFRESHES_PER_SECOND)

    def start(self, total: int, done: int = 0) -> None:
        self._view.start(total, done)
        self._live.start(refresh=True)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        self._view.update(step, metrics)

    def message(self, text: str) -> None:
        self._live.console.print(printable(text), markup=False, highlight=False, emoji=False)

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
    console = LiveConsole(file=stream, force_terminal=True if config.progress == "live" else None)
    if config.progress == "live" or (config.progress == "auto" and stream.isatty() and not console.is_dumb_terminal):
        return LiveProgress(console, run_name)
    return PlainProgress(stream)


WINDOW_STEPS = 10
"""Steps at each end of a run over which its rewards are averaged."""


def summarize_metrics(metrics_path: Path) -> dict[str, Any]:
    """Return the figures of a whole run, resumed or not, from its ``metrics.jsonl``; leave out those without data.

    ``reward_start`` and ``reward_end`` are means over the first and last ten steps, ``eval_accuracy_start`` and
    ``_end`` the first and last held-out accuracy, ``eval_loss_start`` and ``_end`` the first and last held-out loss,
    and ``time`` the seconds of each phase over all steps.
    """
    rows = list(read_rows(metrics_path))
    rewards = _column(rows, "reward")
    accuracies, losses = _column(rows, "eval/accuracy"), _column(rows, "eval/loss")
    summary: dict[str, Any] = {"steps": max((row["step"] for row in rows), default=0)}
    if rewards:
        summary["reward_start"] = fmean(rewards[:WINDOW_STEPS])
        summary["reward_end"] = fmean(rewards[-WINDOW_STEPS:])
    if accuracies:
        summary["eval_accuracy_start"] = accuracies[0]
        summary["eval_accuracy_end"] = accuracies[-1]
    if losses:
        summary["eval_loss_start"] = losses[0]
        summary["eval_loss_end"] = losses[-1]
    means = {"mean_length": "completions/mean_length", "tokens_per_second": "tokens_per_second"}
    means |= {"staleness_mean": "staleness/mean"}
    summary |= {name: fmean(values) for name, key in means.items() if (values := _column(rows, key))}
    if staleness := _column(rows, "staleness/max"):
        summary["staleness_max"] = max(staleness)
    phases = sorted({key for row in rows for key in row if is_phase(key)})
    summary["time"] = {phase.removeprefix(PHASE_PREFIX): sum(_column(rows, phase)) for phase in phases}
    return summary


def _column(rows: list[dict[str, Any]], key: str) -> list[float]:
    return [row[key] for row in rows if row.get(key) is not None]


def write_summary(path: Path, summary: Mapping[str, Any]) -> None:
    """Write ``summary.json`` whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(summary, indent=2, default=str) + "\n")


def print_summary(summary: Mapping[str, Any], stream: TextIO | None = None) -> None:
    """Print the known figures of a summary, one line each, and the paths of its ``files`` (name to path)."""
    lines: list[tuple[str, str]] = []
    if "steps" in summary:
        seconds = f" in {format_duration(summary['seconds'])}" if "seconds" in summary else ""
        engine = f" on {summary['engine']}" if "engine" in summary else ""
        lines.append(("steps", f"{summary['steps']}{seconds}{engine}"))
    for label, key in (("reward", "reward"), ("held-out accuracy", "eval_accuracy"), ("held-out loss", "eval_loss")):
        if f"{key}_start" in summary and f"{key}_end" in summary:
            lines.append((label, f"{summary[f'{key}_start']:.3f} -> {summary[f'{key}_end']:.3f}"))
    if "tokens_per_second" in summary:
        lines.append(("tokens/s", f"{summary['tokens_per_second']:,.0f}"))
    if "staleness_mean" in summary:
        maximum = f", at most {summary['staleness_max']:.0f}" if "staleness_max" in summary else ""
        lines.append(("staleness", f"{summary['staleness_mean']:.2f} versions{maximum}"))
    if summary.get("time"):
        lines.append(("time", ", ".join(f"{name} {format_duration(s)}" for name, s in summary["time"].items())))
    lines += [(name, str(path)) for name, path in summary.get("files", {}).items()]
    width = max((len(label) for label, _ in lines), default=0)
    for label, text in lines:
        print_line(f"  {label:<{width}}  {text}", stream or sys.stdout)

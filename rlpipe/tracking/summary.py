"""Summary of a finished run in a few figures: computed from its metrics, written as JSON, and printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, TextIO

from rlpipe.common.atomic_io import write_whole
from rlpipe.tracking.jsonl import read_rows
from rlpipe.tracking.view import PHASES, format_duration, is_phase

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
    summary["time"] = {phase.removeprefix(PHASES): sum(_column(rows, phase)) for phase in phases}
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
        most = f", at most {summary['staleness_max']:.0f}" if "staleness_max" in summary else ""
        lines.append(("staleness", f"{summary['staleness_mean']:.2f} versions{most}"))
    if summary.get("time"):
        lines.append(("time", ", ".join(f"{name} {format_duration(s)}" for name, s in summary["time"].items())))
    lines += [(name, str(path)) for name, path in summary.get("files", {}).items()]
    width = max((len(label) for label, _ in lines), default=0)
    for label, text in lines:
        print(f"  {label:<{width}}  {text}", file=stream or sys.stdout, flush=True)

"""Plots of a run's metrics: reward, held-out accuracy, completion length and staleness, or else its losses."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.tracking.jsonl import read_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Series = tuple[NDArray[np.int64], NDArray[np.float64]]  # steps [K], values [K]

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea580c", "#059669", "#6b7280"
PREFERENCES: Mapping[str, str] = {"rewards/accuracies": BLUE, "rewards/first_errors": GREEN}
"""Metrics of runs on preferences and of reward models with their colours; the first is in every such run."""
STYLE: Any = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "axes.grid": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
}


def plot_rewards(metrics_path: Path, output: Path, title: str) -> bool:
    """Write a PNG of a run's ``metrics.jsonl``; return False, and write nothing, if no step has a reward."""
    rows = list(read_rows(metrics_path))
    reward = _series(rows, "reward")
    if not len(reward[0]):
        return False
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 5.6), dpi=150, layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
        _draw_reward(above, rows, reward)
        _draw_lengths(below, rows)
        above.set_title(title, loc="left", fontsize=12, fontweight="bold", color="#111827", pad=24)
        below.set_xlabel("step")
        below.set_xlim(min(reward[0][0], 0), max(row["step"] for row in rows) * 1.01 + 0.01)
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)
    return True


def plot_losses(metrics_path: Path, output: Path, title: str) -> bool:
    """Write a PNG of a run's likelihood losses and EBFT metrics; return False, and write nothing, without a loss."""
    rows = list(read_rows(metrics_path))
    losses = {name: _series(rows, name) for name in ("ebft/ce_loss", "loss")}
    trained = next((series for series in losses.values() if len(series[0])), None)
    if trained is None:
        return False
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8, 5.6), dpi=150, layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(5, 3))
        has_preferences = len(_series(rows, "rewards/accuracies")[0]) > 0
        unit = "loss" if has_preferences else "loss (nats per token)"
        _draw_losses(above, trained, _series(rows, "eval/loss"), unit)
        if has_preferences:
            _draw_preferences(below, rows)
        else:
            _draw_features(below, rows)
        above.set_title(title, loc="left", fontsize=12, fontweight="bold", color="#111827", pad=24)
        below.set_xlabel("step")
        output.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(output)
    return True


def _draw_losses(axes: Axes, trained: Series, held_out: Series, title: str) -> None:
    steps, values = trained
    axes.plot(steps, values, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, smooth(values), color=BLUE, linewidth=2.2, label="on the step's rows (moving mean)")
    if len(held_out[0]):
        axes.plot(*held_out, "o--", color=ORANGE, linewidth=1, markersize=6, zorder=5, label="held out")
        _label_ends(axes, *held_out)
    axes.set_ylabel(title)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, fontsize=9, borderaxespad=0.2)


def _draw_preferences(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw how often preferences, or labels of steps, are right, on the step's rows and on held-out ones."""
    for name, color in PREFERENCES.items():
        steps, values = _series(rows, name)
        if len(steps):
            axes.plot(steps, smooth(values), color=color, linewidth=1.8, label=name.removeprefix("rewards/"))
        held_out = _series(rows, f"eval/{name}")
        if len(held_out[0]):
            axes.plot(*held_out, "o--", color=color, linewidth=1, markersize=5, zorder=5, label="held out")
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.98), ncols=4, fontsize=9, borderaxespad=0.2)


def _draw_features(axes: Axes, rows: list[dict[str, Any]]) -> None:
    """Draw EBFT's feature metrics, or the gradient's norm in SFT, which has none."""
    names = {"ebft/alignment": BLUE, "ebft/diversity": GREEN, "ebft/cfm_loss": GREY}
    series = {name: _series(rows, name) for name in names}
    if not len(series["ebft/alignment"][0]):
        names, series = {"grad_norm": GREY}, {"grad_norm": _series(rows, "grad_norm")}
    for name, (steps, values) in series.items():
        axes.plot(steps, smooth(values), color=names[name], linewidth=1.8, label=name.removeprefix("ebft/"))
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 0.98), ncols=3, fontsize=9, borderaxespad=0.2)


def _series(rows: list[dict[str, Any]], key: str) -> Series:
    """Return the steps that have a metric, and its values."""
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps, dtype=np.int64), np.array(values, dtype=np.float64)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the centred moving mean of ``values`` [K] over a twentieth of them; near the ends over fewer."""
    half = max(math.ceil(len(values) / 40), 1)
    sums = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    first, last = np.maximum(index - half, 0), np.minimum(index + half + 1, len(values))
    return (sums[last] - sums[first]) / (last - first)


def _draw_reward(axes: Axes, rows: list[dict[str, Any]], reward: Series) -> None:
    steps, values = reward
    mean = smooth(values)
    deviation = np.sqrt(smooth((values - mean) ** 2))
    axes.fill_between(steps, mean - deviation, mean + deviation, color=BLUE, alpha=0.13, linewidth=0, label="± std")
    axes.plot(steps, values, color=BLUE, alpha=0.25, linewidth=0.8)
    axes.plot(steps, mean, color=BLUE, linewidth=2.2, label="reward (moving mean)")
    eval_steps, accuracy = _series(rows, "eval/accuracy")
    if len(eval_steps):
        axes.plot(
            eval_steps,
            accuracy,
            "o--",
            color=ORANGE,
            linewidth=1,
            markersize=6,
            clip_on=False,
            zorder=5,
            label="held-out accuracy",
        )
        _label_ends(axes, eval_steps, accuracy)
    shown = np.concatenate([values, accuracy])
    margin = 0.15 * (shown.max() - shown.min()) or 0.1
    axes.set_ylim(shown.min() - margin, shown.max() + margin)
    axes.set_ylabel("reward")
    axes.legend(loc="lower left", bbox_to_anchor=(-0.01, 1.0), ncols=3, fontsize=9, borderaxespad=0.2)


def _label_ends(axes: Axes, steps: NDArray[np.int64], values: NDArray[np.float64]) -> None:
    """Write the first and the last value beside their points."""
    for index, offset, side in ((0, (8, -12), "left"), (-1, (9, -4), "left"))[: len(steps)]:
        axes.annotate(
            f"{values[index]:.2f}",
            (float(steps[index]), values[index]),
            textcoords="offset points",
            xytext=offset,
            ha=side,
            color=ORANGE,
            fontsize=10,
            fontweight="bold",
        )


def _draw_lengths(axes: Axes, rows: list[dict[str, Any]]) -> None:
    steps, length = _series(rows, "completions/mean_length")
    axes.plot(steps, length, color=GREEN, alpha=0.3, linewidth=0.9)
    if len(steps):
        axes.plot(steps, smooth(length), color=GREEN, linewidth=1.8)
    axes.set_ylabel("tokens per\ncompletion", color=GREEN)
    steps, staleness = _series(rows, "staleness/mean")
    if len(steps):
        right = axes.twinx()
        right.plot(steps, smooth(staleness), color=GREY, linewidth=1.4, linestyle=(0, (4, 2)))
        right.set_ylabel("staleness\n(versions)", color=GREY)
        right.set_ylim(0, max(1.1 * staleness.max(), 1.0))
        right.grid(visible=False)

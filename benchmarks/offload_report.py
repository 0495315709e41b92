"""The table and the JSON object of ``benchmarks.offload``, from its processes' measurements."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rlpipe.common.formatting import GIB

COLUMNS = (
    "case",
    "parameters",
    "tokens/s",
    "s an update",
    "predicted",
    "over roof",
    "bound",
    "device GiB",
    "predicted",
    "reserved",
    "host GiB",
    "predicted",
    "over ZeRO-3",
    "over FSDP2",
)
HEADER = (f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}")
Sides = Mapping[str, Any]
"""Results of a case: the ``tokens`` of an update, and those of ``rlpipe``, ``zero3`` and ``fsdp2``, if they ran."""


def line_of(name: str, sides: Sides) -> str:
    """Return a row of the table; cells without a measurement are empty."""
    ours = sides["rlpipe"]
    if "seconds" not in ours:
        cells = [name, "does not fit" if "does_not_fit" in ours else "failed"]
        return f"| {' | '.join(cells + [''] * (len(COLUMNS) - len(cells)))} |"
    figures = figures_of(sides)
    cells = [
        name,
        _billions(ours["num_parameters"]),
        f"{figures['tokens_per_second']:.0f}",
        f"{ours['seconds']:.3g}",
        f"{ours['predicted_s']:.3g} ({figures['time_error']:+.1%})",
        f"{figures['over_roof']:.2f}",
        ours["roof"]["bound"].replace("_", " "),
        _gib(ours["peak_bytes"]),
        f"{_gib(ours['predicted_peak_bytes'])} ({figures['peak_error']:+.1%})",
        _gib(ours["reserved_bytes"]),
        _gib(ours["host_bytes"]),
        _gib(ours["predicted_host_bytes"]),
        *(_ratio(figures[f"ratio_{side}_offload"], sides.get(side)) for side in ("zero3", "fsdp2")),
    ]
    return f"| {' | '.join(cells)} |"


def figures_of(sides: Sides) -> dict[str, float | None]:
    """Return the figures of a case that rlpipe ran; errors are relative to the measurement."""
    ours, tokens = sides["rlpipe"], sides["tokens"]
    return {
        "tokens_per_second": tokens / ours["seconds"],
        **{
            f"ratio_{side}_offload": sides[side]["seconds"] / ours["seconds"] if _has_run(sides.get(side)) else None
            for side in ("zero3", "fsdp2")
        },
        "over_roof": ours["seconds"] / ours["roof"]["seconds"],
        "peak_error": ours["predicted_peak_bytes"] / ours["peak_bytes"] - 1,
        "time_error": ours["predicted_s"] / ours["seconds"] - 1,
    }


def summarize(machine: Mapping[str, Any], cases: Mapping[str, Sides]) -> dict[str, Any]:
    """Return the last line; values without a measurement are None.

    Speed and ratios are those of the first case with a baseline, or else of the first case; ``over_roof`` and the
    errors are the worst of all cases.
    """
    figures = {name: figures_of(sides) for name, sides in cases.items() if _has_run(sides["rlpipe"])}
    compared = [name for name in figures if any(_has_run(cases[name].get(side)) for side in ("zero3", "fsdp2"))]
    headline = next(iter([*compared, *figures]), None)
    empty = dict.fromkeys(("tokens_per_second", "ratio_zero3_offload", "ratio_fsdp2_offload"))
    first = empty if headline is None else {key: figures[headline][key] for key in empty}
    worst = {
        key: _farthest(found[key] for found in figures.values()) for key in ("over_roof", "peak_error", "time_error")
    }
    return {
        "device": machine["hardware"] if machine["kind"] == "cuda" else "cpu",
        "case": headline,
        **{key: _rounded(value) for key, value in (first | worst).items()},
        "machine": machine,
        "cases": {
            name: {**sides, **{key: _rounded(value) for key, value in figures.get(name, {}).items()}}
            for name, sides in cases.items()
        },
    }


def write_report(folder: Path, machine: Mapping[str, Any], cases: Mapping[str, Sides]) -> None:
    summary = summarize(machine, cases)
    (folder / "offload.json").write_text(json.dumps(summary) + "\n")
    rows = [*HEADER, *(line_of(name, sides) for name, sides in cases.items())]
    rates = f"Measured on {machine['measured_at']} on {machine['hardware']}, medians of the timed updates."
    (folder / "offload.md").write_text("\n".join([*rows, "", rates, ""]))


def _has_run(found: Mapping[str, Any] | None) -> bool:
    return found is not None and "seconds" in found


def _farthest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), key=abs, default=None)


def _ratio(ratio: float | None, found: Mapping[str, Any] | None) -> str:
    if ratio is not None:
        return f"{ratio:.2f}"
    return "" if found is None else "failed"


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def _gib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.3g}"


def _billions(count: int) -> str:
    return f"{count / 1e9:.3g}B"

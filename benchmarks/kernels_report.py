"""The tables and the JSON object of ``benchmarks.kernels``, from its processes' measurements."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.kernels_rows import ACCESSES, COPY_ACCESSES

_LIBRARIES = ("trl", "liger", "liger-loss", "liger-ppo", "cce")
LIBRARIES = {"head": _LIBRARIES, "rows": _LIBRARIES, "lora": ("peft", "compile")}
"""Sides that count as libraries for ``best_library``; for LoRA, PEFT's layer, also compiled."""
GROUPS = {
    "head": "linear_logprob",
    "rows": "selective_logprob",
    "features": "feature_rewards",
    "lora": "lora_linear",
    "mask": "block_mask",
}
"""Kernel that each group of cases measures."""
OURS = {"head": ("rlpipe",), "rows": ("rlpipe", "rlpipe-in-place"), "lora": ("rlpipe",)}
"""Sides that represent rlpipe's kernel."""
NO_GPU = (
    "not comparable: Triton's kernels do not run without a GPU, so seconds are those of references and other CPU "
    "code; memory and errors count"
)
ERRORS = ("logprob_error", "entropy_error", "gradient_error", "weight_gradient_error")
COLUMNS = (
    "case",
    "side",
    "seconds",
    "over roof",
    "forward",
    "extra MiB",
    *(name.removesuffix("_error") for name in ERRORS),
)
HEADER = (f"| {' | '.join(COLUMNS)} | note |", f"|{'---|' * (len(COLUMNS) + 1)}")
Sides = Mapping[str, Mapping[str, Any]]


def over_roof(found: Mapping[str, Any]) -> float | None:
    """Return the seconds of forward and backward over those of the roof, which was measured in the same turns."""
    if found.get("seconds") is None or not found.get("roof_s"):
        return None
    return found["seconds"] / found["roof_s"]


def roof_share(group: str, found: Mapping[str, Any]) -> float | None:
    """Return the share of the bare products' speed, or of the copy's bandwidth, that is reached."""
    ratio = over_roof(found)
    if ratio is None:
        return None
    return ACCESSES / COPY_ACCESSES / ratio if group == "rows" else 1 / ratio


def best_library(group: str, sides: Sides) -> str | None:
    """Return the fastest library, relative to the roof of its own process."""
    ratios = {name: over_roof(sides[name]) for name in LIBRARIES[group] if name in sides}
    there = {name: ratio for name, ratio in ratios.items() if ratio is not None}
    return min(there, key=there.__getitem__, default=None)


def figures_of(group: str, sides: Sides) -> dict[str, Any]:
    """Return the kernel's figures of one case, with those of the best library."""
    ours = next((sides[name] for name in OURS[group] if _ran(sides.get(name))), {})
    library = best_library(group, sides)
    ratio, theirs = over_roof(ours), None if library is None else over_roof(sides[library])
    return {
        "seconds": ours.get("seconds"),
        "best_library": library,
        "best_library_seconds": None if library is None else sides[library]["seconds"],
        "extra_peak_mb": _megabytes(ours.get("extra_peak_mib")),
        "roof_share": roof_share(group, ours),
        "over_roof": ratio,
        "over_best_library": None if ratio is None or theirs is None else ratio / theirs,
    }


def headline(group: str, cases: Mapping[str, Sides], *, on_gpu: bool) -> dict[str, Any]:
    """Return a kernel's figures in its worst case over the roof; memory is the largest of all cases."""
    figures = {name: figures_of(group, sides) for name, sides in cases.items()}
    ran = {name: found for name, found in figures.items() if found["over_roof"] is not None}
    if not ran:
        return {"case": None, **dict.fromkeys(_KEYS), "cases": figures}
    worst = max(ran, key=lambda name: ran[name]["over_roof"])
    result = {"case": worst, **ran[worst]}
    result["extra_peak_mb"] = _largest(found["extra_peak_mb"] for found in ran.values())
    result["over_best_library"] = _largest(found["over_best_library"] for found in ran.values())
    if not on_gpu:
        result |= {key: None for key in _KEYS if key != "extra_peak_mb"}
    return {**result, "cases": figures}


_KEYS = (
    "seconds",
    "best_library",
    "best_library_seconds",
    "extra_peak_mb",
    "roof_share",
    "over_roof",
    "over_best_library",
)


def features_headline(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of the case in which features and rewards take the largest share of the time."""
    worst = max(cases, key=lambda name: cases[name]["share"])
    return {
        "case": worst,
        **dict.fromkeys(_KEYS),
        "seconds": cases[worst]["rewards_s"],
        "share": cases[worst]["share"],
        "rewards_share": cases[worst]["rewards_share"],
    }


def summarize(machine: Mapping[str, Any], groups: Mapping[str, Any]) -> dict[str, Any]:
    """Return the last line: the figures of each kernel, and under ``groups`` all measurements."""
    on_gpu = machine["kind"] == "cuda"
    result: dict[str, Any] = {
        "device": machine["hardware"] if on_gpu else "cpu",
        "seconds": "medians of turns" if on_gpu else NO_GPU,
        "machine": machine,
    }
    for group, found in groups.items():
        if "error" in found:
            result[GROUPS[group]] = {**dict.fromkeys(_KEYS), "error": found["error"]}
        elif group in OURS:
            result[GROUPS[group]] = headline(group, found, on_gpu=on_gpu)
        elif group == "features":
            result[GROUPS[group]] = features_headline(found)
        else:
            result[GROUPS[group]] = {"rows": found["mask"]}
    return rounded({**result, "groups": groups})


def lines_of(case: str, sides: Sides) -> list[str]:
    """Return the rows of the table; a side without figures shows the reason."""
    return [_line(case, name, found) for name, found in sides.items()]


def _line(case: str, name: str, found: Mapping[str, Any]) -> str:
    if not _ran(found):
        return f"| {case} | {name} |{' |' * (len(COLUMNS) - 2)} {found.get('error')} |"
    cells = [
        _number(found["seconds"]),
        _number(over_roof(found)),
        _number(found.get("forward_s")),
        "" if found.get("extra_peak_mib") is None else f"{found['extra_peak_mib']:.0f}",
        *(_number(found.get(key), 2) for key in ERRORS),
        found.get("note", ""),
    ]
    return f"| {case} | {name} | {' | '.join(cells)} |"


def features_lines(cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        f"{name}: network pass {found['network_s']:.3g} s, including pooling {found['pooling_s']:.3g} s; rewards "
        f"of [{found['groups']}, {found['samples']}, {found['features']}] {found['rewards_s']:.3g} s; share "
        f"{found['share']:.1%}, rewards alone {found['rewards_share']:.1%}"
        for name, found in cases.items()
    ]


def products_share(flops: float, seconds: float, rate: float) -> float:
    """Return the speed of the bare products as a share of the rate of large square ones."""
    return flops / seconds / rate


def merge(results: Sequence[Mapping[str, Sides]], cases: Iterable[str], sides: Sequence[str]) -> dict[str, Any]:
    """Merge the results of processes by case, with sides in the given order; the first result of a side counts."""
    merged: dict[str, Any] = {}
    for case in cases:
        there: dict[str, Any] = {}
        for result in results:
            there = {**result.get(case, {}), **there}
        merged[case] = {name: there[name] for name in sides if name in there}
    return merged


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, Mapping):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list | tuple) else value


def _ran(found: Mapping[str, Any] | None) -> bool:
    return found is not None and found.get("seconds") is not None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _megabytes(mebibytes: float | None) -> float | None:
    return None if mebibytes is None else mebibytes * 2**20 / 1e6


def _number(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}g}"

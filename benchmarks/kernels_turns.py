"""Comparison of several implementations in turns: seconds, memory beside the gradients, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.peak_memory import MB, peak_memory
from rlpipe.common.formatting import MIB
from rlpipe.common.imports import describe_error
from rlpipe.hardware.calibration import Work, time_calls

TURN_S = 0.02
"""Least seconds of a turn, in consecutive calls."""
MAX_CALLS = 50
PEAKS = 2
"""Number of memory measurements; the largest counts."""
Outcome = Sequence[Tensor | None]


@dataclass(kw_only=True, frozen=True)
class Side:
    both: Callable[[], Outcome]
    """Function for forward and backward, which returns outputs and gradients."""
    forward: Work | None = None
    """Function for the forward pass alone, on tensors that need no gradient."""
    in_place: bool = False
    """Whether its gradients overwrite its inputs."""
    note: str = ""
    """Differences from the other sides."""


@dataclass(kw_only=True, frozen=True)
class Comparison:
    """The sides of one case, on the same inputs."""

    makers: Mapping[str, Callable[[], Side]]
    """Functions that make the sides; each raises an error that says why its side is not available."""
    roof: str
    """Name of the side that does only the unavoidable work."""
    gradient_bytes: int = 0
    """Bytes of the gradients that a caller gets, which do not count as extra memory."""
    errors_of: Callable[[Outcome], dict[str, float | None]] = lambda outcome: {}


def measure_in_turns(comparison: Comparison, turns: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Return the medians of each side and of the roof, or an ``error`` that says why there are none.

    ``seconds`` are those of forward and backward, ``forward_s`` those of the forward pass alone. Raises the error of a
    GPU that is lost, since it would fail from then on.
    """
    found: dict[str, dict[str, Any]] = {}
    sides: dict[str, Side] = {}
    for name, make in comparison.makers.items():
        try:
            sides[name] = _prepared(make, comparison, found.setdefault(name, {}))
        except Exception as error:  # a failure of other libraries is a result
            if _is_lost(error):
                raise
            found[name] = {"error": describe_error(error)}
    both = _turns({name: side.both for name, side in sides.items()}, turns, device)
    alone = {name: side.forward for name, side in sides.items() if side.forward is not None}
    forward = _turns(alone, turns, device)
    for name, side in sides.items():
        found[name] |= {"seconds": both[name], "forward_s": forward.get(name)}
        found[name] |= {"roof_s": both.get(comparison.roof), "roof_forward_s": forward.get(comparison.roof)}
        if name != comparison.roof:
            gradients = 0 if side.in_place else comparison.gradient_bytes
            found[name]["extra_peak_mib"] = _peak_mib(side.both, device) - gradients / MIB
    return found


def _prepared(make: Callable[[], Side], comparison: Comparison, found: dict[str, Any]) -> Side:
    """Return a side after one run, and store its errors and note in ``found``."""
    side = make()
    found |= {"note": side.note, **comparison.errors_of(side.both())}
    if side.forward is not None:
        side.forward()
    return side


def _is_lost(error: Exception) -> bool:
    """Return whether the GPU fails at all further work."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def _turns(works: Mapping[str, Work], turns: int, device: torch.device) -> dict[str, float]:
    """Return the median seconds per call of each."""
    calls = {name: _calls_of_a_turn(work, device) for name, work in works.items()}
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(turns):
        for name, work in works.items():
            seconds[name].append(time_calls(work, calls[name], device) / calls[name])
    return {name: median(taken) for name, taken in seconds.items()}


def _calls_of_a_turn(work: Work, device: torch.device) -> int:
    once_s = time_calls(work, 1, device)
    return min(MAX_CALLS, max(1, math.ceil(TURN_S / once_s))) if once_s else MAX_CALLS


def _peak_mib(work: Work, device: torch.device) -> float:
    peaks = []
    for _ in range(PEAKS):
        with peak_memory(device) as peak:
            work()
        peaks.append(peak.mb * MB / MIB)
    return max(peaks)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference over that of the expected tensor."""
    return ((found.double() - expected).norm() / expected.norm()).item()


def largest_error(found: Tensor, expected: Tensor) -> float:
    return (found.double() - expected).abs().max().item()

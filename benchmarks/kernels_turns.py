"""Several ways to do one thing, measured in turns: seconds, memory beside the gradients, and errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.peak import MB, peak_memory
from rlpipe.common.imports import describe_error
from rlpipe.hardware.timing import Work, time_calls

MIB = 2**20
TURN_S = 0.02
"""What a turn takes at least, by calls one after another."""
MAX_CALLS = 50
PEAKS = 2
"""Measurements of memory, of which the larger is taken."""
Outcome = Sequence[Tensor | None]


@dataclass(kw_only=True, frozen=True)
class Side:
    both: Callable[[], Outcome]
    """Forward and backward; gives outputs and gradients."""
    forward: Work | None = None
    """The forward pass alone, of tensors that need no gradient."""
    in_place: bool = False
    """Its gradients take the memory of its inputs."""
    note: str = ""
    """What it does otherwise than the others."""


@dataclass(kw_only=True, frozen=True)
class Comparison:
    """The sides of one case, on the same inputs."""

    makers: Mapping[str, Callable[[], Side]]
    """Each raises what says why a side is not there."""
    roof: str
    """The side that does only what all of them must."""
    gradient_bytes: int = 0
    """Of the gradients that a caller gets, which are no extra memory."""
    errors_of: Callable[[Outcome], dict[str, float | None]] = lambda outcome: {}


def measure_in_turns(comparison: Comparison, turns: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Medians of each side, beside those of the roof, or under ``error`` why there are none.

    ``seconds`` are those of forward and backward, ``forward_s`` those of the forward pass alone. Raises what a GPU
    raises from then on, once it is lost.
    """
    found: dict[str, dict[str, Any]] = {}
    sides: dict[str, Side] = {}
    for name, make in comparison.makers.items():
        try:
            sides[name] = _prepared(make, comparison, found.setdefault(name, {}))
        except Exception as error:  # other people's code, whose failure is a result
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
    """A side that has run once, with its errors and what there is to say of it in ``found``."""
    side = make()
    found |= {"note": side.note, **comparison.errors_of(side.both())}
    if side.forward is not None:
        side.forward()
    return side


def _is_lost(error: Exception) -> bool:
    """Whether a GPU now fails at whatever it is asked."""
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)


def _turns(works: Mapping[str, Work], turns: int, device: torch.device) -> dict[str, float]:
    """Median seconds of a call of each."""
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
    """The length of the difference as a share of the expected tensor's."""
    return ((found.double() - expected).norm() / expected.norm()).item()


def largest_error(found: Tensor, expected: Tensor) -> float:
    return (found.double() - expected).abs().max().item()

"""Exhaustive search for the fastest plan of a training step that fits.

A plan has only the number of blocks of each mode, not a choice of blocks, and as many slots as fit, because another
slot never makes a step slower. Shapes: K divisions of the blocks among the modes, P numbers of persistent chunks, S
stages, C chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.common.formatting import gib
from rlpipe.offload.decision import Capacity, Knobs, Mode, Prediction
from rlpipe.offload.planner.cost import (
    CODES,
    ChunkProfile,
    Codes,
    Floats,
    Profile,
    Rates,
    activation_peaks,
    checkpoints_per_swap,
    chunk_times,
    column,
    device_update_s,
    host_update_s,
    interleave,
    predict,
    stage_shares,
    why_impossible,
)

Ints = NDArray[np.int64]
ROWS = 1024
"""Divisions that are evaluated together, so that their arrays stay small."""
TIE = 1 + 1e-12
"""Factor on the fastest plan's time up to which others count as equally fast, to allow for rounding."""
PASSING = ("staging_bytes", "adding_bytes", "update_bytes")
"""Temporary memory on the host, of which only the chunk that takes the most counts."""


class DoesNotFit(ValueError):
    """Error if no plan fits; the message has the memory that the smallest plans take."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Choice:
    """Knobs with their predicted cost."""

    knobs: Knobs
    prediction: Prediction


def search(profile: Profile, rates: Rates, capacity: Capacity, fixed: Mapping[str, int] | None = None) -> Choice:
    """Return the fastest knobs within the capacity; of equally fast ones, those that differ least from no offload.

    ``fixed`` knobs keep their values. Raises ``DoesNotFit``, and ``ValueError`` for fixed knobs that are impossible.
    """
    fixed = dict(fixed or {})
    if unknown := fixed.keys() - {entry.name for entry in fields(Knobs)}:
        raise ValueError(f"there is no knob {', '.join(sorted(unknown))}")
    divisions = _divisions(profile, fixed)
    if not divisions or not _choices(fixed.get("num_persistent"), len(profile.chunks)):
        raise ValueError(
            f"no plan has {_describe(fixed)}: the model has {len(profile.chunks)} chunks and "
            f"{len(profile.blocks)} layers; set less, or leave it out"
        )
    candidates: list[_Candidate] = []
    fastest = np.inf
    for begin in range(0, len(divisions), ROWS):
        space = _Space(profile, rates, fixed, divisions[begin : begin + ROWS])
        if space.least_seconds() > fastest * TIE:
            break  # all later divisions have at least as much to compute
        candidate = space.best(capacity)
        if candidate is not None:
            candidates.append(candidate)
            fastest = min(fastest, candidate.seconds)
    if not candidates:
        raise _describe_failure(profile, rates, fixed, divisions, capacity)
    knobs = min(
        (entry for entry in candidates if entry.seconds <= fastest * TIE), key=lambda entry: entry.preference
    ).knobs
    problem = why_impossible(profile, knobs, rates)
    assert problem is None, problem
    return Choice(knobs=knobs, prediction=predict(profile, knobs, rates))


def _divisions(profile: Profile, fixed: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """Return all divisions of the blocks (swapped, checkpointed, offloaded), those with the least computation first."""
    blocks = len(profile.blocks)
    fixed_counts = [fixed.get(name) for name in ("num_swapped", "num_checkpointed", "num_offloaded")]
    return [
        (swapped, checkpointed, offloaded)
        for checkpointed in _choices(fixed_counts[1], blocks)
        for swapped in _choices(fixed_counts[0], blocks - checkpointed)
        for offloaded in _choices(fixed_counts[2], blocks - swapped - checkpointed)
    ]


def _describe_failure(
    profile: Profile, rates: Rates, fixed: Mapping[str, int], divisions: list[tuple[int, int, int]], capacity: Capacity
) -> ValueError:
    min_slots = device = host = np.inf
    max_slots = -np.inf
    for begin in range(0, len(divisions), ROWS):
        space = _Space(profile, rates, fixed, divisions[begin : begin + ROWS])
        slots, bounds = space.slot_bounds, space.smallest()
        min_slots, max_slots = min(min_slots, slots[0].min()), max(max_slots, slots[1].max())
        device, host = min(device, bounds[0]), min(host, bounds[1])
    num_slots = fixed.get("num_slots")
    if num_slots is not None and num_slots < min_slots:
        return ValueError(
            f"num_slots={num_slots}: the chunks used at one time need at least {min_slots}; set that or more, or "
            "leave it out"
        )
    if num_slots is not None and num_slots > max_slots:
        return ValueError(
            f"num_slots={num_slots}: the chunks that are loaded on demand fill only {max_slots}; set less, or leave it "
            "out"
        )
    fits_separately = device <= capacity.device_bytes and host <= capacity.host_bytes
    return DoesNotFit(
        f"no offload plan fits: the smallest on the device needs {gib(device)} of "
        f"{gib(capacity.device_bytes)} there, the smallest on the host {gib(host)} of "
        f"{gib(capacity.host_bytes)}{', but no plan is within both' if fits_separately else ''}; use "
        "shorter micro batches (learner.max_tokens_per_microbatch), an adapter, more ranks, or a smaller model"
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class _Candidate:
    """The best of some plans."""

    knobs: Knobs
    seconds: float
    preference: tuple[float, float]
    """Difference from no offload, and bytes on the device; less is better."""


class _Space:
    """The plans of some divisions, as arrays."""

    def __init__(
        self, profile: Profile, rates: Rates, fixed: Mapping[str, int], divisions: list[tuple[int, int, int]]
    ) -> None:
        self._profile, self._rates, self._fixed = profile, rates, fixed
        self.divisions = divisions  # [K]
        count = len(profile.chunks)
        self.persistent: Ints = np.array(list(_choices(fixed.get("num_persistent"), count)), np.int64)  # [P]
        self._modes = self._arrange()  # [K, S]

    def least_seconds(self) -> float:
        """Return a lower bound: the computation, with as many of the cheapest checkpoints as the first division has."""
        profile = self._profile
        forward = column(self._profile.stages, "forward_s")
        recompute_s = np.sort(forward[profile.blocks])[: self.divisions[0][1]].sum()
        pass_s = forward.sum() + column(self._profile.stages, "backward_s").sum() + recompute_s
        used = np.minimum(stage_shares(self._profile).sum(1), 1)  # a stage that no chunk carries is not counted
        return float(profile.num_micro_batches * pass_s) if (used > 1 - 1e-9).all() else 0.0

    def best(self, capacity: Capacity) -> _Candidate | None:
        """Return the fastest plan that fits, or None."""
        seconds, device_bytes, slots = self.evaluate(capacity)
        if not np.isfinite(seconds).any():
            return None
        ties = seconds <= seconds.min() * TIE
        preference = np.where(ties, self.changes(), np.inf)
        simplest = np.where(preference == preference.min(), device_bytes, np.inf)
        row, column = np.unravel_index(np.argmin(simplest), seconds.shape)
        return _Candidate(
            knobs=self.knobs(int(row), int(column), int(slots[row, column])),
            seconds=float(seconds[row, column]),
            preference=(float(preference[row, column]), float(device_bytes[row, column])),
        )

    def smallest(self) -> tuple[float, float]:
        """Return the least bytes on the device and the least on the host that any plan takes."""
        min_slots, max_slots = self.slot_bounds
        possible = min_slots <= max_slots
        device = self._base_bytes() + min_slots * self._profile.slot_bytes
        return (
            float(np.where(possible, device, np.inf).min()),
            float(np.where(possible, self._host_bytes(), np.inf).min()),
        )

    def knobs(self, row: int, column: int, num_slots: int) -> Knobs:
        swapped, checkpointed, offloaded = self.divisions[row]
        return Knobs(
            num_persistent=int(self.persistent[column]),
            num_slots=num_slots,
            num_swapped=swapped,
            num_checkpointed=checkpointed,
            num_offloaded=offloaded,
        )

    def changes(self) -> Floats:
        """Return the difference from no offload, first in blocks, then in chunks, ``[K, P]``."""
        blocks = np.array([sum(division) for division in self.divisions], np.float64)
        count = len(self._profile.chunks)
        return np.asarray(blocks[:, None] * (count + 1) + (count - self.persistent)[None])

    def evaluate(self, capacity: Capacity) -> tuple[Floats, Floats, Ints]:
        """Return seconds (infinite where a plan does not fit), bytes on the device, and slots, each ``[K, P]``."""
        profile = self._profile
        min_slots, max_slots = self.slot_bounds
        base = self._base_bytes()
        slot_bytes = max(profile.slot_bytes, 1)
        slots = np.floor((capacity.device_bytes - base) / slot_bytes)
        slots = np.clip(slots, -1, max_slots).astype(np.int64)
        if "num_slots" in self._fixed:
            slots = np.where(slots >= self._fixed["num_slots"], self._fixed["num_slots"], -1)
        fits = (slots >= min_slots) & (self._host_bytes() <= capacity.host_bytes)
        slots = np.where(fits, slots, np.minimum(min_slots, max_slots))
        seconds = np.full(slots.shape, np.inf)
        rows = np.flatnonzero(fits.any(1))
        if len(rows):
            seconds[rows] = np.where(fits[rows], self._seconds(slots[rows], rows), np.inf)
        return seconds, base + slots * profile.slot_bytes, slots

    def _arrange(self) -> Codes:
        profile, per_swap = self._profile, checkpoints_per_swap(self._profile, self._rates)
        modes = np.full((len(self.divisions), len(profile.stages)), CODES[Mode.KEEP], np.int8)
        blocks = np.array(profile.blocks, np.int64)
        early: dict[tuple[int, int], list[int]] = {}
        for row, (swapped, checkpointed, offloaded) in enumerate(self.divisions):
            key = (swapped, checkpointed)
            if key not in early:
                early[key] = [CODES[mode] for mode in interleave(*key, per_swap)]
            codes = early[key] + [CODES[Mode.OFFLOAD]] * offloaded
            modes[row, blocks[: len(codes)]] = codes
        return modes

    def _is(self, mode: Mode) -> NDArray[np.bool_]:
        return np.asarray(self._modes == CODES[mode])

    def _prefix_bytes(self, weights: str) -> Floats:
        """Return the bytes of the first n chunks with their states, for every n ``[C + 1]``."""
        return _prefix(column(self._profile.chunks, weights) + column(self._profile.chunks, "state_bytes"))

    def _base_bytes(self) -> Floats:
        """Return the bytes on the device without slots ``[K, P]``."""
        chunk_bytes = self._prefix_bytes("gathered_bytes")
        checkpointed = np.array([division[1] > 0 for division in self.divisions])
        activations = activation_peaks(self._profile.stages, self._modes) + checkpointed * self._profile.shared_bytes
        updates = _prefix_max(column(self._profile.chunks, "update_bytes"))[self.persistent]
        working = np.maximum(activations[:, None], updates[None])
        return self._profile.resident_bytes + chunk_bytes[self.persistent][None] + working

    def _host_bytes(self) -> Floats:
        """Return the bytes on the host ``[K, P]``."""
        chunk_bytes = self._prefix_bytes("num_bytes")
        swapped = self._is(Mode.SWAP) @ column(self._profile.stages, "swapped_bytes")  # [K]
        passing = sum(_prefix_max(column(self._profile.chunks, name)[::-1])[::-1] for name in PASSING)
        return (chunk_bytes[-1] - chunk_bytes + passing)[self.persistent][None] + swapped[:, None]

    def _slots(self) -> Ints:
        """Return the slots of the first n chunks, for every n ``[C + 1]``."""
        return _prefix(column(self._profile.chunks, "slots")).astype(np.int64)

    @cached_property
    def slot_bounds(self) -> tuple[Ints, Ints]:
        """The fewest and the most slots, ``[K, P]``; blocks in mode ``KEEP`` need their weights to stay."""
        count, slots = len(self._profile.chunks), self._slots()
        blocks = np.array([stage.is_block for stage in self._profile.stages])
        must_stay = (self._is(Mode.KEEP) & blocks) @ (stage_shares(self._profile) > 0) > 0  # [K, C]
        first = np.full((len(self.divisions), count + 1), count)
        for index in reversed(range(count)):
            first[:, index] = np.where(must_stay[:, index], index, first[:, index + 1])
        needed = np.array([self._profile.least_slots(int(number)) for number in self.persistent])
        min_slots = np.maximum(needed[None], slots[-1] - slots[first[:, self.persistent]])
        return min_slots, np.broadcast_to(slots[-1] - slots[self.persistent][None], min_slots.shape)

    def _seconds(self, slots: Ints, rows: Ints) -> Floats:
        """Return the seconds of an update, ``[R, P]``, for R of the divisions."""
        profile, count, first = self._profile, len(self._profile.chunks), self.persistent[None]
        times = chunk_times(profile, self._rates, self._modes[rows])
        rows = np.arange(len(rows))[:, None]
        prefix = self._slots()
        cached = np.searchsorted(prefix, prefix[-1] - slots)
        cold = np.searchsorted(prefix, prefix[first] + slots, side="right") - 1

        def total(seconds: Floats, begin: Any, end: Any) -> Floats:
            sums = _prefix(seconds)  # [R, C + 1]
            return np.asarray(sums[rows, end] - sums[rows, begin])

        forward_s = (
            total(times.forward_stays, 0, first)
            + total(times.forward_kept, first, cold)
            + total(times.forward_loads, cold, count)
        )
        backward_s = (
            total(times.backward_stays, 0, first)
            + total(times.backward_loads, first, cached)
            + total(times.backward_cached, cached, count)
        )
        device_adam_s = self._prefix_seconds(device_update_s)[self.persistent][None]
        host_adam_s = self._prefix_seconds(host_update_s)
        exposed_s = np.maximum(0, (host_adam_s[-1] - host_adam_s[self.persistent])[None] - forward_s)
        return profile.num_micro_batches * (forward_s + backward_s) + device_adam_s + exposed_s

    def _prefix_seconds(self, seconds: Callable[[Rates, ChunkProfile], float]) -> Floats:
        """Return the seconds of the first n chunks, for every n ``[C + 1]``."""
        return _prefix(np.array([seconds(self._rates, chunk) for chunk in self._profile.chunks], np.float64))


def _choices(fixed: int | None, maximum: int) -> range:
    if fixed is None:
        return range(maximum + 1)
    return range(fixed, fixed + 1) if 0 <= fixed <= maximum else range(0)


def _prefix(values: Floats) -> Floats:
    """Return the sums of the first n values along the last axis, for n from 0 to all."""
    values = np.atleast_1d(values)
    zeros = np.zeros((*values.shape[:-1], 1))
    return np.concatenate([zeros, np.cumsum(values, -1)], -1)


def _prefix_max(values: Floats) -> Floats:
    """Return the largest of the first n values (at least 0), for n from 0 to all."""
    return np.asarray(np.maximum.accumulate([0.0, *values]))


def _describe(fixed: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in fixed.items())

"""Decides how a model is trained: what stays on the device, what comes and goes, and whether ranks share it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlpipe.offload.cost import Knobs, Prediction, arrange, interleave
from rlpipe.offload.layout import Layout
from rlpipe.offload.profile import Capacity, Mode, Profile, Rates
from rlpipe.offload.runtime import Arrangement
from rlpipe.offload.search import Choice, DoesNotFit, search
from rlpipe.offload.trace import Trace
from rlpipe.offload.units import Unit


@dataclass(kw_only=True, slots=True, frozen=True)
class Decision:
    arrangement: Arrangement
    knobs: Knobs
    prediction: Prediction | None
    """None where nothing was left to decide."""
    num_parts: int
    """Into which the ranks cut every chunk; 1 where each holds all of it."""
    num_chunks: int
    num_blocks: int

    def describe(self) -> str:
        """In one line."""
        knobs, prediction = self.knobs, self.prediction
        kept = self.num_blocks - knobs.num_swapped - knobs.num_checkpointed - knobs.num_offloaded
        if knobs.num_persistent == self.num_chunks:
            where = f"all {self.num_chunks} chunks stay on the device"
        else:
            sharing = f", shared by {self.num_parts} ranks" if self.num_parts > 1 else ""
            where = f"{knobs.num_persistent} of {self.num_chunks} chunks stay, {knobs.num_slots} slots{sharing}"
        predicted = "as the config says" if prediction is None else _describe_prediction(prediction)
        return (
            f"{where}; of {self.num_blocks} layers {kept} keep their activations, {knobs.num_offloaded} drop weights, "
            f"{knobs.num_checkpointed} compute again, {knobs.num_swapped} swap; {predicted}"
        )

    def compare(self, seconds: float, num_micro_batches: int, device_bytes: int | None) -> str:
        """What was predicted, and what an update took; in one line."""
        prediction = self.prediction
        assert prediction is not None, "without a prediction there is nothing to compare"
        passes_s = (prediction.forward_s + prediction.backward_s) / prediction.num_micro_batches
        predicted_s = passes_s * num_micro_batches + prediction.device_adam_s + prediction.exposed_adam_s
        took = (
            f"an update of {num_micro_batches} micro batches took {seconds:.3g} s; {predicted_s:.3g} s were predicted, "
            "for full ones"
        )
        if device_bytes is None:
            return took
        peak = f"{device_bytes / 2**30:.2f} GiB on the device; {prediction.device_bytes / 2**30:.2f} GiB were predicted"
        return f"{took}; it took {peak}"


def given_decision(units: Sequence[Unit], layout: Layout, knobs: Knobs, *, num_parts: int) -> Decision:
    """All ``knobs`` are given; the modes that they make lie as ``arrange`` lays them, with swaps evenly among
    checkpoints. Raises ``ValueError`` where there are fewer blocks."""
    blocks = [index for index, unit in enumerate(units) if unit.is_block]
    per_swap = -(-knobs.num_checkpointed // max(knobs.num_swapped, 1))
    early = interleave(knobs.num_swapped, knobs.num_checkpointed, per_swap) + [Mode.OFFLOAD] * knobs.num_offloaded
    if len(early) > len(blocks):
        raise ValueError(f"num_swapped, num_checkpointed and num_offloaded are {len(early)} of {len(blocks)} layers")
    modes = [Mode.KEEP] * len(units)
    for index, mode in zip(blocks, early, strict=False):
        modes[index] = mode
    return Decision(
        arrangement=Arrangement(num_persistent=knobs.num_persistent, num_slots=knobs.num_slots, modes=modes),
        knobs=knobs,
        prediction=None,
        num_parts=num_parts,
        num_chunks=len(layout.chunks),
        num_blocks=len(blocks),
    )


def decide(
    trace: Trace,
    profiles: Mapping[int, Profile],
    *,
    num_units: int,
    rates: Rates,
    capacity: Capacity,
    fixed: Mapping[str, int],
) -> Decision:
    """The fastest way that fits; ``profiles`` by the number of parts. Raises ``DoesNotFit``, and ``ValueError`` where
    nothing has the ``fixed`` knobs."""
    found: list[tuple[Choice, int]] = []
    failures: list[DoesNotFit] = []
    for num_parts, profile in profiles.items():
        try:
            found.append((search(profile, rates, capacity, fixed), num_parts))
        except DoesNotFit as failure:
            failures.append(failure)
    if not found:
        raise failures[-1]
    choice, num_parts = min(found, key=lambda entry: entry[0].prediction.seconds)
    profile = profiles[num_parts]
    modes = [Mode.KEEP] * num_units
    for stage, mode in zip(trace.stages, arrange(profile, choice.knobs, rates), strict=True):
        if stage.unit is not None:
            modes[stage.unit] = mode
    return Decision(
        arrangement=Arrangement(
            num_persistent=choice.knobs.num_persistent, num_slots=choice.knobs.num_slots, modes=modes
        ),
        knobs=choice.knobs,
        prediction=choice.prediction,
        num_parts=num_parts,
        num_chunks=len(profile.chunks),
        num_blocks=len(profile.blocks),
    )


def _describe_prediction(prediction: Prediction) -> str:
    on_device, on_host = prediction.device_bytes / 2**30, prediction.host_bytes / 2**30
    count = prediction.num_micro_batches
    return (
        f"predicted {on_device:.2f} GiB on the device, {on_host:.2f} GiB on the host, "
        f"{prediction.seconds:.3g} s an update of {count} micro batch{'es' if count > 1 else ''}"
    )

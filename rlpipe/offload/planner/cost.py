"""What a way to carry out a training step takes: bytes on device and host, and seconds.

Every chunk costs the largest of its computation, its transfers, what ranks exchange of it, and what the host adds up of
its gradient. The optimizer's work on the host goes on beside the next forward pass, as exact clipping needs the whole
backward pass before it. Source: ProTrain, arXiv:2406.08334, which clips in another way and has it beside the backward
pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlpipe.offload.planner.profile import Capacity, ChunkProfile, Mode, Profile, Rates, StageProfile


@dataclass(kw_only=True, slots=True, frozen=True)
class Knobs:
    """What is decided: chunks that stay on the device, slots for the others, and the blocks of each mode."""

    num_persistent: int
    """The first chunks."""
    num_slots: int
    num_swapped: int = 0
    num_checkpointed: int = 0
    num_offloaded: int = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Prediction:
    device_bytes: float
    host_bytes: int
    forward_s: float
    backward_s: float
    device_adam_s: float
    host_adam_s: float
    num_micro_batches: int

    @property
    def exposed_adam_s(self) -> float:
        """What of the host's Adam the first micro batch's forward pass does not hide."""
        return max(0.0, self.host_adam_s - self.forward_s / self.num_micro_batches)

    @property
    def seconds(self) -> float:
        """Of an update."""
        return self.forward_s + self.backward_s + self.device_adam_s + self.exposed_adam_s

    def fits(self, capacity: Capacity) -> bool:
        return self.device_bytes <= capacity.device_bytes and self.host_bytes <= capacity.host_bytes


def arrange(profile: Profile, knobs: Knobs, rates: Rates) -> list[Mode]:
    """The mode of every stage; those that are no blocks keep what they save.

    The last blocks keep theirs; before them come those that drop their weights alone. Swaps go early, each followed by
    as many checkpoints as its transfer takes computation to hide.
    """
    early = interleave(knobs.num_swapped, knobs.num_checkpointed, checkpoints_per_swap(profile, rates))
    early += [Mode.OFFLOAD] * knobs.num_offloaded
    modes = [Mode.KEEP] * len(profile.stages)
    for index, mode in zip(profile.blocks, early, strict=False):
        modes[index] = mode
    return modes


def interleave(num_swaps: int, num_checkpoints: int, per_swap: int) -> list[Mode]:
    """Each swap followed by ``per_swap`` checkpoints, as long as there are any; the last one by all that are left."""
    found: list[Mode] = []
    for _ in range(num_swaps):
        count = min(per_swap, num_checkpoints)
        found += [Mode.SWAP, *[Mode.CHECKPOINT] * count]
        num_checkpoints -= count
    return found + [Mode.CHECKPOINT] * num_checkpoints


def checkpoints_per_swap(profile: Profile, rates: Rates) -> int:
    """How many blocks' forward passes the transfer of one block's activations takes, the swapped one left out."""
    blocks = [profile.stages[index] for index in profile.blocks]
    if not blocks:
        return 0
    transfer_s = sum(block.swapped_bytes for block in blocks) / len(blocks) / rates.device_to_host
    forward_s = sum(block.forward_s for block in blocks) / len(blocks)
    return max(0, math.ceil(transfer_s / forward_s) - 1) if forward_s > 0 else len(blocks)


def why_impossible(profile: Profile, knobs: Knobs, rates: Rates) -> str | None:
    """What is wrong with the knobs, or None."""
    count, blocks = len(profile.chunks), len(profile.blocks)
    if not 0 <= knobs.num_persistent <= count:
        return f"num_persistent={knobs.num_persistent} of {count} chunks"
    left = sum(chunk.slots for chunk in profile.chunks[knobs.num_persistent :])
    least = profile.least_slots(knobs.num_persistent)
    if not least <= knobs.num_slots <= left:
        return f"num_slots={knobs.num_slots}, while the chunks that come and go need at least {least}, and fill {left}"
    if min(knobs.num_swapped, knobs.num_checkpointed, knobs.num_offloaded) < 0:
        return "modes for less than no blocks"
    if knobs.num_swapped + knobs.num_checkpointed + knobs.num_offloaded > blocks:
        return f"modes for more than {blocks} blocks"
    modes = arrange(profile, knobs, rates)
    for index in range(knobs.num_persistent, first_cached(profile, knobs.num_slots)):
        if any(profile.stages[s].is_block and modes[s] is Mode.KEEP for s in profile.chunks[index].stages):
            return f"a block keeps its activations, with weights of chunk {index} among them, which does not stay"
    return None


def first_cached(profile: Profile, num_slots: int) -> int:
    """The chunk from which on all are still there when the backward pass begins."""
    index = len(profile.chunks)
    while index and profile.chunks[index - 1].slots <= num_slots:
        index -= 1
        num_slots -= profile.chunks[index].slots
    return index


def first_cold(profile: Profile, num_persistent: int, num_slots: int) -> int:
    """The chunk before which all are still there, from the last backward pass, when a forward pass begins; but trained
    ones have changed."""
    index = num_persistent
    while index < len(profile.chunks) and profile.chunks[index].slots <= num_slots:
        num_slots -= profile.chunks[index].slots
        index += 1
    return index


def predict(profile: Profile, knobs: Knobs, rates: Rates) -> Prediction:
    """Of knobs for which ``why_impossible`` has nothing to say."""
    modes = arrange(profile, knobs, rates)
    persistent, others = profile.chunks[: knobs.num_persistent], profile.chunks[knobs.num_persistent :]
    passes = profile.num_micro_batches
    return Prediction(
        device_bytes=profile.alpha
        * (
            profile.resident_bytes
            + sum(chunk.gathered_bytes + chunk.state_bytes for chunk in persistent)
            + knobs.num_slots * profile.slot_bytes
            + working_bytes(profile, knobs, modes)
        ),
        host_bytes=sum(chunk.num_bytes + chunk.state_bytes for chunk in others)
        + staging_bytes(others)
        + update_bytes(others)
        + sum(stage.swapped_bytes for stage, mode in zip(profile.stages, modes, strict=True) if mode is Mode.SWAP),
        forward_s=passes * sum(_forward_s(profile, knobs, rates, modes, i) for i in range(len(profile.chunks))),
        backward_s=passes * sum(_backward_s(profile, knobs, rates, modes, i) for i in range(len(profile.chunks))),
        device_adam_s=sum(device_update_s(rates, chunk) for chunk in persistent),
        host_adam_s=sum(host_update_s(rates, chunk) for chunk in others),
        num_micro_batches=passes,
    )


def working_bytes(profile: Profile, knobs: Knobs, modes: Sequence[Mode]) -> int:
    """What passes take on the device, or updates, which come after them: the larger of both."""
    shared = profile.shared_bytes if knobs.num_checkpointed else 0
    return max(shared + activation_peak(profile.stages, modes), update_bytes(profile.chunks[: knobs.num_persistent]))


def staging_bytes(chunks: Sequence[ChunkProfile]) -> int:
    """On the host, where gradients of these arrive and are added up."""
    staging = max((chunk.staging_bytes for chunk in chunks), default=0)
    return staging + max((chunk.adding_bytes for chunk in chunks), default=0)


def update_bytes(chunks: Sequence[ChunkProfile]) -> int:
    """What the updates of these make and drop, one after another."""
    return max((chunk.update_bytes for chunk in chunks), default=0)


def activation_peak(stages: Sequence[StageProfile], modes: Sequence[Mode]) -> int:
    """The most bytes that activations take at one time.

    What is swapped leaves while stages behind it run, and comes back before their backward pass is over.
    """
    on_the_way = [0] * len(stages)
    last_block = max((index for index, stage in enumerate(stages) if stage.is_block), default=0)
    for swapped, until in swap_spans(modes, last_block):
        for index in range(swapped + 1, until + 1):
            on_the_way[index] += stages[swapped].swapped_bytes
    peak = live = 0
    for stage, mode, others in zip(stages, modes, on_the_way, strict=True):
        again = stage.forward_peak + stage.entering_bytes if mode is Mode.CHECKPOINT else stage.forward_peak
        own = max(stage.saved_bytes, stage.swapped_bytes) if mode is Mode.SWAP else stage.saved_bytes
        peak = max(peak, live + others + own + max(again, stage.backward_peak))
        live += {Mode.CHECKPOINT: stage.input_bytes, Mode.SWAP: 0}.get(mode, stage.saved_bytes)
    return peak


def swap_spans(modes: Sequence[Mode], last_block: int) -> list[tuple[int, int]]:
    """Of each that is swapped, the one behind it whose backward pass brings it back: the next one that is swapped, for
    the last of them as far behind it as the one before was, where there are blocks."""
    swapped = [index for index, mode in enumerate(modes) if mode is Mode.SWAP]
    spans = list(itertools.pairwise(swapped))
    if swapped:
        last, distance = swapped[-1], swapped[-1] - swapped[-2] if len(swapped) > 1 else 1
        spans.append((last, min(max(last + 1, min(last + distance, last_block)), len(modes) - 1)))
    return spans


def _forward_s(profile: Profile, knobs: Knobs, rates: Rates, modes: Sequence[Mode], index: int) -> float:
    chunk = profile.chunks[index]
    compute_s = sum(share * profile.stages[stage].forward_s for stage, share in chunk.stages.items())
    is_kept = not chunk.num_trained and index < first_cold(profile, knobs.num_persistent, knobs.num_slots)
    is_there = index < knobs.num_persistent or is_kept
    in_bytes, exchange_s = (0, 0.0) if is_there else (chunk.num_bytes, gather_s(rates, chunk))
    out_bytes = _swapped(profile, modes, index)
    return max(compute_s, transfer_s(rates, in_bytes, out_bytes), exchange_s)


def _backward_s(profile: Profile, knobs: Knobs, rates: Rates, modes: Sequence[Mode], index: int) -> float:
    chunk = profile.chunks[index]
    compute_s = 0.0
    for stage, share in chunk.stages.items():
        entry = profile.stages[stage]
        again_s = entry.forward_s if modes[stage] is Mode.CHECKPOINT else 0.0
        compute_s += share * (entry.backward_s + again_s)
    stays = index < knobs.num_persistent
    is_there = stays or index >= first_cached(profile, knobs.num_slots)
    in_bytes = (0 if is_there else chunk.num_bytes) + _swapped(profile, modes, index)
    out_bytes = 0 if stays else chunk.gradient_bytes
    exchange_s = (0.0 if is_there else gather_s(rates, chunk)) + reduce_s(rates, chunk)
    adding_s = 0.0 if stays else host_adding_s(rates, chunk)
    return max(compute_s, transfer_s(rates, in_bytes, out_bytes), exchange_s, adding_s)


def _swapped(profile: Profile, modes: Sequence[Mode], index: int) -> float:
    """Bytes of activations that go with a chunk's transfers."""
    stages = profile.chunks[index].stages.items()
    return sum(share * profile.stages[stage].swapped_bytes for stage, share in stages if modes[stage] is Mode.SWAP)


def transfer_s(rates: Rates, in_bytes: Any, out_bytes: Any) -> Any:
    """Seconds until both are through, of numbers or arrays: at the rate of ``both`` as long as both are under way."""
    shared = np.minimum(in_bytes, out_bytes)
    rest_s = (in_bytes - shared) / rates.host_to_device + (out_bytes - shared) / rates.device_to_host
    return shared / rates.both + rest_s


def gather_s(rates: Rates, chunk: ChunkProfile) -> float:
    """Seconds until a chunk that ranks share is whole."""
    return rates.link.all_gather.time(chunk.gather_bytes)


def reduce_s(rates: Rates, chunk: ChunkProfile) -> float:
    """Seconds until the ranks' gradients of a chunk are summed."""
    return rates.link.reduce_scatter.time(chunk.scatter_bytes) + rates.link.all_reduce.time(chunk.reduce_bytes)


def host_adding_s(rates: Rates, chunk: ChunkProfile) -> float:
    """Seconds that the host takes to add a chunk's gradient of a backward pass to those before; the first one, which is
    copied, takes about as long."""
    return chunk.num_trained / rate_of(rates.host_adding, chunk.adding)


def host_update_s(rates: Rates, chunk: ChunkProfile) -> float:
    """Seconds of a chunk's update on the host."""
    return chunk.num_trained / rate_of(rates.host_adam, chunk.state_dtype) + chunk.cast_bytes / rates.host_bandwidth


def device_update_s(rates: Rates, chunk: ChunkProfile) -> float:
    """The same of one that stays on the device, whose new weights ranks that share it then gather."""
    spread_s = gather_s(rates, chunk) if chunk.num_trained else 0.0
    update_s = chunk.num_trained / rate_of(rates.device_adam, chunk.state_dtype)
    return update_s + chunk.cast_bytes / rates.device_bandwidth + spread_s


def rate_of(rates: Mapping[str, float], name: str) -> float:
    """The one of that name, or the slowest where that was not measured."""
    return rates[name] if name in rates else min(rates.values())

"""Cost model of chunked offload: the profile of a model in chunks, and the time and memory of a plan.

The time of a chunk is the longest of its computation, its transfers, the ranks' exchange of it, and the accumulation of
its gradient on the host. The optimizer's work on the host overlaps with the next forward pass, because exact clipping
needs the whole backward pass before it. Source: ProTrain, arXiv:2406.08334, which clips in another way and overlaps it
with the backward pass. Shapes: K plans, S stages, C chunks.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rlpipe.hardware.device import Link
from rlpipe.offload.decision import Knobs, Mode, Prediction, swap_spans

Floats = NDArray[np.float64]
Codes = NDArray[np.int8]
FREE_LINK = Link.at_rate(math.inf)


CODES = {mode: code for code, mode in enumerate(Mode)}
"""Numbers of the modes in arrays."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StageProfile:
    """A block, or what runs before, between and after blocks.

    Seconds and bytes are those of one micro batch, with all weights on the device.
    """

    is_block: bool
    forward_s: float
    backward_s: float
    saved_bytes: int
    """Bytes that autograd saves, without weights."""
    swapped_bytes: int
    """Bytes that a swap moves; what stages share counts in each."""
    input_bytes: int
    """Bytes that a checkpoint keeps."""
    entering_bytes: int = 0
    """Bytes of the gradients that its backward pass begins with."""
    forward_peak: int
    """Most bytes while it runs, beyond what it keeps."""
    backward_peak: int


@dataclass(kw_only=True, slots=True, frozen=True)
class ChunkProfile:
    """A chunk, in bytes of this rank; if ranks share the chunks, only ``gathered_bytes`` is of the whole chunk."""

    stages: Mapping[int, float]
    """Indices of the stages that use it, with the share of each stage's weights that it holds."""
    num_bytes: int
    """Bytes on the host, which a transfer moves."""
    gathered_bytes: int
    """Bytes on the device while it is loaded."""
    slots: int = 1
    """Slots that it takes."""
    gather_bytes: int = 0
    """Bytes that other ranks send whenever it is loaded to the device."""
    scatter_bytes: int = 0
    """Bytes received of other ranks' gradients per backward pass, if each rank sums up its part."""
    reduce_bytes: int = 0
    """Bytes received per backward pass, if each rank gets the whole sum of gradients."""
    gradient_bytes: int = 0
    """Bytes that a backward pass sends to the host; 0 for frozen chunks."""
    adding: str = "float32 to float32"
    """Name in ``Rates.host_adding`` of how the host adds up its gradients."""
    state_bytes: int = 0
    """Bytes of its summed gradient, its moments, and its weights in the optimizer's dtype; 0 for frozen chunks."""
    staging_bytes: int = 0
    """Bytes on the host where its gradients arrive, in buffers that all chunks share."""
    adding_bytes: int = 0
    """Temporary bytes on the host while its gradients are added up."""
    update_bytes: int = 0
    """Temporary bytes of its update, on the host or the device: a tensor's gradient in the optimizer's dtype."""
    num_trained: int = 0
    """Elements that the optimizer updates."""
    state_dtype: str = "float32"
    """The optimizer's dtype."""
    cast_bytes: int = 0
    """Bytes that an update also reads and writes for casts: gradients to the optimizer's dtype, weights from it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Rates:
    """Rates of a machine.

    Raises ``ValueError`` if a rate is not above 0: a transfer that costs nothing would always win.
    """

    host_to_device: float
    """Bytes per second."""
    device_to_host: float
    both: float
    """Bytes per second in each direction while both are busy."""
    device_adam: Mapping[str, float]
    """Elements per second by the dtype of the state; other dtypes count as the slowest of these, here and below."""
    host_adam: Mapping[str, float]
    host_adding: Mapping[str, float]
    """Elements of gradients per second, by ``hardware.device.adding``."""
    device_bandwidth: float
    """Bytes per second that are read and written within the device's memory."""
    host_bandwidth: float
    link: Link = FREE_LINK
    """Link between ranks; a single rank exchanges nothing."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            rates = value.values() if isinstance(value, Mapping) else [value]
            for rate in rates:
                if not (isinstance(rate, Link) or rate > 0):
                    raise ValueError(f"the rate {entry.name} is {rate}; measure the machine: rlpipe plan --calibrate")


@dataclass(kw_only=True, slots=True, frozen=True)
class Profile:
    """The costs of a model, by the stages of a pass and by the chunks that they use."""

    stages: Sequence[StageProfile]
    chunks: Sequence[ChunkProfile]
    """Chunks in the order of first use."""
    slot_bytes: int = 0
    resident_bytes: int = 0
    """Bytes on the device in every plan: what is in no chunk, with its gradients and optimizer state, and gradients of
    chunks in flight."""
    shared_bytes: int = 0
    """Bytes on the device if any block is checkpointed: the inputs that blocks share."""
    num_micro_batches: int = 1
    """Micro batches per update."""

    @property
    def blocks(self) -> list[int]:
        """Indices of the stages that are blocks."""
        return [index for index, stage in enumerate(self.stages) if stage.is_block]

    def least_slots(self, num_persistent: int) -> int:
        """Return the fewest slots with which every stage can run, plus one for prefetch."""
        uses: Counter[int] = Counter()
        for chunk in self.chunks[num_persistent:]:
            uses.update(dict.fromkeys(chunk.stages, chunk.slots))
        max_slots = sum(chunk.slots for chunk in self.chunks[num_persistent:])
        return min(max_slots, max(uses.values(), default=0) + 1)


def arrange(profile: Profile, knobs: Knobs, rates: Rates) -> list[Mode]:
    """Return the mode of every stage; stages that are not blocks keep their activations.

    The last blocks keep theirs, too; before them come the blocks that drop only their weights. Swapped blocks come
    first, each followed by as many checkpointed blocks as it takes to hide its transfer.
    """
    early = interleave(knobs.num_swapped, knobs.num_checkpointed, checkpoints_per_swap(profile, rates))
    early += [Mode.OFFLOAD] * knobs.num_offloaded
    modes = [Mode.KEEP] * len(profile.stages)
    for index, mode in zip(profile.blocks, early, strict=False):
        modes[index] = mode
    return modes


def interleave(num_swaps: int, num_checkpoints: int, per_swap: int) -> list[Mode]:
    """Return modes with up to ``per_swap`` checkpoints after each swap, and all that remain after the last one."""
    modes: list[Mode] = []
    for _ in range(num_swaps):
        count = min(per_swap, num_checkpoints)
        modes += [Mode.SWAP, *[Mode.CHECKPOINT] * count]
        num_checkpoints -= count
    return modes + [Mode.CHECKPOINT] * num_checkpoints


def checkpoints_per_swap(profile: Profile, rates: Rates) -> int:
    """Return how many blocks must run after each swapped one to hide the transfer of its activations."""
    blocks = [profile.stages[index] for index in profile.blocks]
    if not blocks:
        return 0
    transfer_s = sum(block.swapped_bytes for block in blocks) / len(blocks) / rates.device_to_host
    forward_s = sum(block.forward_s for block in blocks) / len(blocks)
    return max(0, math.ceil(transfer_s / forward_s) - 1) if forward_s > 0 else len(blocks)


def why_impossible(profile: Profile, knobs: Knobs, rates: Rates) -> str | None:
    """Return what is wrong with the knobs, or None."""
    count, blocks = len(profile.chunks), len(profile.blocks)
    if not 0 <= knobs.num_persistent <= count:
        return f"num_persistent={knobs.num_persistent}: the model has {count} chunks"
    max_slots = sum(chunk.slots for chunk in profile.chunks[knobs.num_persistent :])
    min_slots = profile.least_slots(knobs.num_persistent)
    if not min_slots <= knobs.num_slots <= max_slots:
        return (
            f"num_slots={knobs.num_slots}: the chunks that are loaded on demand use between {min_slots} and {max_slots}"
        )
    if min(knobs.num_swapped, knobs.num_checkpointed, knobs.num_offloaded) < 0:
        return "a number of blocks is negative"
    if knobs.num_swapped + knobs.num_checkpointed + knobs.num_offloaded > blocks:
        return f"the numbers of blocks add up to more than {blocks}"
    modes = arrange(profile, knobs, rates)
    for index in range(knobs.num_persistent, first_cached(profile, knobs.num_slots)):
        if any(profile.stages[s].is_block and modes[s] is Mode.KEEP for s in profile.chunks[index].stages):
            return f"a block keeps activations with weights of chunk {index}, which does not stay on the device"
    return None


def first_cached(profile: Profile, num_slots: int) -> int:
    """Return the index from which on all chunks are still on the device when the backward pass begins."""
    index = len(profile.chunks)
    while index and profile.chunks[index - 1].slots <= num_slots:
        index -= 1
        num_slots -= profile.chunks[index].slots
    return index


def first_cold(profile: Profile, num_persistent: int, num_slots: int) -> int:
    """Return the index before which all chunks are still on the device when a forward pass begins.

    They are left from the last backward pass; trained ones have changed since.
    """
    index = num_persistent
    while index < len(profile.chunks) and profile.chunks[index].slots <= num_slots:
        num_slots -= profile.chunks[index].slots
        index += 1
    return index


def predict(profile: Profile, knobs: Knobs, rates: Rates) -> Prediction:
    """Predict the cost of knobs for which ``why_impossible`` returns None."""
    modes, first, passes = arrange(profile, knobs, rates), knobs.num_persistent, profile.num_micro_batches
    persistent, host_chunks = profile.chunks[:first], profile.chunks[first:]
    times = chunk_times(profile, rates, encode(modes))
    cold, cached = first_cold(profile, first, knobs.num_slots), first_cached(profile, knobs.num_slots)
    forward_s = [times.forward_stays[:, :first], times.forward_kept[:, first:cold], times.forward_loads[:, cold:]]
    backward_s = [
        times.backward_stays[:, :first],
        times.backward_loads[:, first:cached],
        times.backward_cached[:, cached:],
    ]
    return Prediction(
        device_bytes=profile.resident_bytes
        + sum(chunk.gathered_bytes + chunk.state_bytes for chunk in persistent)
        + knobs.num_slots * profile.slot_bytes
        + working_bytes(profile, knobs, modes),
        host_bytes=sum(chunk.num_bytes + chunk.state_bytes for chunk in host_chunks)
        + staging_bytes(host_chunks)
        + update_bytes(host_chunks)
        + sum(stage.swapped_bytes for stage, mode in zip(profile.stages, modes, strict=True) if mode is Mode.SWAP),
        forward_s=passes * sum(float(seconds.sum()) for seconds in forward_s),
        backward_s=passes * sum(float(seconds.sum()) for seconds in backward_s),
        device_adam_s=sum(device_update_s(rates, chunk) for chunk in persistent),
        host_adam_s=sum(host_update_s(rates, chunk) for chunk in host_chunks),
        num_micro_batches=passes,
    )


def working_bytes(profile: Profile, knobs: Knobs, modes: Sequence[Mode]) -> int:
    """Return the working memory on the device: the most that the passes, or the updates after them, take."""
    shared = profile.shared_bytes if knobs.num_checkpointed else 0
    return max(shared + activation_peak(profile.stages, modes), update_bytes(profile.chunks[: knobs.num_persistent]))


def staging_bytes(chunks: Sequence[ChunkProfile]) -> int:
    """Return the host bytes in which gradients of ``chunks`` arrive and are accumulated."""
    staging = max((chunk.staging_bytes for chunk in chunks), default=0)
    return staging + max((chunk.adding_bytes for chunk in chunks), default=0)


def update_bytes(chunks: Sequence[ChunkProfile]) -> int:
    """Return the temporary bytes of the updates of ``chunks``, which run one after another."""
    return max((chunk.update_bytes for chunk in chunks), default=0)


def activation_peak(stages: Sequence[StageProfile], modes: Sequence[Mode]) -> int:
    """Return the most bytes that activations take at one time."""
    return int(activation_peaks(stages, encode(modes))[0])


def activation_peaks(stages: Sequence[StageProfile], codes: Codes) -> Floats:
    """Return the most bytes that activations take at one time, ``[K]``, for modes as ``codes`` ``[K, S]``."""
    saved, swapped_bytes = column(stages, "saved_bytes"), column(stages, "swapped_bytes")
    checkpoints, swaps = codes == CODES[Mode.CHECKPOINT], codes == CODES[Mode.SWAP]
    kept_bytes = np.where(checkpoints, column(stages, "input_bytes"), np.where(swaps, 0, saved))
    live = np.cumsum(kept_bytes, 1) - kept_bytes
    recompute_peak = column(stages, "forward_peak") + np.where(checkpoints, column(stages, "entering_bytes"), 0)
    transient = np.maximum(recompute_peak, column(stages, "backward_peak"))
    stage_bytes = np.where(swaps, np.maximum(saved, swapped_bytes), saved)
    return np.asarray((live + _in_flight_bytes(stages, codes) + stage_bytes + transient).max(1, initial=0.0))


def _in_flight_bytes(stages: Sequence[StageProfile], codes: Codes) -> Floats:
    """Return the bytes of swapped activations that are in flight during each stage, ``[K, S]``.

    They leave while later stages run, and come back before the backward pass of those is over.
    """
    last_block = max((index for index, stage in enumerate(stages) if stage.is_block), default=0)
    by_modes: dict[bytes, Floats] = {}
    keys = [row.tobytes() for row in codes == CODES[Mode.SWAP]]
    for key, row in zip(keys, codes, strict=True):
        if key not in by_modes:
            in_flight = by_modes[key] = np.zeros(len(stages))
            modes = [Mode.SWAP if code == CODES[Mode.SWAP] else Mode.KEEP for code in row]
            for swapped, last in swap_spans(modes, last_block):
                in_flight[swapped + 1 : last + 1] += stages[swapped].swapped_bytes
    return np.stack([by_modes[key] for key in keys])


@dataclass(kw_only=True, slots=True, frozen=True)
class ChunkTimes:
    """Seconds of each chunk in a pass of one micro batch, by where it is, ``[K, C]``."""

    forward_stays: Floats
    """Seconds of a persistent chunk."""
    forward_kept: Floats
    """Seconds of a chunk that the last backward pass left on the device; a trained one has changed, and is loaded."""
    forward_loads: Floats
    backward_stays: Floats
    backward_cached: Floats
    """Seconds of a chunk that the forward pass left on the device."""
    backward_loads: Floats


def chunk_times(profile: Profile, rates: Rates, codes: Codes) -> ChunkTimes:
    """Return the seconds of the chunks, for the stages' modes as ``codes`` ``[K, S]``."""
    stages, chunks, shares = profile.stages, profile.chunks, stage_shares(profile)
    forward = column(stages, "forward_s")
    forward_s = (forward @ shares)[None]  # [1, C]
    recompute_s = (codes == CODES[Mode.CHECKPOINT]) * forward
    backward_s = (column(stages, "backward_s") @ shares)[None] + recompute_s @ shares  # [K, C]
    swapped = ((codes == CODES[Mode.SWAP]) * column(stages, "swapped_bytes")) @ shares  # [K, C]
    chunk_bytes, gradient = column(chunks, "num_bytes"), column(chunks, "gradient_bytes")
    gathering_s = np.array([gather_s(rates, chunk) for chunk in chunks])
    reducing_s = np.array([reduce_s(rates, chunk) for chunk in chunks])
    adding_s = np.array([host_adding_s(rates, chunk) for chunk in chunks])
    changes = column(chunks, "num_trained") > 0

    def longest(compute_s: Floats, in_bytes: Any, out_bytes: Any, *others_s: Floats) -> Floats:
        return reduce(np.maximum, others_s, np.maximum(compute_s, transfer_s(rates, in_bytes, out_bytes)))

    return ChunkTimes(
        forward_stays=longest(forward_s, 0, swapped),
        forward_kept=longest(forward_s, chunk_bytes * changes, swapped, gathering_s * changes),
        forward_loads=longest(forward_s, chunk_bytes, swapped, gathering_s),
        backward_stays=longest(backward_s, swapped, 0, reducing_s),
        backward_cached=longest(backward_s, swapped, gradient, reducing_s, adding_s),
        backward_loads=longest(backward_s, chunk_bytes + swapped, gradient, gathering_s + reducing_s, adding_s),
    )


def stage_shares(profile: Profile) -> Floats:
    """Return the share of each stage's cost that falls on each chunk ``[S, C]``."""
    shares = np.zeros((len(profile.stages), len(profile.chunks)))
    for index, chunk in enumerate(profile.chunks):
        for stage, share in chunk.stages.items():
            shares[stage, index] = share
    return shares


def column(entries: Sequence[StageProfile] | Sequence[ChunkProfile], name: str) -> Floats:
    """Return a number of all stages, or of all chunks."""
    return np.array([getattr(entry, name) for entry in entries], np.float64)


def encode(modes: Sequence[Mode]) -> Codes:
    """Return one plan's modes as an array ``[1, S]``."""
    return np.array([[CODES[mode] for mode in modes]], np.int8)


def transfer_s(rates: Rates, in_bytes: Any, out_bytes: Any) -> Any:
    """Return the seconds until both transfers are over, for numbers or arrays; they overlap at the rate ``both``."""
    shared = np.minimum(in_bytes, out_bytes)
    rest_s = (in_bytes - shared) / rates.host_to_device + (out_bytes - shared) / rates.device_to_host
    return shared / rates.both + rest_s


def gather_s(rates: Rates, chunk: ChunkProfile) -> float:
    """Return the seconds to gather a chunk that ranks share."""
    return rates.link.all_gather.time(chunk.gather_bytes)


def reduce_s(rates: Rates, chunk: ChunkProfile) -> float:
    """Return the seconds to sum the ranks' gradients of a chunk."""
    return rates.link.reduce_scatter.time(chunk.scatter_bytes) + rates.link.all_reduce.time(chunk.reduce_bytes)


def host_adding_s(rates: Rates, chunk: ChunkProfile) -> float:
    """Return the seconds that the host takes to accumulate a chunk's gradient of one backward pass.

    The first one is copied instead, which takes about as long.
    """
    return chunk.num_trained / rate_of(rates.host_adding, chunk.adding)


def host_update_s(rates: Rates, chunk: ChunkProfile) -> float:
    """Return the seconds of a chunk's update on the host."""
    return chunk.num_trained / rate_of(rates.host_adam, chunk.state_dtype) + chunk.cast_bytes / rates.host_bandwidth


def device_update_s(rates: Rates, chunk: ChunkProfile) -> float:
    """Return the seconds of a persistent chunk's update on the device, with the gather of its new weights."""
    spread_s = gather_s(rates, chunk) if chunk.num_trained else 0.0
    update_s = chunk.num_trained / rate_of(rates.device_adam, chunk.state_dtype)
    return update_s + chunk.cast_bytes / rates.device_bandwidth + spread_s


def rate_of(rates: Mapping[str, float], name: str) -> float:
    """Return the rate of this name, or the slowest if that was not measured."""
    return rates[name] if name in rates else min(rates.values())

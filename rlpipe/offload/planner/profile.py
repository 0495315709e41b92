"""Profiles of a model's training step, and rates of the machine that it runs on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from rlpipe.hardware.curve import Link

FREE_LINK = Link.at_rate(math.inf)


class Mode(StrEnum):
    """Handling of a block's activations between its forward and its backward pass."""

    KEEP = "keep"
    CHECKPOINT = "checkpoint"
    """Only the block's input stays; the rest is recomputed."""
    SWAP = "swap"
    """Activations are copied to the host and back."""
    OFFLOAD = "offload"
    """Activations stay, except for the weights among them, which are loaded again."""


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
    stages: Sequence[StageProfile]
    chunks: Sequence[ChunkProfile]
    """Chunks in the order of first use."""
    slot_bytes: int = 0
    resident_bytes: int = 0
    """Bytes on the device in every plan: what is in no chunk, with its gradients and optimizer state, and gradients of
    chunks in flight."""
    shared_bytes: int = 0
    """Bytes on the device if any block is checkpointed: the inputs that blocks share."""
    alpha: float = 1.0
    """Ratio of the memory that the allocator takes to the memory that it is asked for."""
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
        left = sum(chunk.slots for chunk in self.chunks[num_persistent:])
        return min(left, max(uses.values(), default=0) + 1)


@dataclass(kw_only=True, slots=True, frozen=True)
class Capacity:
    device_bytes: int
    host_bytes: int

    def less(self, taken: Capacity) -> Capacity:
        return Capacity(
            device_bytes=self.device_bytes - taken.device_bytes, host_bytes=self.host_bytes - taken.host_bytes
        )

"""What is known of a model's training step, and of the machine that it runs on."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum

from rlpipe.hardware.curve import Link

FREE_LINK = Link.at_rate(math.inf)


class Mode(StrEnum):
    """What becomes of a block's activations between its forward and its backward pass."""

    KEEP = "keep"
    CHECKPOINT = "checkpoint"
    """Only its input stays; the rest is computed anew."""
    SWAP = "swap"
    """They go to the host and come back."""
    OFFLOAD = "offload"
    """They stay, but for the weights among them, which are gathered again."""


@dataclass(kw_only=True, slots=True, frozen=True)
class StageProfile:
    """A block, or what runs before, between and behind blocks; in the order of the forward pass.

    Seconds and bytes are those of one micro batch, with all weights on the device.
    """

    is_block: bool
    forward_s: float
    backward_s: float
    saved_bytes: int
    """What autograd keeps of it, weights left out."""
    swapped_bytes: int
    """The same where it is moved: what stages share counts in each."""
    input_bytes: int
    """What a checkpoint keeps of it."""
    entering_bytes: int = 0
    """Of the gradients that its backward pass begins with."""
    forward_peak: int
    """Bytes that it takes while it runs, beyond what it keeps."""
    backward_peak: int


@dataclass(kw_only=True, slots=True, frozen=True)
class ChunkProfile:
    """A chunk, in bytes of this rank; with ranks that share the model, ``gathered_bytes`` is the whole."""

    stages: Mapping[int, float]
    """Those that use it, with the share of their weights that it holds; its transfer goes with the first of them."""
    num_bytes: int
    """On the host; what a transfer moves."""
    gathered_bytes: int
    """On the device while it is there."""
    slots: int = 1
    """That it takes."""
    gather_bytes: int = 0
    """What other ranks send of it whenever it is brought to the device."""
    scatter_bytes: int = 0
    """What it receives of others' gradients in a backward pass, where each sums up its part."""
    reduce_bytes: int = 0
    """The same where each is given the whole sum."""
    gradient_bytes: int = 0
    """What a backward pass sends to the host; 0 for frozen ones."""
    adding: str = "float32 to float32"
    """How the host adds it to those before, by its name among the rates."""
    state_bytes: int = 0
    """Where it is updated: its summed gradient, its moments, its weights in the optimizer's type; 0 for frozen ones."""
    staging_bytes: int = 0
    """On the host, where its gradients arrive there: places that all chunks use, each as large as it needs."""
    adding_bytes: int = 0
    """What the host makes to add them up, and drops."""
    update_bytes: int = 0
    """What its update makes where it goes on, and drops: a tensor's gradient in the optimizer's type."""
    num_trained: int = 0
    """Elements that the optimizer updates."""
    state_dtype: str = "float32"
    """In which it does."""
    cast_bytes: int = 0
    """What an update reads and writes beside that: gradients that come into this type, weights that leave it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Rates:
    """Of a machine. Raises ``ValueError`` where one is missing: a transfer that costs nothing would always win."""

    host_to_device: float
    """Bytes a second."""
    device_to_host: float
    both: float
    """Bytes a second in each direction while both are busy."""
    device_adam: Mapping[str, float]
    """Elements a second, by the dtype of the state; others are taken for the slowest of them, here and below."""
    host_adam: Mapping[str, float]
    host_adding: Mapping[str, float]
    """Elements of gradients a second, by ``hardware.device.adding``."""
    device_bandwidth: float
    """Bytes a second that are read and written within the device's memory."""
    host_bandwidth: float
    link: Link = FREE_LINK
    """Between ranks; one rank exchanges nothing."""

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
    """In the order of first use."""
    slot_bytes: int = 0
    resident_bytes: int = 0
    """On the device whatever is decided: what is in no chunk, with its gradients and optimizer state, and gradients of
    chunks on their way."""
    shared_bytes: int = 0
    """On the device where any block is checkpointed: what all of those are given."""
    alpha: float = 1.0
    """What the allocator takes over what is asked of it."""
    num_micro_batches: int = 1
    """Of an update."""

    @property
    def blocks(self) -> list[int]:
        """Which stages are blocks."""
        return [index for index, stage in enumerate(self.stages) if stage.is_block]

    def least_slots(self, num_persistent: int) -> int:
        """The fewest with which every stage can run, and one for what comes next."""
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

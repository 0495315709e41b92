"""The plan of chunked offload: which chunks stay, what each block does with its activations, and the predicted cost."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from rlpipe.common.formatting import duration, gib


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
class Capacity:
    """Bytes of memory that are free on a rank's device and on its host."""

    device_bytes: int
    host_bytes: int

    def less(self, taken: Capacity) -> Capacity:
        return Capacity(
            device_bytes=self.device_bytes - taken.device_bytes, host_bytes=self.host_bytes - taken.host_bytes
        )


@dataclass(kw_only=True, slots=True, frozen=True)
class Knobs:
    """The planner's variables: persistent chunks, slots for the others, and the number of blocks in each mode."""

    num_persistent: int
    """Chunks that stay on the device: the first ones."""
    num_slots: int
    num_swapped: int = 0
    num_checkpointed: int = 0
    num_offloaded: int = 0


@dataclass(kw_only=True, slots=True, frozen=True)
class Prediction:
    """A plan's predicted memory on the device and the host, and its time per update."""

    device_bytes: int
    host_bytes: int
    forward_s: float
    backward_s: float
    device_adam_s: float
    host_adam_s: float
    num_micro_batches: int

    @property
    def exposed_adam_s(self) -> float:
        """Seconds of the host's Adam that the first micro batch's forward pass does not hide."""
        return max(0.0, self.host_adam_s - self.forward_s / self.num_micro_batches)

    @property
    def seconds(self) -> float:
        """Seconds per update."""
        return self.forward_s + self.backward_s + self.device_adam_s + self.exposed_adam_s

    def fits(self, capacity: Capacity) -> bool:
        return self.device_bytes <= capacity.device_bytes and self.host_bytes <= capacity.host_bytes


@dataclass(kw_only=True, slots=True, frozen=True)
class Arrangement:
    """Placement of the chunks, and mode of each unit's activations."""

    num_persistent: int
    """Chunks that stay on the device: the first ones."""
    num_slots: int
    modes: Sequence[Mode]
    """Mode of each unit; ``KEEP`` if it is not a block."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Decision:
    """The chosen plan of chunked offload, with the reasons."""

    arrangement: Arrangement
    knobs: Knobs
    prediction: Prediction | None
    """Predicted cost; None if all knobs were given."""
    num_parts: int
    """Parts that the ranks cut every chunk into; 1 if each rank holds all of it."""
    num_chunks: int
    num_blocks: int
    why_not_all: str = ""
    """Reason why not all chunks stay on the device."""
    why_shared: str = ""
    """Time of the other choice, to share the chunks among ranks or not."""

    def describe(self) -> str:
        """Describe the decision in one line."""
        knobs, prediction = self.knobs, self.prediction
        num_kept = self.num_blocks - knobs.num_swapped - knobs.num_checkpointed - knobs.num_offloaded
        if knobs.num_persistent == self.num_chunks:
            placement = f"all {self.num_chunks} chunks stay on the device{self._describe_sharing()}"
        else:
            persistent = f"{knobs.num_persistent} of {self.num_chunks} chunks stay{self.why_not_all}"
            placement = f"{persistent}, {knobs.num_slots} slots{self._describe_sharing()}"
        predicted = "as the config says" if prediction is None else _describe_prediction(prediction)
        return (
            f"{placement}; of {self.num_blocks} layers {num_kept} keep their activations, {knobs.num_offloaded} drop "
            f"weights, {knobs.num_checkpointed} recompute, {knobs.num_swapped} swap; {predicted}"
        )

    def _describe_sharing(self) -> str:
        shared = f", shared by {self.num_parts} ranks" if self.num_parts > 1 else ""
        return f"{shared or ', replicated'}{self.why_shared}" if self.why_shared else shared

    def compare(
        self, seconds: float, num_micro_batches: int, *, device_bytes: int | None, host_bytes: int, process_bytes: int
    ) -> str:
        """Describe in one line what was predicted, and what an update took.

        ``process_bytes`` is all host memory of the process.
        """
        prediction = self.prediction
        assert prediction is not None, "without a prediction there is nothing to compare"
        passes_s = (prediction.forward_s + prediction.backward_s) / prediction.num_micro_batches
        predicted_s = passes_s * num_micro_batches + prediction.device_adam_s + prediction.exposed_adam_s
        text = (
            f"an update of {num_micro_batches} micro batches took {duration(seconds)}; {duration(predicted_s)} were "
            "predicted for full ones"
        )
        if device_bytes is not None:
            text += f"; it used {gib(device_bytes)} on the device; {gib(prediction.device_bytes)} were predicted"
        return (
            f"{text}; it holds {gib(host_bytes)} on the host; {gib(prediction.host_bytes)} were predicted; the process "
            f"uses {gib(process_bytes)}, with code and libraries"
        )


def _describe_prediction(prediction: Prediction) -> str:
    count = prediction.num_micro_batches
    return (
        f"predicted {gib(prediction.device_bytes)} on the device, {gib(prediction.host_bytes)} on the host, "
        f"{duration(prediction.seconds)} per update of {count} full micro batch{'es' if count > 1 else ''}"
    )


def swap_spans(modes: Sequence[Mode], last_block: int) -> list[tuple[int, int]]:
    """Return for each swapped stage its index and that of the later stage whose backward pass fetches it.

    This is the next swapped stage; for the last one, it is as far away as the one before was, up to the last block.
    """
    swapped = [index for index, mode in enumerate(modes) if mode is Mode.SWAP]
    spans = list(itertools.pairwise(swapped))
    if swapped:
        last, distance = swapped[-1], swapped[-1] - swapped[-2] if len(swapped) > 1 else 1
        spans.append((last, min(max(last + 1, min(last + distance, last_block)), len(modes) - 1)))
    return spans

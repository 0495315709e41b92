"""Layout of a model's parameters in chunks, which move between host and device as a whole.

Source: ProTrain, arXiv:2406.08334.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rlpipe.common.formatting import MIB

CHUNK_SIZES = (32 * MIB, 64 * MIB, 128 * MIB, 256 * MIB)
ALIGNMENT = 256
"""Alignment in bytes that suits GPU kernels and pinned copies."""


@dataclass(kw_only=True, slots=True, frozen=True)
class TensorInfo:
    """A parameter, or a tensor that accompanies one (such as the scales of a 4-bit weight)."""

    name: str
    num_bytes: int
    block: int | None
    """Transformer block that it belongs to; None for embedding, head and the like."""
    is_trained: bool
    dtype: str = ""
    """Stored and compute dtype of a trained tensor; a chunk has one of each, so that its gradients form one tensor."""


@dataclass(kw_only=True, slots=True, frozen=True)
class ChunkSpan:
    """The bytes of one tensor in its chunk."""

    name: str
    offset: int
    """Bytes from the chunk's start, a multiple of ``ALIGNMENT``."""
    num_bytes: int


@dataclass(kw_only=True, slots=True)
class Chunk:
    """A chunk of the model: tensors that move between host and device together."""

    index: int
    is_trained: bool
    """Whether its tensors are trained; frozen ones have chunks of their own, which are never written back."""
    spans: list[ChunkSpan] = field(default_factory=list)
    blocks: list[int | None] = field(default_factory=list)
    """Transformer blocks whose tensors it holds, in the order of first use."""

    @property
    def num_bytes(self) -> int:
        return aligned(self.spans[-1].offset + self.spans[-1].num_bytes) if self.spans else 0


@dataclass(kw_only=True, slots=True, frozen=True)
class ChunkLayout:
    """The division of a model's tensors into chunks."""

    slot_bytes: int
    """Bytes of a slot on the device: those of the largest chunk within the chosen chunk size."""
    chunks: Sequence[Chunk]

    def slots_of(self, chunk: Chunk) -> int:
        """Return the number of slots that a chunk takes: one, unless it holds a tensor larger than a slot."""
        return -(-chunk.num_bytes // self.slot_bytes)

    @property
    def slack(self) -> int:
        """Bytes that slots of this size leave unused, over all chunks."""
        return sum(self.slots_of(chunk) * self.slot_bytes - chunk.num_bytes for chunk in self.chunks)


def aligned(num_bytes: int, to: int = ALIGNMENT) -> int:
    return -(-num_bytes // to) * to


def make_layout(tensors: Sequence[TensorInfo], *, sizes: Sequence[int] = CHUNK_SIZES) -> ChunkLayout:
    """Return the layout with the least slack among the chunk ``sizes``; of equal ones, that of the smallest chunks.

    ``tensors`` are in the order of first use. A new chunk begins rather than split a block that would fit into one. A
    tensor larger than a chunk has one of its own, which takes several slots.
    """
    if not tensors:
        raise ValueError("a model without parameters has nothing to lay out")
    return min((_fill(tensors, size) for size in sorted(sizes)), key=lambda layout: layout.slack)


def _fill(tensors: Sequence[TensorInfo], size: int) -> ChunkLayout:
    chunks: list[Chunk] = []
    open_chunks: dict[Kind, Chunk] = {}
    for unit in _units(tensors):
        kind, unit_bytes = _kind(unit[0]), sum(aligned(tensor.num_bytes) for tensor in unit)
        chunk = open_chunks.get(kind)
        if chunk is not None and unit_bytes <= size < chunk.num_bytes + unit_bytes:
            chunk = None
        for tensor in unit:
            if chunk is None or (chunk.spans and chunk.num_bytes + aligned(tensor.num_bytes) > size):
                chunk = Chunk(index=len(chunks), is_trained=unit[0].is_trained)
                chunks.append(chunk)
            chunk.spans.append(ChunkSpan(name=tensor.name, offset=chunk.num_bytes, num_bytes=tensor.num_bytes))
            if tensor.block not in chunk.blocks:
                chunk.blocks.append(tensor.block)
        assert chunk is not None, "a unit has tensors"
        open_chunks[kind] = chunk
    fitting = [chunk.num_bytes for chunk in chunks if chunk.num_bytes <= size]
    return ChunkLayout(slot_bytes=max(fitting, default=size), chunks=chunks)


Kind = tuple[bool, str]


def _kind(tensor: TensorInfo) -> Kind:
    return tensor.is_trained, tensor.dtype if tensor.is_trained else ""


def _units(tensors: Sequence[TensorInfo]) -> list[list[TensorInfo]]:
    """Group the tensors to keep together: neighbours of one block and kind."""
    units: dict[tuple[int, Kind], list[TensorInfo]] = {}
    run, last = 0, object()
    for tensor in tensors:
        run += tensor.block != last
        last = tensor.block
        units.setdefault((run, _kind(tensor)), []).append(tensor)
    return list(units.values())

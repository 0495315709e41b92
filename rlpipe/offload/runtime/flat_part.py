"""A part of a flattened tensor that torch's distributed checkpoint can write and read.

Checkpoints describe parts of tensors as boxes of indices, so a part is cut into the few boxes that it consists of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


@dataclass(kw_only=True, slots=True, frozen=True)
class Box:
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    def to_chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(offsets=torch.Size(self.offsets), sizes=torch.Size(self.sizes))


def boxes_of(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """Return boxes that together hold the elements from ``begin`` to ``end`` of a flattened tensor, in order.

    There are at most ``2 * len(shape) - 1`` of them; a scalar has one.
    """
    if begin >= end:
        return []
    if not shape:
        return [Box(offsets=(), sizes=())]
    found, row = [], math.prod(shape[1:])
    while begin < end:
        index, inside = divmod(begin, row)
        if inside or end - begin < row:  # not all of this row
            stop = min(end, (index + 1) * row)
            inner = boxes_of(shape[1:], inside, stop - index * row)
            found += [Box(offsets=(index, *box.offsets), sizes=(1, *box.sizes)) for box in inner]
        else:
            stop = end // row * row
            offsets = (index, *[0] * (len(shape) - 1))
            found.append(Box(offsets=offsets, sizes=(stop // row - index, *shape[1:])))
        begin = stop
    return found


class FlatPart(Tensor):
    """A tensor with the values of the part, whose memory it shares, and the size of the whole tensor.

    It is only for checkpoints: it has the methods that torch's distributed checkpoint requires of a sharded tensor.
    """

    _shape: torch.Size
    _boxes: list[Box]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, values: Tensor, *, begin: int, shape: Sequence[int]) -> Self:
        """Create a part of flat ``values`` that begin at index ``begin`` of the flattened tensor of this ``shape``."""
        part: Self = torch.Tensor._make_subclass(cls, values.detach())
        part._shape = torch.Size(shape)
        part._boxes = boxes_of(shape, begin, begin + len(values))
        return part

    def size(self, dim: int | None = None) -> Any:
        return self._shape if dim is None else self._shape[dim]

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, box.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box.to_chunk(), properties=properties, size=self._shape),
            )
            for box in self._boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [box.to_chunk() for box in self._boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        position = [box.offsets for box in self._boxes].index(tuple(index.offset))
        box = self._boxes[position]
        begin = sum(other.num_elements for other in self._boxes[:position])
        return self.as_subclass(Tensor)[begin : begin + box.num_elements].view(box.sizes)

"""AdamW on the host for the weights of a chunk, and the ranks' parts of it.

Checkpoints describe parts of tensors as boxes of indices, so a part is cut into the few boxes that it consists of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.hardware.host_memory import add_up
from rlpipe.offload.runtime.chunk import ChunkMemory
from rlpipe.weights.dcp import MOMENTS, STEPS


class Casts:
    """Conversion of gradients on the host to the optimizer's dtype, one at a time, in a buffer that is reused.

    Allocating new pages would take longer than the copy.
    """

    def __init__(self) -> None:
        self._buffer: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._buffer is None else self._buffer.nbytes

    def cast(self, gradient: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a gradient in ``dtype``, valid until the next call."""
        if gradient.dtype is dtype:
            return gradient
        num_bytes = len(gradient) * dtype.itemsize
        if self._buffer is None or self.num_bytes < num_bytes:
            self._buffer = None
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return self._buffer[:num_bytes].view(dtype).copy_(gradient)


class ChunkAdam:
    """Gradients, moments and update of this rank's part of a trained chunk.

    Torch's fused AdamW runs over views of flat tensors, one for each of the chunk's tensors. Tensors without a gradient
    in an update stay unchanged, as in torch.
    """

    def __init__(
        self, memory: ChunkMemory, config: OptimizerConfig, *, gradient_dtype: torch.dtype, casts: Casts
    ) -> None:
        assert memory.master is not None
        self.memory, self._casts = memory, casts
        master = memory.master
        self.gradient = torch.zeros(len(master), dtype=gradient_dtype, device=master.device)
        """Sum of this update's gradients so far."""
        self.has_gradient: dict[str, bool] = dict.fromkeys(memory.names, False)
        """Whether each tensor has a gradient; set by the training thread, ahead of the sum that the worker adds up."""
        self._squares: dict[str, Tensor] = {}
        """Squared norms of the sum so far, by tensor, on the host; computed along with it to save another read."""
        self._is_empty = True
        """Whether nothing was added yet; ``has_gradient`` leaves it open, since gradients may be other ranks' only."""
        self._moments = {name: torch.zeros_like(master) for name in MOMENTS}
        self.pieces = memory.pieces
        self._updated = {name: nn.Parameter(memory.part(name)) for name in self.pieces}
        self._steps = {name: torch.zeros((), device=master.device) for name in self.pieces}
        self._optimizer = torch.optim.AdamW(
            self._updated.values(),
            lr=config.peak_lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            weight_decay=config.weight_decay,
            fused=True,
        )
        for name, updated in self._updated.items():
            self._optimizer.state[updated] = self.state(name)

    @property
    def num_bytes(self) -> int:
        """Bytes of gradients, moments, and weights with a dtype of their own."""
        master = self.memory.master
        assert master is not None
        master_bytes = master.nbytes if self.memory.has_own_master else 0
        return self.gradient.nbytes + sum(moment.nbytes for moment in self._moments.values()) + master_bytes

    def expect(self, names: Iterable[str]) -> bool:
        """Note that gradients of the tensors ``names`` will be added, and return whether they are the first."""
        is_first, self._is_empty = self._is_empty, False
        self.has_gradient |= dict.fromkeys(names, True)
        return is_first

    def add(self, part: Tensor, *, is_first: bool) -> None:
        """Add this rank's part of a backward pass's gradients; the first one replaces the previous sum."""
        if self.gradient.is_cuda:
            self.gradient.copy_(part) if is_first else self.gradient.add_(part)
            return
        for name, piece in self.pieces.items():
            span = piece.in_part
            self._squares[name] = add_up(self.gradient[span], part[span], is_first=is_first)

    def take(self) -> list[str]:
        """Return the names of the tensors with gradients, for ``update``; later gradients are for the next update."""
        names = [name for name, is_set in self.has_gradient.items() if is_set]
        self.drop()
        return names

    def squared_norm(self) -> Tensor:
        """Return the squared norm of this rank's part of the gradients (scalar, float32)."""
        names = [name for name, is_set in self.has_gradient.items() if is_set]
        if not names:
            return torch.zeros((), device=self.gradient.device)
        if not self.gradient.is_cuda:
            return torch.stack([self._squares[name] for name in names]).sum().float()
        gradients = [self.gradient[self.pieces[name].in_part] for name in names]  # the gaps between them are undefined
        return torch.stack(list(torch._foreach_norm(gradients, dtype=torch.float32))).square().sum()

    def update(self, names: Iterable[str], learning_rate: float, scale: float) -> None:
        """Scale the gradients of the tensors ``names``, and update their weights."""
        (group,) = self._optimizer.param_groups
        group["lr"] = learning_rate
        master = self.memory.master
        assert master is not None
        # As with torch's GradScaler, the fused kernel divides by it, which saves a pass over the gradients.
        divisor = None if scale == 1 else torch.full((), scale, device=master.device).reciprocal_()
        self._optimizer.grad_scale = divisor  # type: ignore[attr-defined]
        for name in names:
            gradient = self.gradient[self.pieces[name].in_part]
            cast = gradient.to if self.memory.is_persistent else partial(self._casts.cast, gradient)
            self._updated[name].grad = cast(master.dtype)
            self._optimizer.step()
            self._updated[name].grad = None
        self.memory.spread()

    def drop(self) -> None:
        """Discard the gradients; an update that has begun keeps its own."""
        self.has_gradient = dict.fromkeys(self.has_gradient, False)
        self._is_empty = True

    def state(self, name: str) -> dict[str, Tensor]:
        """Return a tensor's number of updates, and this rank's part of its moments, flat and without a copy."""
        span = self.pieces[name].in_part
        return {STEPS: self._steps[name]} | {key: flat[span] for key, flat in self._moments.items()}

    def is_updated(self, name: str) -> bool:
        """Return whether a tensor was ever updated."""
        return bool(self._steps[name] > 0)

    def forget(self) -> None:
        """Reset everything but the weights to the state before the first update."""
        self.drop()
        for tensor in (*self._moments.values(), *self._steps.values()):
            tensor.zero_()


@dataclass(kw_only=True, slots=True, frozen=True)
class Box:
    """A box of a tensor's elements, given by its offsets and sizes in each dimension."""

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
    boxes, row = [], math.prod(shape[1:])
    while begin < end:
        index, inside = divmod(begin, row)
        if inside or end - begin < row:  # not all of this row
            stop = min(end, (index + 1) * row)
            inner = boxes_of(shape[1:], inside, stop - index * row)
            boxes += [Box(offsets=(index, *box.offsets), sizes=(1, *box.sizes)) for box in inner]
        else:
            stop = end // row * row
            offsets = (index, *[0] * (len(shape) - 1))
            boxes.append(Box(offsets=offsets, sizes=(stop // row - index, *shape[1:])))
        begin = stop
    return boxes


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
        begin = sum(earlier.num_elements for earlier in self._boxes[:position])
        return self.as_subclass(Tensor)[begin : begin + box.num_elements].view(box.sizes)

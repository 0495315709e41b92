"""Counts of the live tensors' bytes and of the operators' work while a model runs, also on fake tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

Observe = Callable[["Operator"], None]


@dataclass(slots=True, frozen=True)
class Operator:
    """An operator that has run."""

    name: str
    flops: int
    num_bytes: int
    """Bytes read and written; 0 for views."""
    dtype: torch.dtype


class TensorTracker(TorchDispatchMode):
    """Mode that counts the bytes of the tensors that operators make: ``live`` at the moment, and ``peak`` at most.

    Tensors that existed before, such as weights, do not count. ``observe`` is called with every operator after it has
    run.
    """

    def __init__(self, observe: Observe | None = None) -> None:
        super().__init__()
        self._observe = observe
        self._known: set[int] = set()
        self.live = 0
        self.peak = 0

    def ignore(self, tensor: Tensor) -> None:
        """Leave a tensor out of the count, such as one on the host."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            weakref.finalize(storage, self._known.discard, storage._cdata)

    def counts(self, tensor: Tensor) -> bool:
        """Return whether a tensor was made within the mode."""
        return tensor.untyped_storage()._cdata in self._known

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = func(*args, **kwargs)
        outputs = _tensors(result)
        fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in before]
        for tensor in fresh:
            self._count(tensor)
        self.peak = max(self.peak, self.live)
        if self._observe is not None:
            self._observe(self._describe(func, args, kwargs, result, outputs, is_view=not fresh and not _writes(func)))
        return result

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.live += num_bytes
        weakref.finalize(storage, self._drop, key, num_bytes)

    def _drop(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes

    def _describe(
        self, func: Any, args: Any, kwargs: Any, result: Any, outputs: list[Tensor], *, is_view: bool
    ) -> Operator:
        packet = func._overloadpacket
        flops = int(flop_registry[packet](*args, **kwargs, out_val=result)) if packet in flop_registry else 0
        touched = [] if is_view else [*_tensors((args, kwargs)), *outputs]
        return Operator(
            name=str(packet),
            flops=flops,
            num_bytes=sum(tensor.numel() * tensor.element_size() for tensor in touched),
            dtype=outputs[0].dtype if outputs else torch.float32,
        )


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _writes(func: Any) -> bool:
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments)

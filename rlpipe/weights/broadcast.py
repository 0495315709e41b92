"""Broadcast of weights from the first learner rank directly to the engines' workers, over gloo.

Between GPUs, vLLM's NCCL transfer is used instead (``rlpipe.learner.nccl_broadcast``). In both cases a ``Transfer``
gives both sides the address and the tensors to expect.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlpipe.types import Transfer


def listen(address: str) -> dist.TCPStore:
    """Open the store on the learner that the other processes connect to."""
    return dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)


@dataclass(slots=True)
class GlooGroup:
    """A process group separate from torch's default one; the learner is rank 0."""

    group: Any

    @staticmethod
    def join(transfer: Transfer, rank: int, timeout_s: float, store: dist.TCPStore | None = None) -> GlooGroup:
        """Join the group of a transfer; the learner passes its own ``store``, which already listens."""
        limit = timedelta(seconds=timeout_s)
        if store is None:
            store = dist.TCPStore(transfer.address, transfer.port, is_master=False, timeout=limit)
        return GlooGroup(dist.ProcessGroupGloo(store, rank, transfer.num_processes, limit))

    def send(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        for _, tensor in tensors:
            self._broadcast(tensor.cpu().contiguous())

    def receive(self, transfer: Transfer) -> Iterator[tuple[str, Tensor]]:
        for outline in transfer.outlines:
            tensor = torch.empty(outline.shape, dtype=getattr(torch, outline.dtype))
            self._broadcast(tensor)
            yield outline.name, tensor

    def _broadcast(self, tensor: Tensor) -> None:
        self.group.broadcast([tensor], dist.BroadcastOptions()).wait()

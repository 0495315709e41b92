"""Updates of trained chunks: on the device at once, on the host one by one in the order of their next use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.offload.runtime.chunk import ChunkMemory
from rlpipe.offload.runtime.chunk_adam import Casts, ChunkAdam
from rlpipe.offload.runtime.chunk_ranks import ChunkRanks
from rlpipe.offload.runtime.gradients import Gradients
from rlpipe.offload.runtime.streams import Queues


class ChunkOptimizer:
    """AdamW with exact clipping for chunks, whose updates on the host overlap with the next forward pass.

    The norm is known only after the last gradient. Each update is given the learning rate and scale of its step when it
    is submitted.
    """

    def __init__(
        self,
        memories: Mapping[int, ChunkMemory],
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        device: torch.device,
        gradient_dtype: torch.dtype,
        ranks: ChunkRanks,
        queues: Queues,
        drop: Callable[[int], None],
    ) -> None:
        """Create the optimizer of trained chunks; ``drop`` frees the slots of a chunk that is about to change."""
        self._ranks, self._drop, self._device = ranks, drop, device
        self.casts = Casts()
        self.adams = {
            index: ChunkAdam(memory, config, gradient_dtype=gradient_dtype, casts=self.casts)
            for index, memory in memories.items()
        }
        self._worker = queues.worker
        self._updates: dict[int, Future[None]] = {}
        self.gradients = Gradients(self.adams, parameters, device=device, ranks=ranks, queues=queues)

    def squared_norm(self) -> Tensor:
        """Return the squared norm of this rank's part of the gradients (scalar, float32).

        If every rank holds all gradients, only the first counts them, and the others return 0.
        """
        self.gradients.finish(self.gradients.unfinished)
        self.gradients.settle()
        self._agree()
        for index in self._changing():
            self.await_update(index)
        norms = [adam.squared_norm().to(self._device) for adam in self.adams.values()]
        total = torch.stack(norms).sum() if norms else torch.zeros((), device=self._device)
        counts = self._ranks.num_parts > 1 or self._ranks.rank == 0
        return total if counts else torch.zeros_like(total)

    def _agree(self) -> None:
        """Mark the tensors that had a gradient on any rank as having one on all."""
        if self._ranks.num_ranks == 1 or not self.adams:
            return
        flags = [has for adam in self.adams.values() for has in adam.has_gradient.values()]
        counts = iter(self._ranks.sum(torch.tensor(flags, dtype=torch.int32, device=self._device)).tolist())
        for adam in self.adams.values():
            adam.has_gradient = {name: next(counts) > 0 for name in adam.has_gradient}

    def _changing(self) -> list[int]:
        return [index for index, adam in self.adams.items() if any(adam.has_gradient.values())]

    def apply(self, learning_rate: float, scale: float) -> None:
        """Begin the update of all chunks, after ``squared_norm``; ``await_update`` waits for a chunk's.

        The updates keep their gradients: those of the next update may arrive or be dropped while they run.
        """
        for index in self._changing():
            adam = self.adams[index]
            if adam.memory.is_persistent:
                adam.update(adam.take(), learning_rate, scale)
            else:
                self._drop(index)
                assert index not in self._updates, "squared_norm waits for the update before"
                self._updates[index] = self._worker.submit(adam.update, adam.take(), learning_rate, scale)

    def await_update(self, index: int) -> None:
        """Wait for a chunk's update, if one is running; raise what it raised."""
        update = self._updates.pop(index, None)
        if update is not None:
            update.result()

    def is_updated(self, index: int) -> bool:
        """Return whether ``await_update`` returns at once; if ranks hold parts, only if all of them know that."""
        if index not in self._updates:
            return True
        # Ranks that hold parts must gather in the same order, which may not depend on the progress of their hosts.
        return self._ranks.num_parts == 1 and self._updates[index].done()

    def flush(self) -> None:
        """Wait for all updates."""
        for index in list(self._updates):
            self.await_update(index)

    def drop(self) -> None:
        """Drop the gradients that are not applied; updates that have begun go on."""
        self.gradients.drop()

    def close(self) -> None:
        """Finish the updates, and drop the gradients that are not applied.

        Raises what an update raises; may be called again then.
        """
        self.flush()
        self.gradients.close()
        self._worker.shutdown()
        self.adams.clear()  # frees their memory

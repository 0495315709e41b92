"""Updates of a policy in chunks: resident parameters by torch's optimizers, the rest by the chunks' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.learner.strategies.optimizer_backend import TorchUpdates
from rlpipe.offload.runtime.chunk_state import chunk_state, load_chunk_state
from rlpipe.offload.runtime.runtime import OffloadedModel
from rlpipe.weights.dcp import Read


class ChunkedUpdates:
    def __init__(
        self,
        offloaded: OffloadedModel,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        measured: Callable[[float, int], None],
    ) -> None:
        """Set up the updates; ``apply`` calls ``measured`` with the update's seconds and number of micro batches."""
        self._measured = measured
        self._offloaded, self._chunks = offloaded, offloaded.optimizer
        places = {name: offloaded.place_of(parameter) for name, parameter in parameters.items()}
        self._names = {place: name for name, place in places.items() if place is not None}
        """Name of each parameter in chunks, by its chunk and its name there."""
        resident = {name: parameters[name] for name, place in places.items() if place is None}
        self._resident = TorchUpdates(resident, config, local=lambda tensor: tensor) if resident else None
        self._learning_rate = config.lr

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        if self._resident is not None:
            self._resident.set_learning_rate(learning_rate)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def squared_norm(self) -> Tensor:
        return self._chunks.squared_norm() + self._offloaded.resident_squared_norm()

    def apply(self, scale: float) -> None:
        self._measured(*self._offloaded.end_update())
        if self._resident is not None:
            self._resident.apply(scale)
        self._chunks.apply(self._learning_rate, scale)

    def drop(self) -> None:
        self._offloaded.end_update()
        if self._resident is not None:
            self._resident.drop()
        self._chunks.drop()

    def state(self) -> dict[str, Tensor]:
        """Return this rank's parameters and moments, without copies."""
        resident = {} if self._resident is None else self._resident.state()
        return resident | chunk_state(self._offloaded, self._names)

    def load_state(self, stored: Mapping[str, torch.Size], read: Read) -> None:
        if self._resident is not None:
            self._resident.load_state(stored, read)
        load_chunk_state(self._offloaded, self._names, stored, read)

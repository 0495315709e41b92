"""Updates of a policy in chunks: of what is resident by torch's optimizers, of the rest by the chunks' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rlpipe.configs.schema_learner import OptimizerConfig
from rlpipe.learner.moments import MOMENTS, STEPS
from rlpipe.learner.sharding import Read
from rlpipe.learner.updates import TorchUpdates
from rlpipe.offload.runtime import OffloadedModel


class ChunkedUpdates:
    def __init__(
        self,
        offloaded: OffloadedModel,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        measured: Callable[[float, int], None],
    ) -> None:
        """``measured`` is told of every update's seconds and micro batches."""
        self._measured = measured
        self._offloaded, self._chunks = offloaded, offloaded.optimizer
        places = {name: offloaded.place_of(parameter) for name, parameter in parameters.items()}
        self._names = {place: name for name, place in places.items() if place is not None}
        """Of the parameters in chunks, by chunk and name there."""
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
        """Of chunks that ranks share, each tensor whole, on the rank whose turn it is.

        What one rank has on the host is not copied; whole tensors are, so that what they were gathered in can go.
        """
        held = {} if self._resident is None else self._resident.state()
        ranks = self._offloaded.ranks
        for index, adam in self._chunks.adams.items():
            self._chunks.await_update(index)
            weights, states = adam.memory.values(), adam.state()
            for turn, local in enumerate(weights):
                if turn % ranks.num_ranks != ranks.rank:
                    continue
                name = self._names[index, local]
                held[f"policy.{name}"] = weights[local].to("cpu", copy=ranks.num_parts > 1)
                for key, moment in states.get(local, {}).items():
                    held[f"optimizer.{name}.{key}"] = moment.to("cpu", copy=ranks.num_parts > 1)
        return held

    def load_state(self, stored: Mapping[str, torch.Size], read: Read) -> None:
        if self._resident is not None:
            self._resident.load_state(stored, read)
        self._chunks.flush()
        for index, adam in self._chunks.adams.items():
            self._offloaded.drop_chunk(index)
            tensors: dict[str, Tensor] = {}
            for local in adam.pieces:
                name = self._names[index, local]
                keys = [f"policy.{name}", *(f"optimizer.{name}.{key}" for key in (*MOMENTS, STEPS))]
                tensors |= {key: torch.zeros(stored[key]) for key in keys if key in stored}
            read(tensors)
            names = {local: self._names[index, local] for local in adam.pieces}
            adam.load(
                {local: tensors[f"policy.{name}"] for local, name in names.items()},
                {
                    local: {key: tensors[f"optimizer.{name}.{key}"] for key in (*MOMENTS, STEPS)}
                    for local, name in names.items()
                    if f"optimizer.{name}.{STEPS}" in tensors
                },
            )

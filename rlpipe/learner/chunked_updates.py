"""Updates of a policy in chunks: of what is resident by torch's optimizers, of the rest by the chunks' own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn

from rlpipe.configs.schema_learner import OptimizerConfig
from rlpipe.learner.flat_part import FlatPart
from rlpipe.learner.moments import STEPS
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
        """What this rank has, without copies."""
        held = {} if self._resident is None else self._resident.state()
        for index, adam in self._chunks.adams.items():
            self._chunks.await_update(index)
            for local in adam.pieces:
                held |= self._stored(index, local, moments=adam.is_updated(local))
        return held

    def load_state(self, stored: Mapping[str, torch.Size], read: Read) -> None:
        if self._resident is not None:
            self._resident.load_state(stored, read)
        self._chunks.flush()
        for index, adam in self._chunks.adams.items():
            self._offloaded.drop_chunk(index)
            adam.forget()
            own = [self._stored(index, local, moments=True) for local in adam.pieces]
            read({name: tensor for tensors in own for name, tensor in tensors.items() if name in stored})
            adam.memory.spread()

    def _stored(self, index: int, local: str, *, moments: bool) -> dict[str, Tensor]:
        """This rank's part of a parameter, and of its moments, by their names in checkpoints; shares memory."""
        adam, name = self._chunks.adams[index], self._names[index, local]
        piece = adam.pieces[local]
        cut = partial(FlatPart, begin=piece.in_tensor.start, shape=piece.shape)
        held: dict[str, Tensor] = {f"policy.{name}": cut(adam.memory.part(local))}
        if moments:
            state = adam.state(local)
            held[f"optimizer.{name}.{STEPS}"] = state.pop(STEPS)
            held |= {f"optimizer.{name}.{key}": cut(moment) for key, moment in state.items()}
        return held

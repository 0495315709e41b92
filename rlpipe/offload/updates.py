"""Updates of an offloaded model by AdamW, and how their time and memory compare with the plan's prediction."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import psutil
import torch
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.offload.runtime.chunk_adam import FlatPart
from rlpipe.offload.runtime.runtime import OffloadedModel
from rlpipe.weights.dcp import MOMENTS, STEPS, Read, moment_key, weight_key

COMPARED_UPDATE = 3
"""Update, counted from 1, whose time and memory are compared with the prediction."""


class ChunkedUpdates:
    """Updates of parameters in chunks, and of those that are always on the device; only matrices have weight decay."""

    def __init__(
        self,
        offloaded: OffloadedModel,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        show_message: Callable[[str], None],
        resets_peak: bool = False,
    ) -> None:
        """Set up the updates of trained ``parameters``, by name.

        ``show_message`` gets a line that compares the third update with its prediction, if there is one.
        ``resets_peak`` resets the device's peak memory before that update, so that loading does not count; it is
        torch's peak, of which the process has only one.
        """
        self._show_message, self._resets_peak = show_message, resets_peak
        self._num_updates = 0
        self._offloaded, self._chunks = offloaded, offloaded.optimizer
        chunks = {name: offloaded.chunk_of(parameter) for name, parameter in parameters.items()}
        self._names = {chunk: name for name, chunk in chunks.items() if chunk is not None}
        """Name of each parameter in chunks, by its chunk and its name there."""
        self._resident = {name: parameter for name, parameter in parameters.items() if chunks[name] is None}
        matrices = [parameter for parameter in self._resident.values() if parameter.ndim > 1]
        vectors = [parameter for parameter in self._resident.values() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": [torch.zeros(0)]}],
            lr=config.peak_lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )
        self._learning_rate = config.peak_lr

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        for group in self._adam.param_groups:
            group["lr"] = learning_rate

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def squared_norm(self) -> Tensor:
        return self._chunks.squared_norm() + self._offloaded.resident_squared_norm()

    def apply(self, scale: float) -> None:
        self._compare()
        for parameter in self._resident.values():
            if parameter.grad is not None and scale != 1:
                parameter.grad.mul_(scale)
        self._adam.step()
        self._chunks.apply(self._learning_rate, scale)
        self._adam.zero_grad()

    def _compare(self) -> None:
        seconds, num_micro_batches = self._offloaded.end_update()
        self._num_updates += 1
        decision, device = self._offloaded.decision, self._offloaded.device
        on_gpu = device.type == "cuda"
        if self._num_updates == COMPARED_UPDATE - 1 and self._resets_peak and on_gpu:
            torch.cuda.reset_peak_memory_stats(device)
        if self._num_updates != COMPARED_UPDATE or decision is None or decision.prediction is None:
            return
        comparison = decision.compare(
            seconds,
            num_micro_batches,
            device_bytes=torch.cuda.max_memory_allocated(device) if on_gpu else None,
            host_bytes=self._offloaded.host_bytes,
            process_bytes=psutil.Process().memory_info().rss,
        )
        self._show_message(comparison)

    def drop(self) -> None:
        self._offloaded.end_update()
        self._adam.zero_grad()
        self._chunks.drop()

    @property
    def names(self) -> set[str]:
        """Names of the trained parameters."""
        return {*self._resident, *self._names.values()}

    def state(self) -> dict[str, Tensor]:
        """Return this rank's parameters and moments, without copies; wait for running updates."""
        tensors = self._resident_state()
        for index, adam in self._chunks.adams.items():
            self._chunks.await_update(index)
            for local in adam.pieces:
                tensors |= self._chunk_state(index, local, moments=adam.is_updated(local))
        return tensors

    def load_state(self, stored: Collection[str], read: Read) -> None:
        """Load the state that is ``stored`` under these names, which must include all weights.

        Weights without stored moments count as not updated yet. Gradients that were not applied are dropped. All ranks
        must call it.
        """
        self._adam.state.clear()
        for name, parameter in self._resident.items():
            if moment_key(name, STEPS) in stored:
                moments = {key: torch.zeros_like(parameter) for key in MOMENTS}
                self._adam.state[parameter] = {STEPS: torch.zeros((), device=parameter.device), **moments}
        read(self._resident_state())
        self._chunks.flush()
        for index, adam in self._chunks.adams.items():
            self._offloaded.drop_chunk(index)
            adam.forget()
            states = [self._chunk_state(index, local, moments=True) for local in adam.pieces]
            read({name: tensor for tensors in states for name, tensor in tensors.items() if name in stored})
            adam.memory.spread()

    def _resident_state(self) -> dict[str, Tensor]:
        weights = {weight_key(name): parameter.detach() for name, parameter in self._resident.items()}
        return weights | {
            moment_key(name, key): moment
            for name, parameter in self._resident.items()
            for key, moment in self._adam.state.get(parameter, {}).items()
        }

    def _chunk_state(self, index: int, local: str, *, moments: bool) -> dict[str, Tensor]:
        adam, name = self._chunks.adams[index], self._names[index, local]
        piece = adam.pieces[local]

        def cut(flat: Tensor) -> Tensor:
            return FlatPart(flat, begin=piece.in_tensor.start, shape=piece.shape)

        tensors = {weight_key(name): cut(adam.memory.part(local))}
        if moments:
            state = adam.state(local)
            tensors |= {moment_key(name, key): cut(state[key]) for key in MOMENTS}
            tensors[moment_key(name, STEPS)] = state[STEPS]
        return tensors

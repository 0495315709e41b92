"""A training loop's optimizer for an offloaded model, with updates that are clipped to a global norm."""

from __future__ import annotations

import logging
import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.errors import ConfigError
from rlpipe.offload.comparison import Comparison
from rlpipe.offload.runtime.chunk_adam import MOMENTS, STEPS
from rlpipe.offload.runtime.chunk_state import chunk_state, load_chunk_state
from rlpipe.offload.runtime.runtime import OffloadedModel
from rlpipe.weights.dcp import moment_key, read_tensors, stored_shapes, weight_key, write_tensors

logger = logging.getLogger(__name__)


class OffloadedAdamW:
    """AdamW for an offloaded model, to use after one or several calls of ``loss.backward()``.

    Gradients are summed over the ranks, so each loss must be a share of the whole batch's. Only matrices have weight
    decay.
    """

    def __init__(self, offloaded: OffloadedModel, config: OptimizerConfig) -> None:
        self._offloaded, self._config = offloaded, config
        self._comparison = Comparison(offloaded.decision, offloaded.device) if offloaded.decision else None
        named = dict(offloaded.model.named_parameters()).items()
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        places = {name: offloaded.place_of(parameter) for name, parameter in trained.items()}
        self._names = {place: name for name, place in places.items() if place is not None}
        self._resident = {name: parameter for name, parameter in trained.items() if places[name] is None}
        matrices = [parameter for parameter in self._resident.values() if parameter.ndim > 1]
        vectors = [parameter for parameter in self._resident.values() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": [torch.zeros(0)]}],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )

    def step(self, *, max_norm: float | None = None, learning_rate: float | None = None) -> float:
        """Update the weights, and return the gradients' global norm; if that is not finite, only drop the gradients.

        All ranks must call it.
        """
        self._offloaded.check_open()
        self._compare()
        chunks, rate = self._offloaded.optimizer, self._config.lr if learning_rate is None else learning_rate
        squared = chunks.squared_norm() + self._offloaded.resident_squared_norm()
        norm = math.sqrt(float(self._offloaded.ranks.sum(squared)))
        if not math.isfinite(norm):
            self.zero_grad()
            return norm
        scale = 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))
        for parameter in self._resident.values():
            if parameter.grad is not None and scale != 1:
                parameter.grad.mul_(scale)
        for group in self._adam.param_groups:
            group["lr"] = rate
        self._adam.step()
        chunks.apply(rate, scale)
        self._adam.zero_grad()
        return norm

    def _compare(self) -> None:
        seconds, num_micro_batches = self._offloaded.end_update()
        if self._comparison is None:
            return
        if found := self._comparison.updated(seconds, num_micro_batches, self._offloaded.host_bytes):
            logger.info("offload: %s", found)

    def zero_grad(self) -> None:
        self._offloaded.check_open()
        self._offloaded.optimizer.drop()
        self._adam.zero_grad()

    def save(self, folder: Path) -> None:
        """Write the trained weights and their moments as a torch distributed checkpoint; all ranks must call it.

        Any number of ranks can load it, however their chunks are arranged. Gradients that were not applied are not part
        of it. Raises ``OSError`` if it can't be written.
        """
        self._offloaded.check_open()
        resident = self._resident_state()
        write_tensors(
            folder, resident | chunk_state(self._offloaded, self._names), num_ranks=self._offloaded.ranks.num_ranks
        )

    def load(self, folder: Path) -> None:
        """Load what ``save`` wrote of the same model, and drop gradients; all ranks must call it.

        Raises ``ConfigError`` if other parameters were trained.
        """
        self.zero_grad()
        stored = stored_shapes(folder)
        weights = {weight_key(name) for name in (*self._resident, *self._names.values())}
        if other := sorted(weights ^ {name for name in stored if name.startswith(weight_key(""))}):
            raise ConfigError(
                f"{folder} trains other parameters than this model ({len(other)} differ, such as {other[0]})"
            )
        self._adam.state.clear()
        for name, parameter in self._resident.items():
            if moment_key(name, STEPS) in stored:
                moments = {key: torch.zeros_like(parameter) for key in MOMENTS}
                self._adam.state[parameter] = {STEPS: torch.zeros((), device=parameter.device), **moments}
        read_tensors(folder, self._resident_state())
        load_chunk_state(self._offloaded, self._names, stored, partial(read_tensors, folder))

    def _resident_state(self) -> dict[str, Tensor]:
        held = {weight_key(name): parameter.detach() for name, parameter in self._resident.items()}
        return held | {
            moment_key(name, key): moment
            for name, parameter in self._resident.items()
            for key, moment in self._adam.state.get(parameter, {}).items()
        }

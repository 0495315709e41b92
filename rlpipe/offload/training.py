"""A training loop's optimizer for an offloaded model: one update of all that is trained, clipped to a global norm."""

from __future__ import annotations

import logging
import math

import torch

from rlpipe.configs.schema_learner import OptimizerConfig
from rlpipe.offload.comparison import Comparison
from rlpipe.offload.runtime import OffloadedModel

logger = logging.getLogger(__name__)


class OffloadedAdamW:
    """For use after ``loss.backward()``, which may come several times before a step.

    Gradients are summed over the ranks: losses are shares of the whole batch's. Only matrices decay.
    """

    def __init__(self, offloaded: OffloadedModel, config: OptimizerConfig) -> None:
        self._offloaded, self._config = offloaded, config
        self._comparison = Comparison(offloaded.decision, offloaded.device) if offloaded.decision else None
        self._resident = [parameter for parameter in offloaded.resident.values() if parameter.requires_grad]
        matrices = [parameter for parameter in self._resident if parameter.ndim > 1]
        vectors = [parameter for parameter in self._resident if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(
            [group for group in groups if group["params"]] or [{"params": [torch.zeros(0)]}],
            lr=config.lr,
            betas=(config.betas[0], config.betas[1]),
            eps=config.eps,
            fused=True,
        )

    def step(self, *, max_norm: float | None = None, learning_rate: float | None = None) -> float:
        """Updates, and returns the gradients' global norm; leaves all as it is where that is not finite.

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
        for parameter in self._resident:
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

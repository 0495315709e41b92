"""The optimizer, its learning rate over the run, and exact clipping to a global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rlpipe.configs.schema import OptimizerConfig, ScheduleConfig
from rlpipe.learner.sharding import Sharding


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; only matrices decay, as decay has no meaning for norms and biases."""
    trained = list(parameters)
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.lr,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        fused=True,
    )


def learning_rate_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """Share of the peak learning rate at ``step``, counted from 0, of ``num_steps``; all updates of a step share it."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    shape = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[config.name]
    return config.min_ratio + (1 - config.min_ratio) * shape


def squared_norm(gradients: Sequence[Tensor], sharding: Sharding) -> Tensor:
    """The sum of squares of this rank's parts of the gradients (scalar, float32)."""
    norms = torch._foreach_norm([sharding.local(gradient) for gradient in gradients], dtype=torch.float32)
    return torch.stack(list(norms)).square().sum()


def clip(gradients: Sequence[Tensor], sharding: Sharding, *, norm: float, max_norm: float) -> None:
    """Scales the gradients, whose global norm is ``norm``, to ``max_norm`` if they are above it."""
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        torch._foreach_mul_([sharding.local(gradient) for gradient in gradients], scale)

"""The optimizer, its learning rate over the run, and clipping to a global norm."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from rlpipe.configs.schema.learner_config import OptimizerConfig, ScheduleConfig


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.Optimizer:
    """Make an AdamW optimizer; only matrices decay, because decay has no meaning for norms and biases."""
    trained = list(parameters)
    matrices = [parameter for parameter in trained if parameter.ndim > 1]
    others = [parameter for parameter in trained if parameter.ndim <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": config.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    options: dict[str, Any] = {"lr": config.lr, "betas": (config.betas[0], config.betas[1]), "eps": config.eps}
    filled = [group for group in groups if group["params"]]
    if config.name == "adamw":
        return torch.optim.AdamW(filled, **options, fused=True)
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    made: torch.optim.Optimizer = (AdamW8bit if config.name == "adamw_8bit" else PagedAdamW8bit)(filled, **options)
    return made


def learning_rate_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """Return the fraction of the peak learning rate for all updates of ``step``, counted from 0, of ``num_steps``."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps))
    shape = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}[config.name]
    return config.min_ratio + (1 - config.min_ratio) * shape


def clipping_scale(norm: float, max_norm: float | None) -> float:
    """Return the factor that clips gradients of global norm ``norm`` to at most ``max_norm`` (as torch clips)."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6))

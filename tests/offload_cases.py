"""Tiny models, and training them plainly and offloaded, for the tests of chunked offload."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlpipe.configs.schema_learner import OptimizerConfig
from rlpipe.learner.optimizer import make_optimizer
from rlpipe.offload.profile import Mode
from rlpipe.offload.runtime import Arrangement, OffloadedModel
from rlpipe.offload.units import find_units

Loss = Callable[[nn.Module, int], Tensor]
"""Of a model and the number of a micro batch."""
CPU = torch.device("cpu")


def make_qwen(*, num_layers: int = 4, tied: bool = False, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=97,
        hidden_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=128,
        tie_word_embeddings=tied,
        **options,
    )
    return Qwen3ForCausalLM(config).train()


def token_loss(model: nn.Module, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 97, (2, 9), generator=generator)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def modes_for(model: nn.Module, *cycle: Mode) -> list[Mode]:
    """The modes in turn for the model's blocks."""
    modes, count = [], 0
    for unit in find_units(model):
        modes.append(cycle[count % len(cycle)] if unit.is_block else Mode.KEEP)
        count += unit.is_block
    return modes


def train_plainly(
    model: nn.Module,
    loss_of: Loss,
    config: OptimizerConfig,
    *,
    num_steps: int,
    num_micro_batches: int,
    max_norm: float,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Losses, norms, and trained parameters."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = make_optimizer(trained.values(), config)
    losses, norms = [], []
    for step in range(num_steps):
        for index in range(num_micro_batches):
            loss = loss_of(model, step * num_micro_batches + index)
            loss.backward()
            losses.append(float(loss.detach()))
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach().clone() for name, parameter in trained.items()}


def train_offloaded(
    offloaded: OffloadedModel,
    loss_of: Loss,
    config: OptimizerConfig,
    *,
    num_steps: int,
    num_micro_batches: int,
    max_norm: float,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    model = offloaded.model
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    resident = [parameter for parameter in offloaded.resident.values() if parameter.requires_grad]
    optimizer = make_optimizer(resident, config) if resident else None
    losses, norms = [], []
    for step in range(num_steps):
        for index in range(num_micro_batches):
            loss = loss_of(model, step * num_micro_batches + index)
            loss.backward()
            losses.append(float(loss.detach()))
        own = sum(float(p.grad.square().sum()) for p in resident if p.grad is not None)
        norm = float(offloaded.optimizer.squared_norm() + own) ** 0.5
        scale = min(1.0, max_norm / (norm + 1e-6))
        for parameter in resident:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
        offloaded.optimizer.apply(config.lr, scale)
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
        norms.append(norm)
    return losses, norms, {name: offloaded.values(parameter).clone() for name, parameter in trained.items()}


def arrange_all(model: nn.Module, *cycle: Mode, num_persistent: int = 0, num_slots: int = 2) -> Arrangement:
    return Arrangement(num_persistent=num_persistent, num_slots=num_slots, modes=modes_for(model, *cycle))

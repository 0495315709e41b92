"""A simple GRPO implementation in plain PyTorch, the reference for every strategy of the learner."""

from __future__ import annotations

from pathlib import Path

import torch
from learner_cases import make_rollouts
from peft import get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from rlpipe.configs.schema.model_config import AdapterConfig
from rlpipe.learner.policy import lora_config
from rlpipe.models.nf4 import to_nf4_and_back
from rlpipe.types import Rollout

TEMPERATURE, CLIP, CAP = 0.9, 0.2, 2.0


def load_plain(path: Path, adapter: AdapterConfig) -> nn.Module:
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    torch.manual_seed(0)
    if adapter.kind == "none":
        return model
    if adapter.kind == "qlora":
        to_nf4_and_back(model)
    return get_peft_model(model, lora_config(adapter, model))


def rollout_loss(model: nn.Module, rollout: Rollout, entropy_coef: float = 0.0) -> Tensor:
    """Return the loss of one rollout run alone, summed over its tokens, less their weighted entropies."""
    token_ids = torch.from_numpy(rollout.token_ids).long()
    mask = torch.from_numpy(rollout.loss_mask)[1:]
    logits = model(token_ids[None]).logits[0, :-1] / TEMPERATURE
    log_p = logits.log_softmax(-1)[mask]
    logprobs = log_p.gather(1, token_ids[1:, None][mask]).squeeze(1)
    sampling = torch.from_numpy(rollout.logprobs)[1:][mask]
    advantages = torch.from_numpy(rollout.advantages)[1:][mask]
    weight = (logprobs.detach() - sampling).exp().clamp(1 / CAP, CAP)
    ratio = (logprobs - logprobs.detach()).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    entropy = -(log_p.exp() * log_p).sum()
    return -(weight * surrogate).sum() - entropy_coef * entropy


def train_plain(
    path: Path,
    adapter: AdapterConfig,
    *,
    num_steps: int,
    learning_rate: float,
    max_norm: float,
    entropy_coef: float = 0.0,
) -> tuple[list[float], list[float], dict[str, Tensor]]:
    """Train, and return the losses, the gradient norms, and the trained parameters."""
    model = load_plain(path, adapter)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=learning_rate, weight_decay=0.0)
    losses, norms = [], []
    for step in range(num_steps):
        rollouts = make_rollouts(seed=step)
        num_tokens = sum(int(rollout.loss_mask.sum()) for rollout in rollouts)
        loss = torch.stack([rollout_loss(model, rollout, entropy_coef) for rollout in rollouts]).sum() / num_tokens
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, {name: parameter.detach().clone() for name, parameter in trained.items()}

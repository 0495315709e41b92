"""The lm_head of a transformers model with its LoRA, logit scale and softcap, to compute log-probs and logits.

Shapes: T tokens, H hidden size, V vocabulary, r rank of all LoRA of the lm_head together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from peft.tuners.lora import Linear as LoraLinear
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlpipe.errors import ModelError
from rlpipe.kernels.logprob import linear_logits, linear_logprob

LOGIT_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
LOGIT_DIVISORS = ("logits_scaling",)
LOGIT_CAP = "final_logit_softcapping"
LOGIT_CHANGES = ("logits_soft_cap", "output_logit_soft_cap", "logits_mup_width_multiplier")
"""Config names of logit changes that ``Head`` does not implement; models that set one are refused."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Head:
    """The lm_head's weights and settings; its tensors are the model's own, so it is read anew for each use."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    down: Tensor | None  # [r, H], with the LoRA's scale
    up: Tensor | None  # [V, r]
    scale: float
    softcap: float | None
    dtype: torch.dtype
    """Dtype of the matrix products."""

    @classmethod
    def read(cls, model: PreTrainedModel, dtype: torch.dtype) -> Head:
        """Read the lm_head of a model, with its LoRA unless that is disabled."""
        head = model.get_output_embeddings()
        base = cast(nn.Linear, head.base_layer if isinstance(head, LoraLinear) else head)
        pairs = _adapters(head) if isinstance(head, LoraLinear) else []
        return cls(
            weight=base.weight,
            bias=base.bias,
            down=torch.cat([down for down, _ in pairs]) if pairs else None,
            up=torch.cat([up for _, up in pairs], 1) if pairs else None,
            scale=logit_scale(model),
            softcap=logit_cap(model),
            dtype=dtype,
        )

    def logprobs(self, hidden: Tensor, targets: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
        """Return log-probs and entropies of targets ``[T]`` of states ``[T, H]``; see ``linear_logprob``."""
        return linear_logprob(targets=targets, **self._inputs(hidden), **options)

    def logits(self, hidden: Tensor, temperature: float) -> Tensor:
        """Return logits ``[T, V]`` of ``[T, H]`` over the temperature, in at least float32, without gradient."""
        return linear_logits(temperature=temperature, **self._inputs(hidden))

    def _inputs(self, hidden: Tensor) -> dict[str, Any]:
        hidden = hidden.to(self.dtype)
        return {
            "hidden": hidden,
            "weight": self.weight.to(self.dtype),
            "bias": self.bias,
            "states": None if self.down is None else nn.functional.linear(hidden, self.down.to(self.dtype)),
            "up": None if self.up is None else self.up.to(self.dtype),
            "scale": self.scale,
            "softcap": self.softcap,
        }


def _adapters(head: LoraLinear) -> list[tuple[Tensor, Tensor]]:
    """Return the matrices ``[r, H]``, scaled, and ``[V, r]`` of each active LoRA."""
    if head.disable_adapters or head.merged:
        return []
    active = [name for name in head.active_adapters if name in head.lora_A]
    down, up = cast(dict[str, nn.Linear], head.lora_A), cast(dict[str, nn.Linear], head.lora_B)
    return [(down[name].weight * head.scaling[name], up[name].weight) for name in active]


def check_adapter(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` if the lm_head has a LoRA that is more than a product of two matrices."""
    head = model.get_output_embeddings()
    if not isinstance(head, LoraLinear):
        return
    options = {
        "use_dora": bool(head.lora_magnitude_vector),
        "dropout": any(isinstance(dropout, nn.Dropout) and dropout.p for dropout in head.lora_dropout.values()),
        "lora_bias": any(head.lora_bias.values()),
    }
    for name, is_there in options.items():
        if is_there:
            raise ModelError(
                f"model.adapter.{name} can't apply to the lm_head: leave it out, or take lm_head out of the targets"
            )


def check_logits(model: PreTrainedModel) -> None:
    """Raise ``ModelError`` if the model changes its logits in a way that ``Head`` does not implement."""
    config = model.config.get_text_config()
    for name in LOGIT_CHANGES:
        if getattr(config, name, None) is not None:
            raise ModelError(
                f"{type(model).__name__} has {name}: rlpipe can't train a model that changes its logits so"
            )


def logit_scale(model: PreTrainedModel) -> float:
    """Return the factor that the model multiplies its logits by."""
    config = model.config.get_text_config()
    scale = 1.0
    for name in LOGIT_MULTIPLIERS:
        scale *= getattr(config, name, 1.0)
    for name in LOGIT_DIVISORS:
        scale /= getattr(config, name, 1.0)
    return scale


def logit_cap(model: PreTrainedModel) -> float | None:
    """Return the bound of the model's logits, applied as cap · tanh(logits / cap), or None."""
    cap: float | None = getattr(model.config.get_text_config(), LOGIT_CAP, None)
    return cap

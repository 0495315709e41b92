"""Layers of LoRA adapters: fused products, and scales of their base weights.

Rarely used experts and recurrent parts of published models have some.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import Any

import torch
from peft.tuners import lora
from torch import Tensor, nn

from rlpipe.configs.schema.model_config import WeightScaleRule
from rlpipe.errors import ModelError
from rlpipe.kernels.lora import lora_linear
from rlpipe.models.nf4 import from_nf4
from rlpipe.models.served_weights import EXPERT_DIMENSIONS


class FusedLora(nn.Module):
    """Mixin that comes before PEFT's layer class in the MRO and replaces its forward pass.

    It reads the weights of its submodules without calling them, so they must be present whenever the layer runs,
    forward or backward.
    """

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        layer: Any = self
        name = find_adapter(layer)
        if name is None or args or kwargs or layer.disable_adapters or layer.merged:
            y: Tensor = super().forward(x, *args, **kwargs)
            return y
        base = layer.base_layer
        return lora_linear(
            x,
            base.weight,
            layer.lora_A[name].weight,
            layer.lora_B[name].weight,
            scale=layer.scaling[name],
            bias=base.bias,
            unpack=partial(from_nf4, layer=base) if hasattr(base, "quant_state") else None,
        )


def fuse_lora(model: nn.Module) -> None:
    """Fuse the LoRA layers in place; embeddings, experts, DoRA and layers with dropout stay as they are."""
    for layer in model.modules():
        layer_class: Any = type(layer)
        if _is_linear(layer) and find_adapter(layer) is not None:
            layer.__class__ = _fused_class(layer_class)


def _is_linear(layer: Any) -> bool:
    """Return whether the layer is LoRA on a linear module, with a plain weight or bitsandbytes' 4-bit one."""
    base = getattr(layer, "base_layer", None)
    if not hasattr(getattr(base, "weight", None), "quant_state"):
        return type(layer) is lora.Linear and type(base) is nn.Linear
    from bitsandbytes.nn import Linear4bit

    return type(layer) is lora.Linear4bit and type(base) is Linear4bit


@cache
def _fused_class(layer_class: Any) -> Any:
    """Return the fused class, of the same name, because users may name classes, as in ``learner.fsdp.wrap``."""
    return type(layer_class.__name__, (FusedLora, layer_class), {"__module__": layer_class.__module__})


def find_adapter(layer: Any) -> str | None:
    """Return the name of the active adapter if it is just two matrices beside a frozen weight, else None."""
    name, *others = layer.active_adapters or [""]
    is_plain = (
        not others
        and name in layer.lora_A
        and name not in layer.lora_variant
        and not layer.lora_bias[name]
        and isinstance(layer.lora_dropout[name], nn.Identity)
        and not layer.base_layer.weight.requires_grad
    )
    return name if is_plain else None


@dataclass(kw_only=True, frozen=True, slots=True)
class Drift:
    """A parameter, or an expert's part of one, whose standard deviation is outside the bounds of a rule."""

    rule: str
    name: str
    spread: float
    """Standard deviation of the parameter or the expert's part."""
    median: float
    """Median standard deviation of all that the rule matches."""
    mended: bool

    @property
    def factor(self) -> float:
        """Factor that the values are multiplied by; 1 if they are not mended, or all 0."""
        return self.median / self.spread if self.mended and self.spread else 1.0

    def __str__(self) -> str:
        action = "scaled to the median" if self.factor != 1 else "left unchanged"
        return (
            f"model.normalize_weight_scales.{self.rule}: {self.name} has a standard deviation of {self.spread:.4g}, "
            f"{self.spread / self.median:.2f} times the median {self.median:.4g}; {action}"
        )


@torch.no_grad()
def normalize_weight_scales(model: nn.Module, rules: Mapping[str, WeightScaleRule]) -> list[Drift]:
    """Scale weights outside of a rule's bounds to the median standard deviation, unless the rule is a ``dry_run``.

    All parameters that match a rule's pattern form a group; experts that are fused into one parameter count separately.
    Returns the drifts found. Raises ``ModelError`` if a rule matches nothing, or has a median of 0.
    """
    drifts = []
    for rule_name, rule in rules.items():
        matching = [(name, value) for name, value in model.named_parameters() if re.search(rule.name_pattern, name)]
        group = {member: weight for name, value in matching for member, weight in _members(name, value)}
        spreads = {name: float(value.float().std()) for name, value in group.items() if value.numel() > 1}
        middle = median(spreads.values()) if spreads else 0.0
        if not middle:
            raise ModelError(
                f"model.normalize_weight_scales.{rule_name}: no parameter with a spread matches {rule.name_pattern!r}; "
                f"a parameter of the model is {next(iter(model.named_parameters()))[0]}"
            )
        for name, spread in spreads.items():
            if not middle / rule.threshold <= spread <= middle * rule.threshold:
                drift = Drift(rule=rule_name, name=name, spread=spread, median=middle, mended=not rule.dry_run)
                group[name].mul_(drift.factor)
                drifts.append(drift)
    return drifts


def _members(name: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield the slices of a parameter ``[experts, out, in]`` as ``name[0]`` and so on, and any other one whole."""
    if value.ndim == EXPERT_DIMENSIONS and min(value.shape) > 1:  # unlike the kernels [channels, 1, width] of a mixer
        yield from ((f"{name}[{index}]", expert) for index, expert in enumerate(value))
    else:
        yield name, value


@torch.no_grad()
def apply_factors(name: str, value: Tensor, factors: Mapping[str, float]) -> Tensor:
    """Multiply a parameter, in place, by the factors of a training record's drifts."""
    for member, weight in _members(name, value):
        weight.mul_(factors.get(member, 1.0))
    return value


def parameter_of(member: str) -> str:
    """Return the name of the parameter that a drift's name refers to."""
    return member.partition("[")[0]

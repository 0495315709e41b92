"""Fused forward pass of PEFT's LoRA layers on linear modules, by ``lora_linear`` where the result is the same."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from peft.tuners import lora
from torch import Tensor, nn

from rlpipe.kernels.lora import lora_linear
from rlpipe.models.nf4 import from_nf4


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
        kind: Any = type(layer)
        if _is_linear(layer) and find_adapter(layer) is not None:
            layer.__class__ = _fused(kind)


def _is_linear(layer: Any) -> bool:
    """Return whether the layer is LoRA on a linear module, with a plain weight or bitsandbytes' 4-bit one."""
    base = getattr(layer, "base_layer", None)
    if not hasattr(getattr(base, "weight", None), "quant_state"):
        return type(layer) is lora.Linear and type(base) is nn.Linear
    from bitsandbytes.nn import Linear4bit

    return type(layer) is lora.Linear4bit and type(base) is Linear4bit


@cache
def _fused(kind: Any) -> Any:
    """Return the fused class, of the same name, because users may name classes, as in ``learner.fsdp.wrap``."""
    return type(kind.__name__, (FusedLora, kind), {"__module__": kind.__module__})


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

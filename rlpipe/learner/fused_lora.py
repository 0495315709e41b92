"""Has PEFT's LoRA layers of linear modules run by ``lora_linear``, wherever that computes what PEFT would."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from peft.tuners import lora
from torch import Tensor, nn

from rlpipe.kernels.lora import lora_linear
from rlpipe.models.nf4 import from_nf4


class FusedLora(nn.Module):
    """Goes before PEFT's layer in the order of classes. It reads the weights of its parts without calling these: they
    must be there whenever the layer runs, forward or backward.
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
    """Changes the layers in place. Embeddings, experts, DoRA and layers with dropout stay PEFT's alone."""
    for layer in model.modules():
        kind: Any = type(layer)
        if _is_linear(layer) and find_adapter(layer) is not None:
            layer.__class__ = _fused(kind)


def _is_linear(layer: Any) -> bool:
    """Over a plain weight, or over one that bitsandbytes has in 4 bit."""
    base = getattr(layer, "base_layer", None)
    if not hasattr(getattr(base, "weight", None), "quant_state"):
        return type(layer) is lora.Linear and type(base) is nn.Linear
    from bitsandbytes.nn import Linear4bit

    return type(layer) is lora.Linear4bit and type(base) is Linear4bit


@cache
def _fused(kind: Any) -> Any:
    """Named as it was: users may give classes by name, as in ``learner.fsdp.wrap``."""
    return type(kind.__name__, (FusedLora, kind), {"__module__": kind.__module__})


def find_adapter(layer: Any) -> str | None:
    """The one that is active, if it is no more than two matrices beside a frozen weight."""
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

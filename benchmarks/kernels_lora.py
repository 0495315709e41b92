"""A linear layer with a LoRA adapter: one comparison of ``benchmarks.kernels``.

Shapes: T tokens, I inputs, O outputs, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.kernels_turns import Comparison, Outcome, Side
from rlpipe.learner.adapter_layers import FusedLora, fuse_lora

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {"base": "plain", "autocast": False},
    "float32-adapter": {"base": "plain", "autocast": True},
    "nf4": {"base": "nf4", "autocast": True},
}
"""Kind of the frozen weight, and whether the adapter is in float32 under autocast to bfloat16."""


@dataclass(kw_only=True, frozen=True)
class LoraCase:
    tokens: int
    inputs: int
    outputs: int
    rank: int
    dtype: str
    base: str
    autocast: bool

    @property
    def compute_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.autocast else getattr(torch, self.dtype)


@dataclass(kw_only=True, frozen=True)
class Inputs:
    case: LoraCase
    x: Tensor  # [T, I]
    grad: Tensor  # [T, O]

    def autocast(self) -> AbstractContextManager[object]:
        return torch.autocast(self.x.device.type, torch.bfloat16) if self.case.autocast else nullcontext()


def compare(case: LoraCase, names: list[str], device: torch.device) -> Comparison:
    torch.manual_seed(0)
    x = torch.randn(case.tokens, case.inputs, device=device, dtype=case.compute_dtype).requires_grad_()
    grad = torch.randn(case.tokens, case.outputs, device=device, dtype=case.compute_dtype)
    inputs = Inputs(case=case, x=x, grad=grad)
    adapter = case.rank * (case.inputs + case.outputs) * (4 if case.autocast else case.compute_dtype.itemsize)
    return Comparison(
        makers={name: lambda name=name: SIDES[name](inputs) for name in names},
        roof="gemms",
        gradient_bytes=x.nbytes + adapter,
    )


def product_flops(case: LoraCase) -> float:
    """Return the FLOPs of forward and backward, without the gradient of the frozen weight."""
    low_rank = 6 * case.tokens * case.rank * (case.inputs + case.outputs)
    return 4 * case.tokens * case.inputs * case.outputs + low_rank


def make_gemms(inputs: Inputs) -> Side:
    """Return the bare products, with a weight that needs no dequantisation."""
    case, x, grad = inputs.case, inputs.x.detach(), inputs.grad
    weight = torch.randn(case.outputs, case.inputs, device=x.device).mul_(case.inputs**-0.5).to(x)
    down, up = (
        torch.randn(*shape, device=x.device).to(x) for shape in ((case.rank, case.inputs), (case.outputs, case.rank))
    )

    def forward() -> tuple[Tensor, Tensor]:
        low = x @ down.T  # [T, R]
        return torch.mm(x, weight.T).addmm_(low, up.T), low

    def both() -> Outcome:
        y, low = forward()
        back = grad @ up  # [T, R]
        return y, torch.mm(grad, weight).addmm_(back, down), back.T @ x, grad.T @ low

    return Side(both=both, forward=forward)


class _OneLayer(nn.Module):
    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.is_loaded_in_4bit = hasattr(linear.weight, "quant_state")  # PEFT has another layer for these

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y


def _make_layer(inputs: Inputs) -> nn.Module:
    """Make PEFT's layer, as the learner has it before it is fused."""
    from peft import LoraConfig, get_peft_model

    case, device = inputs.case, inputs.x.device
    if case.base == "nf4":
        from bitsandbytes.nn import Linear4bit

        base: nn.Module = Linear4bit(
            case.inputs, case.outputs, bias=False, compute_dtype=case.compute_dtype, quant_type="nf4"
        ).to(case.compute_dtype)
    else:
        base = nn.Linear(case.inputs, case.outputs, bias=False, dtype=case.compute_dtype)
    model = _OneLayer(base).to(device)
    config = LoraConfig(r=case.rank, lora_alpha=2 * case.rank, target_modules=["linear"])
    adapted = get_peft_model(model, config, autocast_adapter_dtype=case.autocast)
    layer = adapted.base_model.model.linear
    for name, parameter in layer.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02)
    dtype = torch.float32 if case.autocast else case.compute_dtype
    for adapter in (layer.lora_A, layer.lora_B):
        adapter.to(device=device, dtype=dtype)
    return layer


def _side(inputs: Inputs, call: Callable[[Tensor], Tensor], layer: nn.Module) -> Side:
    trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]

    def forward() -> Tensor:
        with inputs.autocast():
            return call(inputs.x)

    def both() -> Outcome:
        y = forward()
        return y, *torch.autograd.grad(y, [inputs.x, *trained], inputs.grad.to(y.dtype))

    return Side(both=both, forward=torch.no_grad()(forward))


def make_peft(inputs: Inputs) -> Side:
    layer = _make_layer(inputs)
    return _side(inputs, layer, layer)


def make_compile(inputs: Inputs) -> Side:
    layer = _make_layer(inputs)
    return _side(inputs, torch.compile(layer, dynamic=False), layer)


def make_rlpipe(inputs: Inputs) -> Side:
    layer = _make_layer(inputs)
    fuse_lora(layer)
    assert isinstance(layer, FusedLora)
    return _side(inputs, layer, layer)


SIDES: dict[str, Callable[[Inputs], Side]] = {
    "gemms": make_gemms,
    "rlpipe": make_rlpipe,
    "peft": make_peft,
    "compile": make_compile,
}

"""Inputs of the LoRA linear, and plain autograd in float64 as its reference.

Shapes: I inputs, O outputs, r rank; ``shape`` is the shape of x without its channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kernel_cases import randn
from torch import Tensor

from rlpipe.kernels.lora import lora_linear

SCALE = 1.7


@dataclass(kw_only=True, slots=True)
class LoraInputs:
    x: Tensor  # [..., I]
    weight: Tensor  # [O, I]
    down: Tensor  # [r, I]
    up: Tensor  # [O, r]
    bias: Tensor | None  # [O]

    @property
    def leaves(self) -> list[Tensor]:
        tensors = (self.x, self.down, self.up, self.bias)
        return [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]

    def run(self) -> Tensor:
        return lora_linear(self.x, self.weight, self.down, self.up, scale=SCALE, bias=self.bias)

    def expect(self) -> Tensor:
        x, weight, down, up = (tensor.double() for tensor in (self.x, self.weight, self.down, self.up))
        y = x @ weight.T + SCALE * (x @ down.T) @ up.T
        return y if self.bias is None else y + self.bias.double()

    def both(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the output and the gradients of a weighted sum of it, by ``lora_linear`` and in float64."""
        found = []
        for y in (self.run(), self.expect()):
            weights = randn(*y.shape, seed=9).to(y.device, y.dtype)
            found.append([y, *torch.autograd.grad(y, self.leaves, weights)])
        return found[0], found[1]


def make_lora_inputs(
    shape: tuple[int, ...] = (13,),
    *,
    inputs: int = 10,
    outputs: int = 7,
    rank: int = 3,
    with_bias: bool = True,
    dtype: torch.dtype = torch.float64,
    adapter_dtype: torch.dtype | None = None,
    device: str = "cpu",
) -> LoraInputs:
    """Make inputs that all require gradients, except the weight.

    Entries of the result are about 1, and so are those of the adapter's share.
    """
    wide = adapter_dtype or dtype
    leaves = {
        "x": randn(*shape, inputs, seed=0, dtype=dtype),
        "down": randn(rank, inputs, seed=2, dtype=wide) * inputs**-0.5,
        "up": randn(outputs, rank, seed=3, dtype=wide) * rank**-0.5,
        "bias": randn(outputs, seed=4, dtype=dtype) if with_bias else None,
    }
    weight = (randn(outputs, inputs, seed=1) * inputs**-0.5).to(device, dtype)
    moved = {name: None if leaf is None else leaf.to(device).requires_grad_() for name, leaf in leaves.items()}
    return LoraInputs(weight=weight, **moved)

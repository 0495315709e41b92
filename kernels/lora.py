"""A linear layer with a LoRA over a frozen weight: each product runs once, and none is for the weight's gradient.

There is no Triton kernel, because nearly all of the work is two products with the weight, for which cuBLAS is as fast
as possible. The savings are around them: the scaled adapter's products are added directly to the base's output, and
an input shared by several layers, such as q, k and v, is saved once and not cast to the adapter's type.

Shapes: T tokens, I inputs, O outputs, r rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlpipe.kernels.primitives import add_product, product, wide

Unpack = Callable[[Tensor], Tensor]


def lora_linear(
    x: Tensor,
    weight: Tensor,
    down: Tensor,
    up: Tensor,
    *,
    scale: float,
    bias: Tensor | None = None,
    unpack: Unpack | None = None,
) -> Tensor:
    """Compute y = x @ weight.T + bias + scale · (x @ down.T) @ up.T (arXiv:2106.09685), ``[..., O]``.

    ``x`` is ``[..., I]``, ``weight`` ``[O, I]``, ``down`` ``[r, I]``, ``up`` ``[O, r]``, ``bias`` ``[O]``. ``unpack``
    restores the weight from its stored form, such as 4-bit codes; it runs once in the forward and once in the backward
    pass. Products and y have the type of ``x``, or autocast's. Gradients of the adapter have the adapter's type; if
    that is wider, they are summed in it.

    Saved for the backward pass are ``x``, ``x @ down.T``, and the parameters as they are stored. Raises ``ValueError``
    for a weight that requires a gradient, and for shapes that do not fit.
    """
    if weight.requires_grad:
        raise ValueError("weight requires a gradient, and lora_linear computes none: freeze it")
    if down.shape[1:] != x.shape[-1:] or up.shape[1:] != down.shape[:1]:
        raise ValueError(
            f"x of shape {[*x.shape]}, down {[*down.shape]}, up {[*up.shape]}: they must be [..., I], [r, I] and [O, r]"
        )
    y: Tensor = _LoraLinear.apply(x.to(_product_dtype(x)), weight, down, up, bias, scale, unpack)  # [T, O]
    return y.view(*x.shape[:-1], y.shape[1])  # a view that the operator itself returned could not be changed in place


def _product_dtype(x: Tensor) -> torch.dtype:
    """Return the type that torch's own linear layers would compute in: autocast's or that of ``x``."""
    device_type = x.device.type
    if torch.is_autocast_enabled(device_type) and x.dtype is not torch.float64:
        return torch.get_autocast_dtype(device_type)
    return x.dtype


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        down: Tensor,
        up: Tensor,
        bias: Tensor | None,
        scale: float,
        unpack: Unpack | None,
    ) -> Tensor:
        dtype, flat = x.dtype, x.reshape(-1, x.shape[-1])  # [T, I]
        low = _scaled_product(flat, down.to(dtype).T, scale)  # [T, r]
        full_weight = _unpacked(weight, unpack, dtype)  # [O, I]
        y = flat @ full_weight.T if bias is None else torch.addmm(bias.to(dtype), flat, full_weight.T)  # [T, O]
        add_product(y, low, up.to(dtype).T)
        need_x, _, need_down, need_up, *_ = ctx.needs_input_grad
        # Saved as given, without casts: weights may be offloaded in between, and other layers save the same x.
        ctx.save_for_backward(
            x if need_down else None,
            weight if need_x else None,
            down if need_x else None,
            up if need_x or need_down else None,
            low if need_up else None,
        )
        ctx.shape, ctx.scale, ctx.unpack = x.shape, scale, unpack
        ctx.dtypes = (down.dtype, up.dtype, None if bias is None else bias.dtype)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, low = ctx.saved_tensors
        down_dtype, up_dtype, bias_dtype = ctx.dtypes
        dtype, flat = grad.dtype, grad  # [T, O]
        grad_x = grad_down = grad_up = grad_bias = None
        if up is not None:
            grad_low = _scaled_product(flat, up.to(dtype), ctx.scale)  # [T, r]
            if weight is not None:
                grad_x = flat @ _unpacked(weight, ctx.unpack, dtype)  # [T, I]
                grad_x = add_product(grad_x, grad_low, down.to(dtype)).view(ctx.shape)
            if x is not None:
                grad_down = _sum_of_tokens(grad_low, x.reshape(-1, x.shape[-1]), down_dtype)  # [r, I]
        if low is not None:
            grad_up = _sum_of_tokens(flat, low, up_dtype)  # [O, r]
        if ctx.needs_input_grad[4]:
            grad_bias = flat.sum(0, dtype=wide(dtype)).to(bias_dtype)  # [O]
        return grad_x, None, grad_down, grad_up, grad_bias, None, None


def _unpacked(weight: Tensor, unpack: Unpack | None, dtype: torch.dtype) -> Tensor:
    return (weight if unpack is None else unpack(weight)).to(dtype)


def _scaled_product(left: Tensor, right: Tensor, scale: float) -> Tensor:
    """Compute ``scale * left @ right``, rounded only once."""
    out = left.new_empty(left.shape[0], right.shape[1])
    return torch.addmm(out, left, right, beta=0, alpha=scale, out=out)


def _sum_of_tokens(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum the outer products of the rows of ``[T, A]`` and ``[T, B]``, to ``[A, B]``."""
    out = left.new_empty(left.shape[1], right.shape[1], dtype=torch.promote_types(left.dtype, dtype))
    return product(left.T, right, out).to(dtype)

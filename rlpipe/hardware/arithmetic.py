"""Measurements of arithmetic per second: matrix products, AdamW updates, and gradient sums on the host."""

from __future__ import annotations

import torch
from torch import nn

from rlpipe.hardware.device import STATE_DTYPES, adding
from rlpipe.hardware.grad_accumulation import add_up
from rlpipe.hardware.timing import Work, rate, time_calls

DTYPES = ("float32", "bfloat16", "float16")
SMALLEST_MATRIX, LARGEST_MATRIX = 256, 8192
LONGEST_PRODUCT_S = 0.1
ADAM_ELEMENTS = {"cuda": 2**26, "cpu": 2**25}
ADDED_ELEMENTS = 2**25


def matmul_flops(device: torch.device, *, scale: float = 1.0) -> dict[str, float]:
    """Return the FLOP/s of dense products of square matrices, by dtype, without the dtypes that the device refuses."""
    found = {}
    for name in DTYPES:
        try:
            found[name] = product_flops(device, name, scale)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            if name == DTYPES[0]:  # which every device has
                raise
    return found


def product_flops(device: torch.device, dtype: str, scale: float) -> float:
    """Return the FLOP/s with the largest matrices that time allows; small ones do not reach the device's rate."""
    width = SMALLEST_MATRIX
    while True:
        multiply = _product(device, getattr(torch, dtype), width)
        multiply()
        next_s = 8 * time_calls(multiply, 1, device)
        if width == LARGEST_MATRIX or next_s > scale * LONGEST_PRODUCT_S:
            return rate(2 * width**3, multiply, device, scale=scale)
        width *= 2


def _product(device: torch.device, dtype: torch.dtype, width: int) -> Work:
    # Random numbers, because a GPU is faster with zeros; from a separate generator, so that the run's is not advanced.
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(width, width, device=device, dtype=dtype, generator=generator) for _ in range(2))
    out = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=out)


def adam_elements(device: torch.device, *, scale: float = 1.0) -> dict[str, float]:
    """Return the elements per second of torch's fused AdamW, by the dtype of weights, gradients and moments."""
    return {name: _adam_elements(device, getattr(torch, name), scale) for name in STATE_DTYPES}


def _adam_elements(device: torch.device, dtype: torch.dtype, scale: float) -> float:
    num_elements = int(scale * ADAM_ELEMENTS[device.type])
    weights = nn.Parameter(torch.zeros(num_elements, dtype=dtype, device=device))
    weights.grad = torch.ones_like(weights)
    optimizer = torch.optim.AdamW([weights], lr=1e-6, fused=True)
    return rate(num_elements, optimizer.step, device, scale=scale)


def added_elements(*, scale: float = 1.0) -> dict[str, float]:
    """Return the gradient elements per second that the host adds to a sum, with the sum of squares, by ``adding``."""
    return {
        adding(part, total): _added_elements(getattr(torch, part), getattr(torch, total), scale)
        for total in STATE_DTYPES
        for part in STATE_DTYPES
    }


def _added_elements(part_dtype: torch.dtype, total_dtype: torch.dtype, scale: float) -> float:
    part = torch.ones(int(scale * ADDED_ELEMENTS), dtype=part_dtype)
    total = torch.zeros(len(part), dtype=total_dtype)
    return rate(len(part), lambda: add_up(total, part), part.device, scale=scale)

"""FLOP formulas of operators that torch's counter does not know: attention on CPUs, and experts' products.

Fake tensors lie on the CPU, where attention has a kernel of its own; it stands for that of a GPU, which skips what a
causal mask hides. Shapes: batch b, heads h, queries q, keys k, channels d and e of a head; tokens t in all groups g.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, register_flop_formula

Shape = tuple[int, ...]


def attention_flops(
    query: Shape, key: Shape, value: Shape, dropout: float = 0.0, is_causal: bool = False, *_: Any, **__: Any
) -> int:
    """Return attention's FLOP for queries ``[b, h, q, d]``, keys ``[b, h, k, d]`` and values ``[b, h, k, e]``."""
    (batch, heads, queries, channels), keys = query, key[2]
    whole = 2 * batch * heads * queries * keys * (channels + value[3])
    return whole // 2 if is_causal else whole


def attention_backward_flops(
    gradient: Shape,
    query: Shape,
    key: Shape,
    value: Shape,
    output: Shape,
    logsumexp: Shape,
    dropout: float,
    is_causal: bool,
    *_: Any,
    **__: Any,
) -> int:
    """Return attention's backward FLOP: the scores again, and two gradients per product (arXiv:2307.08691)."""
    channels, others = query[3], value[3]
    forward = attention_flops(query, key, value, dropout, is_causal)
    return forward * (3 * channels + 2 * others) // (channels + others)


def added_flops(total: Shape, left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOP of ``[t, d]`` times ``[d, e]``, added in place; torch's counter knows only ``addmm`` itself."""
    return 2 * left[0] * left[1] * right[1]


def grouped_flops(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Return the FLOP of a grouped product.

    It multiplies each token with the matrix of its group, ``[t, d]`` and ``[g, d, e]``, or sums up the tokens' outer
    products by group, ``[d, t]`` and ``[t, e]``.
    """
    return 2 * left[0] * left[1] * right[-1]


def register_formulas() -> None:
    """Register the formulas, except those of operators that the registry knows already."""
    aten = torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = {
        aten._scaled_dot_product_flash_attention_for_cpu: attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
        aten.addmm_: added_flops,
        aten._grouped_mm: grouped_flops,
    }
    for operator, formula in formulas.items():
        if operator not in flop_registry:
            register: Any = register_flop_formula(operator)
            register(formula)

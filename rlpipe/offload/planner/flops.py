"""FLOP of operators that torch's counter does not know, by its own registry: attention on CPUs, and experts' products.

Fakes lie on the CPU, where attention has a kernel of its own; it stands for that of a GPU, which leaves out what a
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
    """Of queries ``[b, h, q, d]`` with keys ``[b, h, k, d]`` and values ``[b, h, k, e]``: two products."""
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
    """Scores once more, and for each of the two products those of both gradients (arXiv:2307.08691)."""
    channels, others = query[3], value[3]
    forward = attention_flops(query, key, value, dropout, is_causal)
    return forward * (3 * channels + 2 * others) // (channels + others)


def added_flops(total: Shape, left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Of ``[t, d]`` with ``[d, e]``, in place; torch's counter knows the one that makes a new tensor."""
    return 2 * left[0] * left[1] * right[1]


def grouped_flops(left: Shape, right: Shape, *_: Any, **__: Any) -> int:
    """Each token with the matrix of its group, ``[t, d]`` and ``[g, d, e]``; or its outer product, ``[d, t]`` and
    ``[t, e]``, added up by group."""
    return 2 * left[0] * left[1] * right[-1]


def register_formulas() -> None:
    """Once; operators that a later torch knows itself keep its formula."""
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

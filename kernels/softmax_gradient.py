"""The gradient of rows of logits from those of their log-probs and entropies.

Shapes: R rows, V columns, which may be a part of the vocabulary. A row's logits x become z (``LogitChange``), whose
softmax over the whole vocabulary is p.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, no_type_check

import torch
from torch import Tensor

from rlpipe.kernels.logit_change import LogitChange
from rlpipe.kernels.row_access import (
    IGNORED,
    NUM_WARPS,
    block_of,
    change_logits,
    exp,
    find_targets,
    jit,
    kernel_arguments,
    load_logits,
    pack_change,
    row_groups,
    runs_triton,
    tl,
    triton,
    unpack_change,
)
from rlpipe.kernels.softmax_stats import RowStats


@torch.no_grad()
def row_gradient(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats,
    change: LogitChange,
    *,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
    first_column: int = 0,
    has_ignored: bool = True,
    use_triton: bool | None = None,
) -> Tensor:
    """Write the gradient of the raw logits ``[R, V]`` to ``out``, given those of log-probs and entropies ``[R]``.

    ``out`` may be the logits' memory; ``stats`` are those of the whole vocabulary.
    d logprob / dz = onehot(target) - p, and d entropy / dz = -p (log p + entropy).
    """
    if len(targets):
        runs, own = runs_triton(logits, use_triton), (stats.largest, stats.log_total, stats.entropy)
        grads = (grad_logprobs, grad_entropy)
        _fill_gradient(out, logits, targets, *own, *grads, *pack_change(change), first_column, has_ignored, runs)
    return out


# A torch operator, so that tracing a model on fake tensors sees the operator, and not its implementation.


@torch.library.custom_op("rlpipe::row_gradient", mutates_args={"out"})
def _fill_gradient(
    out: Tensor,  # [R, V]
    logits: Tensor,  # [R, V]
    targets: Tensor,  # [R]
    largest: Tensor,  # [R]
    log_total: Tensor,  # [R]
    entropy: Tensor,  # [R]
    grad_logprobs: Tensor | None,  # [R]
    grad_entropy: Tensor | None,  # [R]
    bias: Tensor | None,  # [V]
    temperatures: Tensor | None,  # [R]
    scale: float,
    softcap: float | None,
    temperature: float,
    first_column: int,
    has_ignored: bool,
    use_triton: bool,
) -> None:
    change, stats = unpack_change(bias, temperatures, scale, softcap, temperature), (largest, log_total, entropy)
    run = _gradient_triton if use_triton else partial(_gradient_torch, has_ignored=has_ignored)
    run(logits, targets, stats, change, first_column, grad_logprobs, grad_entropy, out)


@_fill_gradient.register_fake
def _fill_nothing(*_: Any) -> None:
    """Do nothing on fake tensors, because the operator returns nothing and its output is already allocated."""


def _gradient_torch(
    logits: Tensor,
    targets: Tensor,
    stats: Sequence[Tensor],
    change: LogitChange,
    first_column: int,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
    has_ignored: bool,
) -> None:
    places, is_here = find_targets(targets, first_column, logits.shape[1])
    largest, log_total, entropy = stats
    for rows in row_groups(logits):
        own = change.of_rows(rows)
        z = own.apply(logits[rows])  # [G, V]
        slope = own.slope(z)
        log_p = (z - largest[rows, None]).sub_(log_total[rows, None])
        p = log_p.exp()
        gradient = torch.zeros_like(p)
        if grad_entropy is not None:
            log_p.clamp_(min=torch.finfo(p.dtype).min)
            gradient = log_p.add_(entropy[rows, None]).mul_(p).mul_(-grad_entropy[rows, None])
        if grad_logprobs is not None:
            gradient -= p.mul_(grad_logprobs[rows, None])
            gradient.scatter_add_(1, places[rows, None], (grad_logprobs[rows] * is_here[rows])[:, None])
        if isinstance(slope, Tensor) or slope != 1.0:
            gradient *= slope
        if has_ignored:
            gradient.masked_fill_(targets[rows, None] == IGNORED, 0)
        out[rows] = gradient


@jit(do_not_specialize=["first_column"])
@no_type_check
def _gradient_kernel(
    logits,
    bias,
    targets,
    temperatures,
    largest,
    log_total,
    entropy,
    grad_logprobs,
    grad_entropy,
    out,
    num_columns,
    first_column,
    row_stride,
    out_stride,
    factor,
    scale,
    softcap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    PER_ROW: tl.constexpr,
    OF_LOGPROBS: tl.constexpr,
    OF_ENTROPY: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(targets + row)
    is_counted = target != IGNORED
    if PER_ROW:
        factor /= tl.load(temperatures + row)
    # For an ignored row, everything below is a finite number times 0.
    x = load_logits(logits + row * row_stride, bias, columns, columns < tl.where(is_counted, num_columns, 0), BIASED)
    z, slope = change_logits(x, factor, scale, softcap, CAPPED)
    log_p = (z - tl.load(largest + row)) - tl.load(log_total + row)
    p = exp(log_p)
    gradient = tl.zeros([BLOCK], tl.float32)
    if OF_ENTROPY:
        by_entropy = tl.load(grad_entropy + row, mask=is_counted, other=0.0)
        gradient -= p * (by_entropy * (tl.maximum(log_p, -1e38) + tl.load(entropy + row)))
    if OF_LOGPROBS:
        by_logprob = tl.load(grad_logprobs + row, mask=is_counted, other=0.0)
        gradient += tl.where(columns == (target - first_column).to(tl.int32), by_logprob, 0.0) - p * by_logprob
    tl.store(out + row * out_stride + columns, (gradient * slope).to(out.dtype.element_ty), mask=columns < num_columns)


def _gradient_triton(
    logits: Tensor,
    targets: Tensor,
    stats: Sequence[Tensor],
    change: LogitChange,
    first_column: int,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> None:
    assert logits.stride(1) == out.stride(1) == 1, "a row lies in one piece"
    num_rows, num_columns = logits.shape
    block = block_of(num_columns)
    _gradient_kernel[(num_rows, triton.cdiv(num_columns, block))](
        logits=logits,
        targets=targets.contiguous(),
        largest=stats[0],
        log_total=stats[1],
        entropy=stats[2],
        grad_logprobs=targets if grad_logprobs is None else grad_logprobs.contiguous(),
        grad_entropy=targets if grad_entropy is None else grad_entropy.contiguous(),
        out=out,
        num_columns=num_columns,
        first_column=first_column,
        row_stride=logits.stride(0),
        out_stride=out.stride(0),
        OF_LOGPROBS=grad_logprobs is not None,
        OF_ENTROPY=grad_entropy is not None,
        BLOCK=block,
        num_warps=NUM_WARPS,
        **kernel_arguments(change, targets),
    )

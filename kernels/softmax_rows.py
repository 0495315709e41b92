"""Rows of logits: the statistics of their softmax, and its gradient; what both log-prob kernels are made of.

Shapes: R rows, V columns, which may be a part of the vocabulary. A row's logits x become z (``LogitChange``), whose
softmax p counts. Of an ignored row Triton's kernels read nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, no_type_check

import torch
from torch import Tensor

from rlpipe.kernels.logit_change import LogitChange
from rlpipe.kernels.products import wide
from rlpipe.kernels.softmax_stats import RowStats

try:
    import triton
    import triton.language as tl

    _jit: Callable[..., Any] = triton.jit
except ModuleNotFoundError:  # where there is no CUDA, either

    def _jit(*_: Any, **__: Any) -> Any:
        return lambda function: function


IGNORED = -100
"""The target of a token that does not count; its log-prob and entropy are 0 and have no gradient."""
BLOCK, NUM_WARPS = 4096, 8
"""Columns that a Triton program has in registers at one time, and the warps that share them."""
GROUP_ELEMENTS, MOST_GROUPS = 2**19, 16
"""The reference takes as many rows at a time as stay in a core's cache, but makes no more than so many groups."""


@torch.no_grad()
def row_stats(
    logits: Tensor,
    targets: Tensor,
    change: LogitChange,
    *,
    first_column: int = 0,
    with_entropy: bool = True,
    use_triton: bool | None = None,
) -> RowStats:
    """Reads the logits ``[R, V]`` once, and leaves them as they are.

    ``targets`` ``[R]`` count from the vocabulary's begin, ``first_column`` is that of these logits in it. Triton or
    torch runs as ``use_triton`` says; None: Triton on CUDA. ``with_entropy=False`` leaves its sum at 0.
    """
    values = logits.new_zeros(4, len(targets), dtype=wide(logits.dtype))
    if len(targets):
        run = _stats_triton if runs_triton(logits, use_triton) else _stats_torch
        run(logits, targets, change, first_column, with_entropy, values)
    return RowStats(values)


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
    """The gradient of the raw logits ``[R, V]`` from those of log-probs and entropies ``[R]``, into ``out``, which may
    be the logits' memory; ``stats`` are those of the whole vocabulary.

    d logprob / dz = onehot(target) - p, and d entropy / dz = -p (log p + entropy).
    """
    if len(targets):
        run = _gradient_triton if runs_triton(logits, use_triton) else partial(_gradient_torch, has_ignored=has_ignored)
        run(logits, targets, stats, change, first_column, grad_logprobs, grad_entropy, out)
    return out


def runs_triton(logits: Tensor, chosen: bool | None) -> bool:
    """CUDA tensors take Triton's kernels, but for float64, which these do not compute in."""
    return logits.is_cuda and logits.dtype is not torch.float64 if chosen is None else chosen


# The torch reference


def _groups(logits: Tensor) -> Iterator[slice]:
    size = max(GROUP_ELEMENTS // logits.shape[1], -(-len(logits) // MOST_GROUPS), 1)
    return (slice(start, start + size) for start in range(0, len(logits), size))


def _places(targets: Tensor, first_column: int, num_columns: int) -> tuple[Tensor, Tensor]:
    """Where each target is among these columns ``[R]``, and whether it is."""
    local = targets - first_column
    is_here = (local >= 0) & (local < num_columns) & (targets != IGNORED)
    return torch.where(is_here, local, 0), is_here


def _stats_torch(
    logits: Tensor, targets: Tensor, change: LogitChange, first_column: int, with_entropy: bool, values: Tensor
) -> None:
    places, is_here = _places(targets, first_column, logits.shape[1])
    lowest = torch.finfo(values.dtype).min  # in place of -inf, of which products with 0 are no numbers
    for rows in _groups(logits):
        z = change.of_rows(rows).apply(logits[rows])  # [G, V]
        largest, total, moment, target = (value[rows] for value in values)
        torch.amax(z, 1, out=largest).clamp_(min=lowest)
        target.copy_(z.gather(1, places[rows, None])[:, 0].where(is_here[rows], -torch.inf))
        lower = (z - largest[:, None]).clamp_(min=lowest)
        exponentials = lower.exp()
        torch.sum(exponentials, 1, out=total)
        if with_entropy:
            torch.linalg.vecdot(exponentials, lower, out=moment)
    values.masked_fill_(targets == IGNORED, 0)


def _gradient_torch(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats,
    change: LogitChange,
    first_column: int,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
    has_ignored: bool,
) -> None:
    places, is_here = _places(targets, first_column, logits.shape[1])
    largest, log_total, entropy = stats.largest, stats.log_total, stats.entropy
    for rows in _groups(logits):
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


# Triton. Pointers are named as the tensors, and of rows they count in 64 bits: R V passes 2^31.


@_jit
@no_type_check
def _exp(x):
    """By the power of 2, which Triton compiles to a single instruction that takes the smallest numbers for 0."""
    return tl.exp2(x * 1.4426950408889634)


@_jit
@no_type_check
def _change(x, factor, scale, softcap, CAPPED: tl.constexpr):
    """z, and dz/dx; ``factor`` is all that x is multiplied with where no cap comes in between."""
    slope = factor
    if CAPPED:
        bounded = 1 - 2 / (1 + _exp(x * (2 * scale / softcap)))  # tanh
        x = bounded * (softcap / scale)
        slope *= 1 - bounded * bounded
    return x * factor, slope


@_jit
@no_type_check
def _load(logits, bias, columns, mask, BIASED: tl.constexpr):
    """0 where the mask is False; None reads all, without a look at it."""
    x = tl.load(logits + columns, mask=mask).to(tl.float32)
    if BIASED:
        x += tl.load(bias + columns, mask=mask).to(tl.float32)
    if mask is not None:
        x = tl.where(mask, x, 0.0)
    return x


@_jit
@no_type_check
def _add_columns(z, largest, total, moment, WITH_ENTROPY: tl.constexpr):
    """The statistics with more columns; sums are kept by lane, and change their scale only where the maximum does."""
    highest = tl.maximum(largest, tl.max(z, 0))
    if highest > largest:
        lower = largest - highest
        shrunk = _exp(lower)
        if WITH_ENTROPY:
            moment = (moment + lower * total) * shrunk
        total *= shrunk
    below = z - highest
    exponentials = _exp(below)
    if WITH_ENTROPY:
        moment += exponentials * tl.maximum(below, -1e38)  # 0 where z is -inf
    return highest, total + exponentials, moment


@_jit(do_not_specialize=["num_rows", "first_column"])
@no_type_check
def _stats_kernel(
    logits,
    bias,
    targets,
    temperatures,
    values,
    num_rows,
    num_columns,
    first_column,
    row_stride,
    factor,
    scale,
    softcap,
    BIASED: tl.constexpr,
    CAPPED: tl.constexpr,
    PER_ROW: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(targets + row)
    is_counted = target != IGNORED
    end = tl.where(is_counted, num_columns, 0)
    if PER_ROW:
        factor /= tl.load(temperatures + row)
    logits += row * row_stride
    largest = -1e38  # below what counts, and finite, as are its differences
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    columns = tl.arange(0, BLOCK)
    rest = end // BLOCK * BLOCK
    for start in range(0, rest, BLOCK):  # without masks, which would cost as much as the sums
        z, _ = _change(_load(logits, bias, start + columns, None, BIASED), factor, scale, softcap, CAPPED)
        largest, total, moment = _add_columns(z, largest, total, moment, WITH_ENTROPY)
    if rest < end:
        is_inside = rest + columns < end
        z, _ = _change(_load(logits, bias, rest + columns, is_inside, BIASED), factor, scale, softcap, CAPPED)
        z = tl.where(is_inside, z, float("-inf"))
        largest, total, moment = _add_columns(z, largest, total, moment, WITH_ENTROPY)
    local = target - first_column
    is_here = (local >= 0) & (local < end)
    z, _ = _change(_load(logits, bias, local, is_here, BIASED), factor, scale, softcap, CAPPED)
    values += row
    tl.store(values, tl.where(is_counted, largest, 0.0))
    tl.store(values + num_rows, tl.sum(total, 0))
    tl.store(values + 2 * num_rows, tl.sum(moment, 0))
    tl.store(values + 3 * num_rows, tl.where(is_here, z, tl.where(is_counted, float("-inf"), 0.0)))


@_jit(do_not_specialize=["first_column"])
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
    # Of an ignored row all that follows is a number times 0.
    x = _load(logits + row * row_stride, bias, columns, columns < tl.where(is_counted, num_columns, 0), BIASED)
    z, slope = _change(x, factor, scale, softcap, CAPPED)
    log_p = (z - tl.load(largest + row)) - tl.load(log_total + row)
    p = _exp(log_p)
    gradient = tl.zeros([BLOCK], tl.float32)
    if OF_ENTROPY:
        by_entropy = tl.load(grad_entropy + row, mask=is_counted, other=0.0)
        gradient -= p * (by_entropy * (tl.maximum(log_p, -1e38) + tl.load(entropy + row)))
    if OF_LOGPROBS:
        by_logprob = tl.load(grad_logprobs + row, mask=is_counted, other=0.0)
        gradient += tl.where(columns == (target - first_column).to(tl.int32), by_logprob, 0.0) - p * by_logprob
    tl.store(out + row * out_stride + columns, (gradient * slope).to(out.dtype.element_ty), mask=columns < num_columns)


def _arguments(change: LogitChange, unused: Tensor) -> dict[str, Any]:
    """What both kernels take of the change; ``unused`` stands where there is no tensor."""
    temperature = change.temperature
    is_per_row = isinstance(temperature, Tensor)
    return {
        "bias": unused if change.bias is None else change.bias.contiguous(),
        "temperatures": temperature.float().contiguous() if isinstance(temperature, Tensor) else unused,
        "factor": change.scale / (1.0 if isinstance(temperature, Tensor) else temperature),
        "scale": float(change.scale),
        "softcap": float(change.softcap or 1.0),
        "BIASED": change.bias is not None,
        "CAPPED": change.softcap is not None,
        "PER_ROW": is_per_row,
        "IGNORED": IGNORED,
    }


def _block(num_columns: int) -> int:
    return min(BLOCK, int(triton.next_power_of_2(num_columns)))


def _stats_triton(
    logits: Tensor, targets: Tensor, change: LogitChange, first_column: int, with_entropy: bool, values: Tensor
) -> None:
    assert logits.stride(1) == 1, "a row lies in one piece"
    num_rows, num_columns = logits.shape
    _stats_kernel[(num_rows,)](
        logits=logits,
        targets=targets.contiguous(),
        values=values,
        num_rows=num_rows,
        num_columns=num_columns,
        first_column=first_column,
        row_stride=logits.stride(0),
        WITH_ENTROPY=with_entropy,
        BLOCK=_block(num_columns),
        num_warps=NUM_WARPS,
        **_arguments(change, targets),
    )


def _gradient_triton(
    logits: Tensor,
    targets: Tensor,
    stats: RowStats,
    change: LogitChange,
    first_column: int,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> None:
    assert logits.stride(1) == out.stride(1) == 1, "a row lies in one piece"
    num_rows, num_columns = logits.shape
    block = _block(num_columns)
    _gradient_kernel[(num_rows, triton.cdiv(num_columns, block))](
        logits=logits,
        targets=targets.contiguous(),
        largest=stats.largest,
        log_total=stats.log_total,
        entropy=stats.entropy,
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
        **_arguments(change, targets),
    )

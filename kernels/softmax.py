"""Kernels for the softmax of a row of logits: its statistics, and the gradient of the logits.

Shapes: R rows, V columns, which may be a part of the vocabulary; P parts. A row's logits x become z (``LogitChange``).

Shapes: R rows, V columns, which may be a part of the vocabulary. A row's logits x become z (``LogitChange``), whose
softmax over the whole vocabulary is p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, no_type_check

import torch
from torch import Tensor

from rlpipe.kernels.primitives import (
    IGNORED,
    NUM_WARPS,
    LogitChange,
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
    wide,
)


@dataclass(frozen=True)
class RowStats:
    """Statistics of each row's softmax: four numbers, which can be joined from the parts of a vocabulary.

    ``values`` ``[4, R]``: the largest z, m; the sum s of exp(z - m); the sum of exp(z - m) (z - m); and the target's z,
    -inf if it is in another part, or in none. All are 0 for an ignored row.
    """

    values: Tensor  # [4, R]

    @classmethod
    def join(cls, parts: Tensor) -> RowStats:
        """Join the values of all parts ``[P, 4, R]``."""
        largest, total, moment, target = parts.unbind(1)  # [P, R]
        maximum = largest.amax(0)
        lower = largest - maximum
        shrunk = lower.exp()
        moments = (moment + lower * total) * shrunk
        return cls(torch.stack([maximum, (total * shrunk).sum(0), moments.sum(0), target.amax(0)]))

    @cached_property
    def largest(self) -> Tensor:  # [R]
        return self.values[0]

    @cached_property
    def total(self) -> Tensor:
        """s ``[R]``, at least 1 despite rounding, because its largest term is 1."""
        return self.values[1].clamp(min=1)

    @cached_property
    def log_total(self) -> Tensor:  # [R]
        return self.total.log()

    @cached_property
    def logprobs(self) -> Tensor:
        """Log-probs of the targets ``[R]``, never positive."""
        return (self.values[3] - self.values[0]).clamp(max=0) - self.log_total

    @cached_property
    def entropy(self) -> Tensor:
        """Entropies in nats ``[R]``, exact even if nearly all probability is on one token and log s nearly vanishes."""
        return self.log_total - self.values[2] / self.total


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
    """Compute the statistics of logits ``[R, V]``, which are read once and not modified.

    ``targets`` ``[R]`` are indices into the whole vocabulary, of which these logits begin at ``first_column``.
    ``use_triton`` chooses Triton or torch; None: Triton on CUDA. ``with_entropy=False`` leaves the entropy's sum at 0.
    """
    values = logits.new_zeros(4, len(targets), dtype=wide(logits.dtype))
    if len(targets):
        runs = runs_triton(logits, use_triton)
        _fill_stats(values, logits, targets, *pack_change(change), first_column, with_entropy, runs)
    return RowStats(values)


# A torch operator, so that tracing a model on fake tensors sees the operator, and not its implementation.


@torch.library.custom_op("rlpipe::row_stats", mutates_args={"values"})
def _fill_stats(
    values: Tensor,  # [4, R]
    logits: Tensor,  # [R, V]
    targets: Tensor,  # [R]
    bias: Tensor | None,  # [V]
    temperatures: Tensor | None,  # [R]
    scale: float,
    softcap: float | None,
    temperature: float,
    first_column: int,
    with_entropy: bool,
    use_triton: bool,
) -> None:
    change = unpack_change(bias, temperatures, scale, softcap, temperature)
    run = _stats_triton if use_triton else _stats_torch
    run(logits, targets, change, first_column, with_entropy, values)


@_fill_stats.register_fake
def _fake_stats(*_: Any) -> None:
    """Do nothing on fake tensors, because the operator returns nothing and its output is already allocated."""


def _stats_torch(
    logits: Tensor, targets: Tensor, change: LogitChange, first_column: int, with_entropy: bool, values: Tensor
) -> None:
    target_columns, is_inside = find_targets(targets, first_column, logits.shape[1])
    lowest = torch.finfo(values.dtype).min  # instead of -inf, whose product with 0 is NaN
    for rows in row_groups(logits):
        z = change.of_rows(rows).apply(logits[rows])  # [G, V]
        largest, total, moment, target = (value[rows] for value in values)
        torch.amax(z, 1, out=largest).clamp_(min=lowest)
        target.copy_(z.gather(1, target_columns[rows, None])[:, 0].where(is_inside[rows], -torch.inf))
        lower = (z - largest[:, None]).clamp_(min=lowest)
        exponentials = lower.exp()
        torch.sum(exponentials, 1, out=total)
        if with_entropy:
            torch.linalg.vecdot(exponentials, lower, out=moment)
    values.masked_fill_(targets == IGNORED, 0)


@jit
@no_type_check
def _add_columns(z, largest, total, moment, WITH_ENTROPY: tl.constexpr):
    """Add columns to the statistics; sums are kept per lane, and rescaled only if the maximum changes."""
    highest = tl.maximum(largest, tl.max(z, 0))
    if highest > largest:
        lower = largest - highest
        shrunk = exp(lower)
        if WITH_ENTROPY:
            moment = (moment + lower * total) * shrunk
        total *= shrunk
    below = z - highest
    exponentials = exp(below)
    if WITH_ENTROPY:
        moment += exponentials * tl.maximum(below, -1e38)  # 0 where z is -inf
    return highest, total + exponentials, moment


@jit(do_not_specialize=["num_rows", "first_column"])
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
    largest = -1e38  # below all logits that matter, but finite, so that differences are finite too
    total = tl.zeros([BLOCK], tl.float32)
    moment = tl.zeros([BLOCK], tl.float32)
    columns = tl.arange(0, BLOCK)
    full_end = end // BLOCK * BLOCK
    for start in range(0, full_end, BLOCK):  # without masks, which would take as long as the sums
        z, _ = change_logits(load_logits(logits, bias, start + columns, None, BIASED), factor, scale, softcap, CAPPED)
        largest, total, moment = _add_columns(z, largest, total, moment, WITH_ENTROPY)
    if full_end < end:
        is_inside = full_end + columns < end
        z, _ = change_logits(
            load_logits(logits, bias, full_end + columns, is_inside, BIASED), factor, scale, softcap, CAPPED
        )
        z = tl.where(is_inside, z, float("-inf"))
        largest, total, moment = _add_columns(z, largest, total, moment, WITH_ENTROPY)
    local = target - first_column
    has_target = (local >= 0) & (local < end)
    z, _ = change_logits(load_logits(logits, bias, local, has_target, BIASED), factor, scale, softcap, CAPPED)
    values += row
    tl.store(values, tl.where(is_counted, largest, 0.0))
    tl.store(values + num_rows, tl.sum(total, 0))
    tl.store(values + 2 * num_rows, tl.sum(moment, 0))
    tl.store(values + 3 * num_rows, tl.where(has_target, z, tl.where(is_counted, float("-inf"), 0.0)))


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
        BLOCK=block_of(num_columns),
        num_warps=NUM_WARPS,
        **kernel_arguments(change, targets),
    )


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
        runs, statistics = runs_triton(logits, use_triton), (stats.largest, stats.log_total, stats.entropy)
        grads = (grad_logprobs, grad_entropy)
        _fill_gradient(out, logits, targets, *statistics, *grads, *pack_change(change), first_column, has_ignored, runs)
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
def _fake_gradient(*_: Any) -> None:
    """Write nothing: on fake tensors the output has its shape and type already."""


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
    target_columns, is_inside = find_targets(targets, first_column, logits.shape[1])
    largest, log_total, entropy = stats
    for rows in row_groups(logits):
        row_change = change.of_rows(rows)
        z = row_change.apply(logits[rows])  # [G, V]
        slope = row_change.slope(z)
        log_p = (z - largest[rows, None]).sub_(log_total[rows, None])
        p = log_p.exp()
        gradient = torch.zeros_like(p)
        if grad_entropy is not None:
            log_p.clamp_(min=torch.finfo(p.dtype).min)
            gradient = log_p.add_(entropy[rows, None]).mul_(p).mul_(-grad_entropy[rows, None])
        if grad_logprobs is not None:
            gradient -= p.mul_(grad_logprobs[rows, None])
            gradient.scatter_add_(1, target_columns[rows, None], (grad_logprobs[rows] * is_inside[rows])[:, None])
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

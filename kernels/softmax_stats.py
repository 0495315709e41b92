"""Softmax statistics of rows of logits, whole or in parts, from which log-probs and entropies follow.

Shapes: R rows, V columns, which may be a part of the vocabulary; P parts. A row's logits x become z (``LogitChange``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, no_type_check

import torch
from torch import Tensor

from rlpipe.kernels.logit_change import LogitChange
from rlpipe.kernels.products import wide
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
    unpack_change,
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
        most = largest.amax(0)
        lower = largest - most
        shrunk = lower.exp()
        moments = (moment + lower * total) * shrunk
        return cls(torch.stack([most, (total * shrunk).sum(0), moments.sum(0), target.amax(0)]))

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
def _fill_nothing(*_: Any) -> None:
    """Do nothing on fake tensors, because the operator returns nothing and its output is already allocated."""


def _stats_torch(
    logits: Tensor, targets: Tensor, change: LogitChange, first_column: int, with_entropy: bool, values: Tensor
) -> None:
    places, is_here = find_targets(targets, first_column, logits.shape[1])
    lowest = torch.finfo(values.dtype).min  # instead of -inf, whose product with 0 is NaN
    for rows in row_groups(logits):
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
    rest = end // BLOCK * BLOCK
    for start in range(0, rest, BLOCK):  # without masks, which would take as long as the sums
        z, _ = change_logits(load_logits(logits, bias, start + columns, None, BIASED), factor, scale, softcap, CAPPED)
        largest, total, moment = _add_columns(z, largest, total, moment, WITH_ENTROPY)
    if rest < end:
        is_inside = rest + columns < end
        z, _ = change_logits(
            load_logits(logits, bias, rest + columns, is_inside, BIASED), factor, scale, softcap, CAPPED
        )
        z = tl.where(is_inside, z, float("-inf"))
        largest, total, moment = _add_columns(z, largest, total, moment, WITH_ENTROPY)
    local = target - first_column
    is_here = (local >= 0) & (local < end)
    z, _ = change_logits(load_logits(logits, bias, local, is_here, BIASED), factor, scale, softcap, CAPPED)
    values += row
    tl.store(values, tl.where(is_counted, largest, 0.0))
    tl.store(values + num_rows, tl.sum(total, 0))
    tl.store(values + 2 * num_rows, tl.sum(moment, 0))
    tl.store(values + 3 * num_rows, tl.where(is_here, z, tl.where(is_counted, float("-inf"), 0.0)))


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

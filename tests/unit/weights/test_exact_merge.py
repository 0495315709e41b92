"""Tests that merged weights are those of exact arithmetic, whatever the order of sums, shards, and earlier versions."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from rlpipe.errors import ModelError
from rlpipe.weights.exact_merge import LowRank, low_rank

OUT, IN, RANK = 12, 20, 5


def make(seed: int, out: int = OUT, width: int = IN, rank: int = RANK) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rank, width, generator=generator), torch.randn(out, rank, generator=generator)


def make_base(dtype: torch.dtype = torch.float32, out: int = OUT, width: int = IN) -> Tensor:
    return torch.randn(out, width, generator=torch.Generator().manual_seed(99)).to(dtype)


def on_grid(values: list[Fraction], bits: int) -> list[Fraction]:
    """Round to multiples of the largest value's power of two over 2^bits; halves to the even multiple."""
    largest = max(map(abs, values))
    exponent = 0
    while Fraction(2) ** exponent > largest:
        exponent -= 1
    while Fraction(2) ** (exponent + 1) <= largest:
        exponent += 1
    grid = Fraction(2) ** (exponent + 1 - bits)
    return [round(value / grid) * grid for value in values]


def expect(base: Tensor, a: Tensor, b: Tensor, scaling: float) -> Tensor:
    """Compute base + scaling · B·A in rational numbers, from factors that are rounded as the module says."""
    rank = a.shape[0]
    bits = next(bits for bits in range(53, 0, -1) if rank * 4**bits <= 2**53)
    scaled = [[Fraction(float(value) * scaling) for value in row] for row in b.tolist()]
    rows = [on_grid(row, bits) for row in scaled]
    columns = [on_grid([Fraction(value) for value in column], bits) for column in a.T.tolist()]
    merged = [
        [
            np.float32(float(Fraction(start) + sum(left * right for left, right in zip(row, column, strict=True))))
            for start, column in zip(begun, columns, strict=True)
        ]
        for begun, row in zip(base.float().tolist(), rows, strict=True)
    ]
    return torch.from_numpy(np.array(merged)).to(base.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [1, 5, 33])
def test_folded_weights_are_those_of_exact_arithmetic(dtype: torch.dtype, rank: int) -> None:
    base, (a, b) = make_base(dtype), make(0, rank=rank)
    merged = low_rank(a, b, 0.7).merge_into(base, dtype)
    assert merged.dtype == dtype
    assert torch.equal(merged, expect(base, a, b, 0.7))


def test_the_product_is_as_exact_as_in_float32() -> None:
    base, (a, b) = make_base(out=64, width=64), make(1, out=64, width=64, rank=16)
    exact = base.double() + 2 * b.double() @ a.double()
    error = (low_rank(a, b, 2.0).merge_into(base, torch.float32) - exact).abs().max()
    assert error < 3 * (base + 2 * b @ a - exact).abs().max()


def test_adapters_in_bfloat16_are_not_rounded_again() -> None:
    a, b = (part.bfloat16() for part in make(2))
    base = make_base()
    exact = (base.double() + 2 * b.double() @ a.double()).float()
    assert torch.equal(low_rank(a, b, 2.0).merge_into(base, torch.float32), exact)


@pytest.mark.parametrize("count", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_ten_thousand_versions_leave_the_base_and_the_last_adapter(count: int) -> None:
    base = make_base(out=4, width=6)
    start, served = base.clone(), base.clone()
    for version in range(count):
        a, b = make(version, out=4, width=6, rank=2)
        served.copy_(low_rank(a, b, 0.5).merge_into(base, torch.float32))
    assert torch.equal(base, start)
    assert torch.equal(served, expect(start, a, b, 0.5))


def shuffled(change: LowRank) -> LowRank:
    order = torch.randperm(change.rows.shape[1], generator=torch.Generator().manual_seed(0))
    return LowRank(change.rows[:, order], change.columns[order], change.magnitude)


@pytest.mark.parametrize("dora", [False, True])
def test_bits_depend_neither_on_the_order_of_sums_nor_on_shards(dora: bool) -> None:
    base, (a, b) = make_base(out=300, width=257), make(3, out=300, width=257, rank=64)
    magnitude = torch.rand(300) if dora else None
    change = low_rank(a, b, 1.3, magnitude)
    merged = change.merge_into(base, torch.float32)
    assert torch.equal(shuffled(change).merge_into(base, torch.float32), merged)
    part = low_rank(a, b[7:9], 1.3, None if magnitude is None else magnitude[7:9])
    assert torch.equal(part.merge_into(base[7:9], torch.float32), merged[7:9])
    if not dora:
        assert torch.equal(low_rank(a[:, 3:50], b, 1.3).merge_into(base[:, 3:50], torch.float32), merged[:, 3:50])
    order = torch.randperm(64)
    assert not torch.equal(b @ a, b[:, order] @ a[order]), "sums in float32 depend on their order"


def test_dora_gives_every_row_its_norm() -> None:
    base, (a, b), magnitude = make_base(out=30, width=21), make(4, out=30, width=21), torch.rand(30)
    merged = low_rank(a, b, 2.0, magnitude).merge_into(base, torch.float32)
    weight = base.double() + 2 * b.double() @ a.double()
    expected = magnitude.double()[:, None] * weight / weight.norm(dim=1, keepdim=True)
    assert torch.allclose(merged.double(), expected, rtol=1e-6, atol=1e-7)
    assert torch.allclose(merged.norm(dim=1), magnitude)


def test_a_transposed_weight_stays_transposed() -> None:
    stored, (a, b) = make_base().T.contiguous(), make(5)
    merged = low_rank(a, b, 2.0).merge_into(stored.T, torch.float32)
    assert merged.T.is_contiguous()
    assert torch.equal(merged, low_rank(a, b, 2.0).merge_into(stored.T.contiguous(), torch.float32))


def test_an_untrained_adapter_changes_nothing() -> None:
    base, (a, b) = make_base(), make(6)
    assert torch.equal(low_rank(a, torch.zeros_like(b), 2.0).merge_into(base, torch.float32), base)


def test_what_can_not_be_folded_is_named() -> None:
    a, b = make(7)
    with pytest.raises(ModelError, match="values that are not finite"):
        low_rank(a, b.fill_(float("nan")), 1.0)
    with pytest.raises(ModelError, match=r"weight of shape \[12, 20\], but the base has \[12, 19\]"):
        low_rank(*make(7), 1.0).merge_into(make_base(width=19), torch.float32)

"""Tests that a strided row's block mask lists the dense mask's blocks, and that flex_attention agrees under both."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from strided_cases import ALL, CASES, Case, blocks, mask_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.integrations.flex_attention import flex_attention_forward

from rlpipe.kernels.strided_mask import StridedMask


def slices_of(case: Case) -> list[slice]:
    """Return the whole row, its documents, each drawing step, and slices with arbitrary ends."""
    row = case.plan()
    steps = [row.step_slice(step) for step in range(row.num_steps)]
    return [slice(None), slice(0, row.num_document_tokens), *steps, slice(2, 5), slice(3, row.num_tokens - 1)]


def tiles(dense: Tensor, size: int) -> Tensor:
    """Return the number of visible pairs in each pair of blocks ``[q, k]``, where padding is not visible."""
    whole = pad(dense, (0, -dense.shape[1] % size, 0, -dense.shape[0] % size))
    return whole.unflatten(1, (-1, size)).unflatten(0, (-1, size)).sum((1, 3))


def lists(table: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in table]


def listed(blocks: BlockMask, kind: str) -> list[list[int]]:
    counts, indices = getattr(blocks, f"{kind}_num_blocks")[0, 0], getattr(blocks, f"{kind}_indices")[0, 0]
    return [row[:count].tolist() for count, row in zip(counts, indices, strict=True)]


def to_dense(blocks: BlockMask) -> Tensor:
    """Return the mask ``[Q, K]`` as a kernel reads it, which calls the mask function for partial blocks only."""
    num_queries, num_keys = blocks.seq_lengths
    asked = blocks.mask_mod(0, 0, torch.arange(num_queries)[:, None], torch.arange(num_keys)[None])  # type: ignore[arg-type]
    size, _ = blocks.BLOCK_SIZE
    dense = torch.zeros(num_queries, num_keys, dtype=torch.bool)
    for query, (partial, full) in enumerate(zip(listed(blocks, "kv"), listed(blocks, "full_kv"), strict=True)):
        rows = slice(query * size, (query + 1) * size)
        for key in partial:
            dense[rows, key * size : (key + 1) * size] = asked[rows, key * size : (key + 1) * size]
        for key in full:
            dense[rows, key * size : (key + 1) * size] = True
    return dense


@pytest.mark.covering(2)
@ALL
@pytest.mark.parametrize("window", [None, 1, 4, 11])
@pytest.mark.parametrize("size", [1, 3, 8, 128])
def test_listed_blocks_are_exactly_those_of_the_dense_mask(case: Case, window: int | None, size: int) -> None:
    mask = mask_of(case)
    for queries in slices_of(case):
        dense = mask.dense(queries, window=window)
        got = mask.blocks(queries, window=window, block_size=size)
        assert got.shape == (1, 1, *dense.shape)
        assert torch.equal(to_dense(got), dense)
        pairs = tiles(dense, size)
        full = pairs == size**2
        assert listed(got, "full_kv") == lists(full)
        assert listed(got, "kv") == lists((pairs > 0) & ~full)
        assert listed(got, "full_q") == lists(full.T)
        assert listed(got, "q") == lists(((pairs > 0) & ~full).T)


def test_blocks_of_all_kinds_occur() -> None:
    got = mask_of(CASES["one column"]).blocks(block_size=8)
    documents = 48 // 8
    full = listed(got, "full_kv")
    assert max(full[documents - 1]) == documents - 2  # tokens of a document see the earlier ones
    assert max(full[-2]) >= documents  # and so do tokens of a column
    assert got.sparsity() > 10


def test_a_row_without_blocks_has_a_mask() -> None:
    mask = mask_of(Case(lengths=(7, 9), blocks=blocks(8, 8, 8)))
    assert torch.equal(to_dense(mask.blocks(block_size=4)), mask.dense())


def test_the_mask_of_a_row_is_made_once_until_it_is_forgotten() -> None:
    mask = mask_of(CASES["documents"])
    first = mask.blocks()
    assert mask.blocks() is first
    assert mask.blocks(window=4) is not first
    mask.forget()
    assert mask.blocks() is not first


def test_no_operation_allocates_all_pairs() -> None:
    case = Case(lengths=(1500, 700), blocks=blocks(8, 8, 8), num_samples=2)
    num_tokens = case.plan().num_tokens

    def largest_allocation(build: Callable[[StridedMask], object]) -> int:
        mask = mask_of(case)
        with torch.profiler.profile(profile_memory=True) as profile:
            build(mask)
        return max(event.cpu_memory_usage for event in profile.events())

    assert largest_allocation(lambda mask: mask.blocks()) < 128 * num_tokens
    assert largest_allocation(lambda mask: mask.blocks(window=100)) < 128 * num_tokens
    assert largest_allocation(lambda mask: mask.dense()) >= num_tokens**2


# Attention ------------------------------------------------------------------------------------------------------------


def make_heads(num_queries: int, num_keys: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries ``[1, 4, Q, 16]``, and keys and values ``[1, 2, K, 16]``."""
    generator = torch.Generator().manual_seed(num_queries)
    shapes = ((1, 4, num_queries, 16), (1, 2, num_keys, 16), (1, 2, num_keys, 16))
    q, k, v = (torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes)
    return q, k, v


@pytest.mark.parametrize("name", ["the defaults", "documents", "one column"])
@pytest.mark.parametrize("window", [None, 4])
def test_attention_equals_that_under_the_dense_mask(name: str, window: int | None) -> None:
    mask = mask_of(CASES[name])
    for queries in (slice(None), CASES[name].plan().step_slice(1)):
        dense = mask.dense(queries, window=window)
        heads = make_heads(*dense.shape, torch.float64)
        actual = flex_attention(*heads, block_mask=mask.blocks(queries, window=window), enable_gqa=True)
        expected = scaled_dot_product_attention(*heads, dense, enable_gqa=True)
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0)


def error_of_compiled(case: Case, queries: slice, window: int | None) -> float:
    """Return the largest error of transformers' compiled attention against plain attention under the dense mask."""
    mask = mask_of(case)
    dense = mask.dense(queries, window=window)
    heads = make_heads(*dense.shape, torch.float32)
    blocks = mask.blocks(queries, window=window)
    actual, _ = flex_attention_forward(nn.Module().eval(), *heads, blocks, scaling=0.25)  # type: ignore[arg-type]
    expected = scaled_dot_product_attention(*heads, dense, scale=0.25, enable_gqa=True)
    return float((actual.transpose(1, 2) - expected).abs().max())


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles")
def test_rows_of_other_lengths_steps_and_windows_need_no_other_kernel() -> None:
    def row(*lengths: int, num_samples: int = 4) -> Case:
        return Case(lengths=lengths, blocks=blocks(8, 8, 8), num_samples=num_samples)

    torch._dynamo.reset()
    counters.clear()
    for case in (row(41), row(90)):  # first a fixed length, then a dynamic one
        assert error_of_compiled(case, slice(None), None) < 1e-6
    with torch.compiler.set_stance("fail_on_recompile"):
        for case in (row(300), row(33, 70), row(192), row(500, num_samples=1), row(37)):
            for window in (None, 16):
                assert error_of_compiled(case, slice(None), window) < 1e-6
        for case in (row(300), row(150, 330)):
            for step in (0, 3, 6):
                assert error_of_compiled(case, case.plan().step_slice(step), None) < 1e-6
    assert counters["stats"]["unique_graphs"] == 2

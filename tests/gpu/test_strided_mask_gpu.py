"""Tests that compiled flex_attention under a strided row's block mask equals plain attention under the dense mask."""

from __future__ import annotations

import pytest
import torch
from strided_cases import Case, blocks, mask_of
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.functional import scaled_dot_product_attention
from transformers.integrations.flex_attention import flex_attention_forward

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
SCALE = 0.125


def row(*lengths: int, num_samples: int = 4) -> Case:
    return Case(lengths=lengths, blocks=blocks(8, 8, 8), num_samples=num_samples)


def attend(
    case: Case, dtype: torch.dtype, window: int | None = None, queries: slice = slice(None)
) -> tuple[list[Tensor], list[Tensor]]:
    """Run transformers' flex_attention and torch's attention in float64.

    Return the outputs of both; for a whole row also the gradients.
    """
    mask = mask_of(case, "cuda")
    dense = mask.dense(queries, window=window)
    num_queries, num_keys = dense.shape
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = ((1, num_queries, 4, 64), (1, num_keys, 2, 64), (1, num_keys, 2, 64), (1, num_queries, 4, 64))
    *heads, weights = (torch.randn(shape, generator=generator, device="cuda", dtype=dtype) for shape in shapes)
    whole = queries == slice(None)
    inputs = [tensor.transpose(1, 2).requires_grad_(whole) for tensor in heads]
    exact = [tensor.detach().double().requires_grad_(whole) for tensor in inputs]
    block_mask = mask.blocks(queries, window=window)
    with torch.set_grad_enabled(whole):
        actual, _ = flex_attention_forward(nn.Module().train(), *inputs, block_mask, scaling=SCALE)  # type: ignore[arg-type]
        expected = scaled_dot_product_attention(*exact, dense, scale=SCALE, enable_gqa=True).transpose(1, 2)
    if not whole:
        return [actual], [expected]
    actual_grads = torch.autograd.grad((actual * weights).sum(), inputs)
    expected_grads = torch.autograd.grad((expected * weights).sum(), exact)
    return [actual, *actual_grads], [expected, *expected_grads]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("window", [None, 100])
def test_attention_and_its_gradients_equal_those_of_the_dense_mask(
    dtype: torch.dtype, tolerance: float, window: int | None
) -> None:
    torch._dynamo.reset()
    for case in (row(300, 41), row(512, num_samples=1), row(640)):
        for queries in (slice(None), case.plan().step_slice(2)):
            for actual, expected in zip(*attend(case, dtype, window, queries), strict=True):
                assert (actual.double() - expected).norm() < tolerance * expected.norm()


def test_rows_of_other_lengths_and_windows_need_no_other_kernel() -> None:
    torch._dynamo.reset()
    counters.clear()
    for case in (row(300), row(413)):  # first a fixed length, then a dynamic one
        attend(case, torch.bfloat16)
    with torch.compiler.set_stance("fail_on_recompile"):
        for case in (row(500), row(640), row(90, 333), row(511, num_samples=1), row(1000)):
            for window in (None, 100):
                attend(case, torch.bfloat16, window)
    assert counters["stats"]["unique_graphs"] == 2

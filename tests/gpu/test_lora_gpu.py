"""Tests that the LoRA linear on a GPU equals float64, and accumulates sums over tokens in the adapter's dtype."""

from __future__ import annotations

import pytest
import torch
from lora_cases import make_lora_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize(("shape", "rank"), [((777,), 16), ((3, 129), 5), ((1,), 8), ((0,), 4)])
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_result_and_gradients_are_those_of_float64(
    dtype: torch.dtype, shape: tuple[int, ...], rank: int, wide: bool, with_bias: bool
) -> None:
    adapter_dtype = torch.float32 if wide else dtype
    inputs = make_lora_inputs(
        shape,
        inputs=515,
        outputs=333,
        rank=rank,
        dtype=dtype,
        adapter_dtype=adapter_dtype,
        with_bias=with_bias,
        device="cuda",
    )
    actual, expected = inputs.both()
    assert [tensor.dtype for tensor in actual[:4]] == [dtype, dtype, adapter_dtype, adapter_dtype]
    for got, want in zip(actual, expected, strict=True):
        assert (got.double() - want).norm() <= TOLERANCES[dtype] * want.norm()


def test_sums_over_tokens_are_not_rounded_where_the_adapter_is_wider() -> None:
    inputs = make_lora_inputs(
        (4096,), inputs=64, outputs=64, dtype=torch.bfloat16, adapter_dtype=torch.float32, device="cuda"
    )
    inputs.down.requires_grad_(False)
    y = inputs.run()
    grad = torch.ones_like(y)
    (grad_up,) = torch.autograd.grad(y, inputs.up, grad)
    low = (1.7 * inputs.x.double() @ inputs.down.double().bfloat16().double().T).bfloat16().double()
    expected = grad.double().T @ low
    assert (
        grad_up.double() - expected
    ).norm() < 5e-4 * expected.norm()  # rounded to bfloat16, they are 1e-3 off and more

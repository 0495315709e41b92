"""Tests that the log-prob kernels on a GPU equal float64, in every dtype, at odd sizes, and with offsets above 32 bits.

``compute-sanitizer python -m pytest tests/gpu/test_logprob_gpu.py -k "not large"`` looks for reads and writes outside
of their tensors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import (
    CHANGES,
    HeadInputs,
    assert_near,
    expect_from_logits,
    make_head_inputs,
    make_targets,
    objective,
    randn,
)

from rlpipe.kernels import softmax
from rlpipe.kernels.logprob import linear_logprob
from rlpipe.kernels.selective import selective_logprob

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROUNDING = {torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Tolerances of gradients, which have the dtype of their tensor."""
PRODUCTS = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
"""Tolerances of products of gradients that were rounded to the dtype of the factors."""
VOCABULARIES = [1, 37, 4096, 4097, 50257, 151936]
FROZEN = ("weight", "bias", "up")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_logprobs_from_logits_equal_float64(dtype: torch.dtype, vocabulary: int, change: dict[str, Any]) -> None:
    whole = (3 * randn(3, 6, vocabulary + 3, seed=0)).to("cuda", dtype).requires_grad_()
    exact = whole.detach().double().requires_grad_()
    targets = make_targets(15, vocabulary, ignored=(0, 7)).view(3, 5).cuda()
    given, wanted = (tensor[:, :-1, 2:-1] for tensor in (whole, exact))  # rows that begin at odd places
    actual, expected = selective_logprob(given, targets, **change), expect_from_logits(wanted, targets, **change)
    assert_near(actual, expected, 5e-6)
    got, want = (torch.autograd.grad(objective(*one), leaf)[0] for one, leaf in ((actual, whole), (expected, exact)))
    assert_near([got], [want], ROUNDING[dtype])
    assert not got[0, 0].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_token_may_have_its_own_temperature(dtype: torch.dtype) -> None:
    logits, targets = randn(9, 5000, seed=0).to("cuda", dtype), make_targets(9, 5000).cuda()
    temperature = (randn(9, seed=1, dtype=torch.float32).abs() + 0.3).cuda()
    actual = selective_logprob(logits, targets, temperature=temperature)
    assert_near(actual, expect_from_logits(logits, targets, temperature=temperature), 5e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("in_place", [False, True])
def test_large_logits_have_offsets_of_64_bits(dtype: torch.dtype, in_place: bool) -> None:
    """Check a tensor with more than 2^31 logits, whose last rows have larger offsets than that."""
    vocabulary = 151_936
    num_tokens = 2**31 // vocabulary + 20
    if num_tokens * vocabulary * dtype.itemsize * (2 - in_place) > 0.8 * torch.cuda.mem_get_info()[0]:
        pytest.skip("needs more memory")
    logits = torch.empty(num_tokens, vocabulary, device="cuda", dtype=dtype)
    logits.normal_(generator=torch.Generator("cuda").manual_seed(0)).requires_grad_()
    targets = make_targets(num_tokens, vocabulary).cuda()
    checked = torch.tensor([0, 1, num_tokens // 2, num_tokens - 2, num_tokens - 1], device="cuda")
    exact = logits.detach()[checked].double().requires_grad_()
    expected = expect_from_logits(exact, targets[checked])
    actual = selective_logprob(logits, targets, in_place=in_place)
    assert_near([one[checked] for one in actual], expected, 5e-6)
    (got,) = torch.autograd.grad(actual[0].sum() + actual[1].sum(), logits)
    (want,) = torch.autograd.grad(expected[0].sum() + expected[1].sum(), exact)
    assert_near([got[checked]], [want], ROUNDING[dtype])


def check(inputs: HeadInputs, dtype: torch.dtype, **options: Any) -> None:
    change = {key: options[key] for key in ("temperature", "scale", "softcap") if key in options}
    exact = inputs.to(torch.float64)
    actual = linear_logprob(targets=inputs.targets, **inputs.tensors, **options)
    logprobs, entropy = exact.expect(**change)
    assert_near(actual, (logprobs, entropy), PRODUCTS[dtype])
    weighed = objective(logprobs, entropy if options.get("entropy_gradient", True) else entropy.detach())
    got = torch.autograd.grad(objective(*actual), inputs.leaves)
    assert_near(got, torch.autograd.grad(weighed, exact.leaves), PRODUCTS[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("frozen", [(), ("weight", "bias"), FROZEN])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("shape", [(131, 96, 4099), (33, 67, 1001)])
def test_logprobs_from_hidden_states_equal_float64(
    dtype: torch.dtype,
    frozen: tuple[str, ...],
    entropy_gradient: bool,
    change: dict[str, Any],
    shape: tuple[int, int, int],
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    inputs = make_head_inputs(*shape, spread=shape[1] ** -0.5, rank=8, dtype=dtype).freeze(*frozen).to("cuda")
    for chunk_tokens in (50, 1024):
        check(inputs, dtype, chunk_tokens=chunk_tokens, entropy_gradient=entropy_gradient, **change)


@pytest.mark.parametrize("trained", [False, True])
def test_large_vocabularies_need_less_than_a_gibibyte(trained: bool) -> None:
    """Check the target shape: 8,192 tokens, a vocabulary of 151,936, and a hidden size of 4,096."""
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        pytest.skip("needs more memory")
    hidden = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(151_936, 4096, device="cuda", dtype=torch.bfloat16).mul_(1 / 64).requires_grad_(trained)
    targets = make_targets(8192, 151_936).cuda()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    logprobs, _ = linear_logprob(hidden, weight, targets, entropy_gradient=False)
    logprobs.sum().backward()
    gradients = sum(leaf.grad.nbytes for leaf in (hidden, weight) if leaf.grad is not None)
    assert torch.cuda.max_memory_allocated() - before - gradients < 2**30


def test_other_numbers_of_tokens_need_no_other_kernel() -> None:
    compiled: list[int] = []

    def count() -> int:
        kernels = (softmax._stats_kernel, softmax._gradient_kernel)
        return sum(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels)

    for num_tokens in (64, 1, 2, 17, 333, 1024):
        logits = torch.randn(num_tokens, 4096, device="cuda", requires_grad=True)
        logprobs, entropy = selective_logprob(
            logits, make_targets(num_tokens, 4096).cuda(), temperature=0.1 * num_tokens
        )
        (logprobs.sum() + entropy.sum()).backward()
        compiled.append(count())
    assert compiled[0] == compiled[-1], "kernels are compiled for the first length alone"

"""Tests that log-probs and entropies from logits equal plain autograd in float64, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import BOTH, CHANGES, EVERY, assert_near, expect_from_logits, make_targets, objective, randn

from rlpipe.kernels.selective import selective_logprob

RESULTS, GRADIENTS = 3e-6, {torch.float64: 1e-11, torch.float32: 3e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Tolerances of the results, and of gradients, which are rounded to the dtype of the logits."""
LAYOUTS = {
    "rows": lambda logits: logits,
    "one row": lambda logits: logits[:1],
    "none": lambda logits: logits[:0],
    "slice of columns": lambda logits: logits[:, 3:-4],
    "batch": lambda logits: logits.view(3, 4, -1),
    "all but the last of each": lambda logits: logits.view(3, 4, -1)[:, :-1],
    "of every second": lambda logits: logits.view(3, 4, -1)[::2, 1:],
    "transposed": lambda logits: logits.view(3, 4, -1).transpose(0, 1),
    "columns apart": lambda logits: logits.T.contiguous().T,
}


def leaf_of(logits: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return logits.to(dtype).clone().requires_grad_()


@pytest.mark.covering(1)
@EVERY
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_equals_float64_autograd_for_every_layout(use_triton: bool, dtype: torch.dtype, layout: Any) -> None:
    leaf = leaf_of(2 * randn(12, 37, seed=0), dtype)
    exact = leaf_of(leaf.detach())
    given, wanted = layout(leaf), layout(exact)
    targets = make_targets(wanted[..., 0].numel(), 30).view(wanted.shape[:-1])
    actual = selective_logprob(given, targets, temperature=0.7, use_triton=use_triton)
    expected = expect_from_logits(wanted, targets, temperature=0.7)
    assert_near(actual, expected, RESULTS)
    got = torch.autograd.grad(objective(*actual), leaf)
    assert got[0].dtype == dtype
    assert_near(got, torch.autograd.grad(objective(*expected), exact), GRADIENTS[dtype])


@pytest.mark.covering(1)
@EVERY
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_equals_float64_autograd_for_every_change(use_triton: bool, dtype: torch.dtype, change: dict) -> None:
    leaf = leaf_of(2 * randn(6, 37, seed=0), dtype)
    exact, targets = leaf_of(leaf.detach()), make_targets(6, 37, ignored=(0, 3))
    actual = selective_logprob(leaf, targets, use_triton=use_triton, **change)
    expected = expect_from_logits(exact, targets, **change)
    assert_near(actual, expected, RESULTS)
    got = torch.autograd.grad(objective(*actual), leaf)
    assert not got[0][[0, 3]].any()
    assert_near(got, torch.autograd.grad(objective(*expected), exact), GRADIENTS[dtype])


@EVERY
def test_each_token_may_have_its_own_temperature(use_triton: bool, dtype: torch.dtype) -> None:
    leaf = leaf_of(randn(3, 4, 37, seed=0), dtype)
    exact, targets = leaf_of(leaf.detach())[:, 1:], make_targets(9, 37).view(3, 3)
    temperature = randn(3, 3, seed=1, dtype=torch.float32).abs() + 0.3
    actual = selective_logprob(leaf[:, 1:], targets, temperature=temperature, use_triton=use_triton)
    expected = expect_from_logits(exact, targets, temperature=temperature)
    assert_near(actual, expected, RESULTS)
    assert_near(
        torch.autograd.grad(objective(*actual), leaf)[0][None, :, 1:],
        torch.autograd.grad(objective(*expected), exact),
        GRADIENTS[dtype],
    )


@pytest.mark.covering(1)
@EVERY
@pytest.mark.parametrize("layout", ["rows", "batch", "all but the last of each"])
def test_in_place_the_gradient_takes_the_memory_of_the_logits(
    use_triton: bool, dtype: torch.dtype, layout: str
) -> None:
    logits, gradients = randn(12, 37, seed=0).to(dtype), []
    targets = make_targets(LAYOUTS[layout](logits)[..., 0].numel(), 37, ignored=(2,))
    for in_place in (False, True):
        taken = LAYOUTS[layout](logits.clone()).detach().requires_grad_()
        results = selective_logprob(taken, targets.view(taken.shape[:-1]), in_place=in_place, use_triton=use_triton)
        (gradient,) = torch.autograd.grad(objective(*results), taken)
        assert (gradient.data_ptr() == taken.data_ptr()) == in_place
        gradients.append(gradient.clone())
    assert torch.equal(*gradients)


@BOTH
def test_using_logits_that_were_overwritten_is_an_error(use_triton: bool) -> None:
    leaf = leaf_of(randn(4, 37, seed=0), torch.float32)
    logits = leaf * 1.0
    other = logits.square().sum()
    logprobs, _ = selective_logprob(logits, make_targets(4, 37), in_place=True, use_triton=use_triton)
    logprobs.sum().backward(inputs=[logits])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()


@BOTH
@pytest.mark.parametrize("used", [0, 1])
def test_either_result_may_be_used_alone(use_triton: bool, used: int) -> None:
    leaf, targets = leaf_of(randn(4, 37, seed=0), torch.float32), make_targets(4, 37)
    exact = leaf_of(leaf.detach())
    actual = selective_logprob(leaf, targets, use_triton=use_triton)[used]
    expected = expect_from_logits(exact, targets)[used]
    assert_near(
        torch.autograd.grad(objective(actual, None), leaf), torch.autograd.grad(objective(expected, None), exact), 3e-6
    )


@BOTH
def test_entropies_may_be_left_out_or_have_no_gradient(use_triton: bool) -> None:
    leaf, targets = leaf_of(randn(4, 37, seed=0), torch.float32), make_targets(4, 37)
    logprobs, entropy = selective_logprob(leaf, targets, use_triton=use_triton)
    without = selective_logprob(leaf, targets, with_entropy=False, use_triton=use_triton)
    assert without[1] is None
    assert torch.equal(without[0], logprobs)
    measured = selective_logprob(leaf, targets, entropy_gradient=False, use_triton=use_triton)[1]
    assert torch.equal(measured, entropy)
    assert not measured.requires_grad


def test_gradients_agree_with_finite_differences() -> None:
    targets, leaf = make_targets(6, 9, ignored=(1,)).view(2, 3), leaf_of(randn(2, 4, 9, seed=0))
    assert torch.autograd.gradcheck(
        lambda logits: selective_logprob(logits[:, :-1], targets, temperature=1.3, scale=0.8, softcap=3.0), (leaf,)
    )


@pytest.mark.parametrize(("shape", "targets"), [((4, 7), (3,)), ((7,), ()), ((2, 2, 2, 7), (2, 2, 2))])
def test_shapes_that_do_not_fit_are_named(shape: tuple[int, ...], targets: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"logits of shape .* and targets of shape .*must be"):
        selective_logprob(torch.zeros(shape), torch.zeros(targets, dtype=torch.long))


@BOTH
def test_logits_are_read_but_not_copied(use_triton: bool) -> None:
    """Check that a slice of a batch is not copied, and that the reference works in groups to save memory."""
    logits = torch.zeros(4, 1025, 512)[:, :-1]
    targets = torch.zeros(4, 1024, dtype=torch.long)
    if use_triton:  # its interpreter is slow
        logits, targets = logits[:, :4], targets[:, :4]
    with torch.profiler.profile(profile_memory=True) as profile:
        selective_logprob(logits, targets, use_triton=use_triton)
    assert max(event.cpu_memory_usage for event in profile.events()) <= max(logits.nbytes // 3, 4096)

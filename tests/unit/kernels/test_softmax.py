"""Tests that both row kernels equal plain autograd in float64; Triton's runs in its interpreter."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
import torch
from kernel_cases import (
    BOTH,
    CHANGES,
    EVERY,
    INTERPRETED,
    assert_near,
    expect_from_logits,
    make_targets,
    objective,
    randn,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rlpipe.kernels.primitives import LogitChange
from rlpipe.kernels.softmax import RowStats, row_gradient, row_stats

TOLERANCES = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-6, torch.float16: 3e-6}
"""Tolerances by the dtype of the logits, whose rounding affects both sides alike."""


def gradient_of(
    logits: Tensor, targets: Tensor, stats: RowStats, how: LogitChange, *, use_triton: bool, **options: object
) -> Tensor:
    """Return the logits' gradient of the objective of log-probs and entropies."""
    results = [one.detach().requires_grad_() for one in (stats.logprobs, stats.entropy)]
    by_logprobs, by_entropy = torch.autograd.grad(objective(*results), results)
    grads = {"grad_logprobs": by_logprobs, "grad_entropy": by_entropy, "out": torch.full_like(logits, math.nan)}
    return row_gradient(logits, targets, stats, how, use_triton=use_triton, **grads | options)


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


@pytest.mark.covering(2)
@EVERY
@pytest.mark.parametrize("vocabulary", [1, 17, 5000])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_statistics_and_gradient_equal_float64(
    use_triton: bool, dtype: torch.dtype, vocabulary: int, change: dict
) -> None:
    logits, targets, how = (
        (3 * randn(5, vocabulary, seed=0)).to(dtype),
        make_targets(5, vocabulary),
        LogitChange(**change),
    )
    leaf = logits.double().clone().requires_grad_()
    expected = expect_from_logits(leaf, targets, **change)
    stats = row_stats(logits, targets, how, use_triton=use_triton)
    assert_near([stats.logprobs, stats.entropy], expected, TOLERANCES[dtype])
    out = torch.full_like(logits, math.nan, dtype=wide(dtype))
    gradient = gradient_of(logits, targets, stats, how, use_triton=use_triton, out=out)
    assert_near([gradient], torch.autograd.grad(objective(*expected), leaf), TOLERANCES[dtype])


@EVERY
@pytest.mark.parametrize("left_out", ["grad_logprobs", "grad_entropy"])
def test_either_gradient_may_be_missing(use_triton: bool, dtype: torch.dtype, left_out: str) -> None:
    logits, targets, how = randn(4, 37, seed=0).to(dtype), make_targets(4, 37), LogitChange(temperature=0.5)
    stats = row_stats(logits, targets, how, use_triton=use_triton)
    out = torch.full_like(logits, math.nan, dtype=wide(dtype))
    gradient = gradient_of(logits, targets, stats, how, use_triton=use_triton, out=out, **{left_out: None})
    leaf = logits.double().clone().requires_grad_()
    logprobs, entropy = expect_from_logits(leaf, targets, temperature=0.5)
    kept = objective(logprobs.detach(), entropy) if left_out == "grad_logprobs" else objective(logprobs, None)
    assert_near([gradient], torch.autograd.grad(kept, leaf), TOLERANCES[dtype])


@EVERY
def test_each_row_may_have_its_own_temperature_and_each_column_a_bias(use_triton: bool, dtype: torch.dtype) -> None:
    logits, bias, targets = randn(6, 37, seed=0).to(dtype), randn(37, seed=1).to(dtype), make_targets(6, 37)
    temperature = randn(6, seed=2, dtype=torch.float32).abs() + 0.3
    how = LogitChange(temperatures=temperature, bias=bias, softcap=3.0)
    leaf = logits.double().clone().requires_grad_()
    expected = expect_from_logits(leaf + bias.double(), targets, temperature=temperature, softcap=3.0)
    stats = row_stats(logits, targets, how, use_triton=use_triton)
    assert_near([stats.logprobs, stats.entropy], expected, TOLERANCES[dtype])
    out = torch.full_like(logits, math.nan, dtype=wide(dtype))
    gradient = gradient_of(logits, targets, stats, how, use_triton=use_triton, out=out)
    assert_near([gradient], torch.autograd.grad(objective(*expected), leaf), TOLERANCES[dtype])


@EVERY
def test_an_ignored_row_has_zeros_whatever_its_logits_are(use_triton: bool, dtype: torch.dtype) -> None:
    logits, targets, how = randn(4, 37, seed=0).to(dtype), make_targets(4, 37, ignored=(1, 2)), LogitChange()
    logits[1:3] = math.nan
    stats = row_stats(logits, targets, how, use_triton=use_triton)
    assert stats.logprobs[1:3].tolist() == stats.entropy[1:3].tolist() == [0, 0]
    gradient = gradient_of(logits, targets, stats, how, use_triton=use_triton)
    assert not gradient[1:3].any()
    assert gradient[[0, 3]].all()


@BOTH
def test_nan_logits_give_nan(use_triton: bool) -> None:
    logits, targets, how = randn(3, 37, seed=0).float(), make_targets(3, 37), LogitChange()
    logits[1, 5] = math.nan
    stats = row_stats(logits, targets, how, use_triton=use_triton)
    assert stats.logprobs.isnan().tolist() == stats.entropy.isnan().tolist() == [False, True, False]
    assert gradient_of(logits, targets, stats, how, use_triton=use_triton)[1].isnan().all()


@EVERY
def test_columns_of_no_probability_take_no_part(use_triton: bool, dtype: torch.dtype) -> None:
    """Check tokens with logits of -inf, more of them than a block of columns, at the beginning and in between."""
    logits, how = randn(3, 9000, seed=0).to(dtype), LogitChange(temperature=0.8)
    is_present = torch.arange(9000) % 3000 > 2800
    masked = logits.masked_fill(~is_present, -math.inf)
    places = is_present.nonzero()[:, 0]
    few, targets = logits[:, places], torch.tensor([0, 5, 200])
    dense, sparse = (
        row_stats(*args, how, use_triton=use_triton) for args in ((few, targets), (masked, places[targets]))
    )
    assert_near([sparse.logprobs, sparse.entropy], [dense.logprobs, dense.entropy], 1e-6)
    out = torch.full_like(masked, math.nan, dtype=wide(dtype))
    gradient = gradient_of(masked, places[targets], sparse, how, use_triton=use_triton, out=out)
    assert not gradient[:, ~is_present].any()
    assert torch.isfinite(gradient).all()


@EVERY
def test_statistics_of_parts_join_to_those_of_the_whole(use_triton: bool, dtype: torch.dtype) -> None:
    logits, targets, how = (
        (4 * randn(5, 50, seed=0)).to(dtype),
        make_targets(5, 50, ignored=(2,)),
        LogitChange(scale=2.0),
    )
    whole = row_stats(logits, targets, how, use_triton=use_triton)
    cuts = [slice(0, 1), slice(1, 20), slice(20, 50)]
    parts = [row_stats(logits[:, cut], targets, how, first_column=cut.start, use_triton=use_triton) for cut in cuts]
    joined = RowStats.join(torch.stack([part.values for part in parts]))
    assert_near([joined.logprobs, joined.entropy], [whole.logprobs, whole.entropy], 1e-6)
    expected = gradient_of(logits, targets, whole, how, use_triton=use_triton)
    for cut in cuts:
        own = gradient_of(logits[:, cut], targets, joined, how, use_triton=use_triton, first_column=cut.start)
        assert_near([own], [expected[:, cut]], 2e-3 if dtype in (torch.float16, torch.bfloat16) else 1e-6)


@BOTH
def test_a_target_outside_of_the_vocabulary_has_no_probability(use_triton: bool) -> None:
    logits = randn(3, 37, seed=0).float()
    stats = row_stats(logits, torch.tensor([37, -1, 3]), LogitChange(), use_triton=use_triton)
    assert stats.logprobs.isneginf().tolist() == [True, True, False]


@BOTH
def test_near_certain_tokens_have_exact_entropies_and_no_positive_logprobs(use_triton: bool) -> None:
    """Check rows in which log Z and the mean logit are so close that their difference would be rounding alone."""
    logits = torch.cat([1000 + 20 * randn(200, 64, seed=0), randn(100, 64, seed=1)]).float()
    logits[:200, 7] += 60
    targets = logits.argmax(1)
    stats = row_stats(logits, targets, LogitChange(), use_triton=use_triton)
    logprobs, entropy = expect_from_logits(logits, targets)
    assert stats.logprobs.max() <= 0
    assert stats.entropy.min() >= 0
    torch.testing.assert_close(stats.entropy.double(), entropy, rtol=1e-5, atol=2e-7)
    torch.testing.assert_close(stats.logprobs.double(), logprobs, rtol=1e-5, atol=2e-7)


@EVERY
def test_rows_may_lie_apart_and_gradients_in_the_memory_of_the_logits(use_triton: bool, dtype: torch.dtype) -> None:
    wider, targets, how = randn(5, 60, seed=0).to(dtype), make_targets(5, 37), LogitChange(temperature=0.7)
    logits, before = wider[:, 11:48], wider.clone()
    stats = row_stats(logits, targets, how, use_triton=use_triton)
    apart = row_stats(logits.contiguous(), targets, how, use_triton=use_triton)
    assert torch.equal(stats.values, apart.values)
    assert torch.equal(wider, before)
    expected = gradient_of(logits.contiguous(), targets, stats, how, use_triton=use_triton)
    gradient_of(logits, targets, stats, how, use_triton=use_triton, out=logits)
    assert torch.equal(wider[:, 11:48], expected)
    assert torch.equal(wider[:, :11], before[:, :11])
    assert torch.equal(wider[:, 48:], before[:, 48:])


@BOTH
def test_rows_may_begin_after_the_last_offset_of_32_bits(use_triton: bool) -> None:
    """Check three short rows that lie far apart in a large allocation, of which only their pages are touched."""
    apart = 2**30 + 1
    memory = torch.empty(2 * apart + 64, dtype=torch.float16)
    logits, targets, how = memory.as_strided((3, 37), (apart, 1)), make_targets(3, 37), LogitChange()
    logits.copy_(randn(3, 37, seed=0))
    stats = row_stats(logits, targets, how, use_triton=use_triton)
    assert torch.equal(stats.values, row_stats(logits.clone(), targets, how, use_triton=use_triton).values)
    expected = gradient_of(logits.clone(), targets, stats, how, use_triton=use_triton)
    assert torch.equal(gradient_of(logits, targets, stats, how, use_triton=use_triton, out=logits), expected)


@INTERPRETED
def test_the_implementations_agree_on_what_they_leave_out() -> None:
    logits, targets = randn(4, 37, seed=0).float(), make_targets(4, 37, ignored=(3,))
    found = [row_stats(logits, targets, LogitChange(), with_entropy=False, use_triton=one) for one in (False, True)]
    for stats in found:
        assert not stats.values[2].any()
    assert_near([found[0].values], [found[1].values], 1e-6)


def test_fake_tensors_meet_one_operator_that_takes_no_memory() -> None:
    """Check that a plan's trace with fake tensors has the operators and the memory of a run on a GPU."""
    seen: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func._schema.name)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Names():
        logits, targets = torch.empty(4096, 150_000), torch.zeros(4096, dtype=torch.long)
        stats = row_stats(logits, targets, LogitChange(softcap=2.0))
        gradient_of(logits, targets, stats, LogitChange(), use_triton=False, out=logits)
    assert seen.count("rlpipe::row_stats") == seen.count("rlpipe::row_gradient") == 1
    assert not {"aten::exp", "aten::amax", "aten::scatter_add_"} & set(seen)


def test_without_triton_the_reference_runs() -> None:
    """Check a machine without Triton."""
    code = (
        "import sys, torch; sys.modules['triton'] = None; from rlpipe.kernels.logprob import linear_logprob;"
        "print(*linear_logprob(torch.zeros(2, 3), torch.zeros(8, 3), torch.zeros(2).long())[0].exp().tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0.125", "0.125"]

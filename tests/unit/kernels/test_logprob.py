"""Tests that log-probs and entropies of the fused lm_head equal plain autograd in float64, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_cases import BOTH, CHANGES, INTERPRETED, HeadInputs, assert_near, make_head_inputs, objective, randn

from rlpipe.kernels.logprob import linear_logits, linear_logprob
from rlpipe.kernels.primitives import IGNORED

FROZEN = ("weight", "bias", "up")
"""The head's own parameters."""
CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "without bias": {"with_bias": False},
    "without lora": {"rank": None},
    "weight alone": {"with_bias": False, "rank": None},
    "nothing ignored": {"ignored": ()},
}
EVERY_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def check(inputs: HeadInputs, tolerance: float, *, entropy_gradient: bool = True, **options: Any) -> None:
    change = {key: options[key] for key in ("temperature", "scale", "softcap") if key in options}
    exact = inputs.to(torch.float64)
    actual = linear_logprob(targets=inputs.targets, **inputs.tensors, entropy_gradient=entropy_gradient, **options)
    expected = exact.expect(**change)
    assert_near(actual, expected, tolerance)
    logprobs, entropy = expected
    weighed = objective(logprobs, entropy if entropy_gradient else entropy.detach())
    got = torch.autograd.grad(objective(*actual), inputs.leaves)
    assert [one.dtype for one in got] == [leaf.dtype for leaf in inputs.leaves]
    assert_near(got, torch.autograd.grad(weighed, exact.leaves), tolerance)


@pytest.mark.parametrize("chunk_tokens", [1, 2, 4, 8, 9, 10, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@EVERY_CASE
def test_equals_float64_autograd_for_every_chunking(chunk_tokens: int, temperature: float, case: dict) -> None:
    check(make_head_inputs(**case), 1e-12, temperature=temperature, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("vocabulary", [63, 64, 65, 200])
def test_equals_float64_autograd_for_every_tiling(vocabulary: int) -> None:
    """Check vocabularies around the tile width, which is a multiple of 64."""
    for chunk_tokens in (1, 2, 3, 5, 8):
        check(make_head_inputs(vocabulary=vocabulary), 1e-12, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("chunk_tokens", [4, 100])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@EVERY_CASE
@pytest.mark.parametrize("frozen", [(), FROZEN])
def test_changed_logits_equal_float64_autograd(
    chunk_tokens: int, change: dict, case: dict, frozen: tuple[str, ...]
) -> None:
    inputs = make_head_inputs(**case).freeze(*frozen)
    plain, changed = inputs.expect()[0], inputs.expect(**change)[0]
    assert not change or (plain - changed).abs().max() > 0.1, "the change has something to do"
    for entropy_gradient in (False, True):
        check(inputs, 1e-12, chunk_tokens=chunk_tokens, entropy_gradient=entropy_gradient, **change)


@pytest.mark.parametrize(
    "frozen", [(), ("weight",), ("weight", "bias"), FROZEN, ("hidden", "states"), ("up", "states")]
)
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("chunk_tokens", [3, 100])
def test_whatever_is_frozen_the_rest_has_its_gradients(
    frozen: tuple[str, ...], entropy_gradient: bool, chunk_tokens: int
) -> None:
    inputs = make_head_inputs().freeze(*frozen)
    check(inputs, 1e-12, temperature=0.8, softcap=3.0, entropy_gradient=entropy_gradient, chunk_tokens=chunk_tokens)


@pytest.mark.parametrize("frozen", [(), FROZEN])
def test_each_token_may_have_its_own_temperature(frozen: tuple[str, ...]) -> None:
    temperature = randn(11, seed=7).abs() + 0.3
    for entropy_gradient in (False, True):
        inputs = make_head_inputs().freeze(*frozen)
        check(inputs, 1e-12, temperature=temperature, chunk_tokens=4, entropy_gradient=entropy_gradient)


@pytest.mark.covering(2)
@INTERPRETED
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("frozen", [(), FROZEN])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_triton_equals_float64_autograd(
    dtype: torch.dtype, frozen: tuple[str, ...], entropy_gradient: bool, change: dict
) -> None:
    """Check float32 and float16, because Triton's interpreter computes bfloat16 wrongly."""
    inputs = make_head_inputs(5, 4, 70, dtype=dtype, ignored=(1,)).freeze(*frozen)
    tolerance = 3e-6 if dtype is torch.float32 else 5e-3
    check(inputs, tolerance, chunk_tokens=2, entropy_gradient=entropy_gradient, use_triton=True, **change)


@pytest.mark.covering(1)
@pytest.mark.parametrize("chunk_tokens", [3, 100])
@pytest.mark.parametrize("frozen", [(), FROZEN])
def test_gradients_agree_with_finite_differences(chunk_tokens: int, frozen: tuple[str, ...]) -> None:
    inputs = make_head_inputs(rank=1).freeze(*frozen)
    names = [name for name, tensor in inputs.tensors.items() if tensor.requires_grad]

    def compute(*leaves: torch.Tensor) -> Any:
        given = inputs.tensors | dict(zip(names, leaves, strict=True))
        return linear_logprob(targets=inputs.targets, temperature=1.3, softcap=4.0, chunk_tokens=chunk_tokens, **given)

    assert torch.autograd.gradcheck(compute, tuple(inputs.leaves))


@BOTH
@pytest.mark.parametrize("frozen", [(), FROZEN])
@pytest.mark.parametrize("used", [0, 1])
def test_either_result_may_be_used_alone(use_triton: bool, frozen: tuple[str, ...], used: int) -> None:
    inputs = make_head_inputs(dtype=torch.float32).freeze(*frozen)
    exact = inputs.to(torch.float64)
    actual = linear_logprob(targets=inputs.targets, chunk_tokens=4, use_triton=use_triton, **inputs.tensors)[used]
    got = torch.autograd.grad(objective(actual, None), inputs.leaves)
    assert_near(got, torch.autograd.grad(objective(exact.expect()[used], None), exact.leaves), 3e-6)


@pytest.mark.parametrize("frozen", [(), FROZEN])
def test_entropy_is_left_out_unless_asked_for(frozen: tuple[str, ...]) -> None:
    inputs = make_head_inputs().freeze(*frozen)
    logprobs, entropy = linear_logprob(targets=inputs.targets, chunk_tokens=4, with_entropy=False, **inputs.tensors)
    assert entropy is None
    assert_near([logprobs], [inputs.expect()[0]], 1e-12)
    got = torch.autograd.grad(objective(logprobs, None), inputs.leaves)
    assert_near(got, torch.autograd.grad(objective(inputs.expect()[0], None), inputs.leaves), 1e-12)


@pytest.mark.parametrize("frozen", [(), FROZEN])
def test_a_measured_entropy_is_the_same_and_has_no_gradient(frozen: tuple[str, ...]) -> None:
    inputs = make_head_inputs().freeze(*frozen)
    _, trained = linear_logprob(targets=inputs.targets, chunk_tokens=4, **inputs.tensors)
    _, measured = linear_logprob(targets=inputs.targets, chunk_tokens=4, entropy_gradient=False, **inputs.tensors)
    assert torch.equal(trained, measured)
    assert trained.requires_grad
    assert not measured.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", [(), FROZEN])
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_low_precision_inputs_have_float32_results(
    dtype: torch.dtype, frozen: tuple[str, ...], entropy_gradient: bool
) -> None:
    inputs = make_head_inputs(dtype=dtype).freeze(*frozen)
    results = linear_logprob(targets=inputs.targets, chunk_tokens=4, **inputs.tensors)
    assert [one.dtype for one in results] == [torch.float32] * 2
    tolerance = {torch.float32: 3e-6, torch.bfloat16: 0.02, torch.float16: 3e-3}[dtype]
    check(inputs, tolerance, chunk_tokens=4, entropy_gradient=entropy_gradient)


def test_hidden_states_come_in_the_type_of_the_weight_and_a_lora_may_be_wider() -> None:
    """Check the dtypes of a typical policy, with an adapter in float32 on a base in bfloat16."""
    inputs = make_head_inputs(dtype=torch.bfloat16).freeze("weight", "bias")
    inputs.up = inputs.up.detach().float().requires_grad_()
    check(inputs, 0.02, chunk_tokens=4)


def count_products(inputs: HeadInputs, *, backward: bool, **options: Any) -> int:
    """Return the number of matrix products with the whole weight."""
    with torch.profiler.profile(record_shapes=True) as forward_profile:
        logprobs, _ = linear_logprob(targets=inputs.targets, chunk_tokens=100, **inputs.tensors, **options)
    with torch.profiler.profile(record_shapes=True) as backward_profile:
        logprobs.sum().backward()
    events = (backward_profile if backward else forward_profile).events()
    return sum(event.name in ("aten::mm", "aten::addmm_") for event in events)


@pytest.mark.parametrize(
    ("frozen", "entropy_gradient", "forward", "backward"),
    [(FROZEN, False, 2, 0), (FROZEN, True, 1, 2), ((), False, 1, 3), ((), True, 1, 3)],
)
def test_a_head_costs_no_more_products_than_it_needs(
    frozen: tuple[str, ...], entropy_gradient: bool, forward: int, backward: int
) -> None:
    """Check that a frozen head needs no product for its gradient, and none at all in the backward pass."""
    for in_backward, expected in ((False, forward), (True, backward)):
        inputs = make_head_inputs(rank=None, with_bias=False).freeze(*frozen)
        assert count_products(inputs, backward=in_backward, entropy_gradient=entropy_gradient) == expected


def test_without_gradients_nothing_but_the_logits_is_formed() -> None:
    inputs = make_head_inputs(rank=None, with_bias=False)
    with torch.no_grad(), torch.profiler.profile() as profile:
        results = linear_logprob(targets=inputs.targets, chunk_tokens=100, **inputs.tensors)
    assert sum(event.name == "aten::mm" for event in profile.events()) == 1
    assert_near(results, inputs.expect(), 1e-12)


@BOTH
@pytest.mark.parametrize("num_tokens", [0, 3])
@pytest.mark.parametrize("frozen", [(), FROZEN])
def test_without_counted_tokens_everything_is_zero(use_triton: bool, num_tokens: int, frozen: tuple[str, ...]) -> None:
    inputs = make_head_inputs(num_tokens, ignored=tuple(range(num_tokens))).freeze(*frozen)
    for entropy_gradient in (False, True):
        logprobs, entropy = linear_logprob(
            targets=inputs.targets,
            chunk_tokens=4,
            entropy_gradient=entropy_gradient,
            use_triton=use_triton,
            **inputs.tensors,
        )
        assert logprobs.tolist() == entropy.tolist() == [0.0] * num_tokens
        for gradient in torch.autograd.grad((logprobs + entropy).sum(), inputs.leaves):
            assert not gradient.any()


def test_ignored_tokens_may_be_named_or_ruled_out() -> None:
    inputs = make_head_inputs(ignored=())
    looked, unlooked = (
        linear_logprob(targets=inputs.targets, chunk_tokens=4, has_ignored=one, **inputs.tensors)
        for one in (True, False)
    )
    assert_near(looked, unlooked, 0)
    inputs.targets[:] = IGNORED
    assert not linear_logprob(targets=inputs.targets, **inputs.tensors)[0].any()


def test_logprobs_of_near_certain_tokens_are_never_positive() -> None:
    hidden = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)) * 20
    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    targets = (hidden @ weight.T).argmax(-1)
    logprobs, _ = linear_logprob(hidden, weight, targets, chunk_tokens=64)
    assert logprobs.max() <= 0
    assert logprobs.min() > -5


@pytest.mark.parametrize("frozen", [(), FROZEN])
def test_no_operation_allocates_all_logits(frozen: tuple[str, ...]) -> None:
    num_tokens, vocabulary, num_bytes = 1024, 8192, 4
    inputs = make_head_inputs(num_tokens, 4, vocabulary, rank=None, with_bias=False, ignored=(), dtype=torch.float32)
    inputs.freeze(*frozen)

    def largest_allocation(chunk_tokens: int) -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            logprobs, _ = linear_logprob(
                targets=inputs.targets, chunk_tokens=chunk_tokens, entropy_gradient=False, **inputs.tensors
            )
            logprobs.sum().backward()
        return max(event.cpu_memory_usage for event in profile.events())

    assert largest_allocation(64) <= 1.1 * 64 * vocabulary * num_bytes
    assert largest_allocation(num_tokens) >= num_tokens * vocabulary * num_bytes


def test_the_backward_pass_of_a_frozen_head_holds_one_row_of_hidden_states() -> None:
    """Check that only the slopes are saved, instead of the hidden states and the weight."""
    inputs = make_head_inputs(32, 16, 100, rank=None, with_bias=False, ignored=()).freeze("weight")
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        linear_logprob(targets=inputs.targets, entropy_gradient=False, **inputs.tensors)
    assert [tensor.shape for tensor in saved] == [(32, 16)]


def test_logits_equal_those_of_the_logprobs() -> None:
    inputs = make_head_inputs(ignored=())
    change = {"temperature": 0.7, "scale": 1.7, "softcap": 2.0}
    logits = linear_logits(**inputs.tensors, **change)
    taken = logits.log_softmax(1).gather(1, inputs.targets[:, None])[:, 0]
    assert_near([taken], [inputs.expect(**change)[0]], 1e-12)
    assert not logits.requires_grad


@pytest.mark.parametrize(
    "shapes", [((4, 6), (9, 5), (4,)), ((4, 6), (9, 6), (3,)), ((2, 2, 6), (9, 6), (4,)), ((4, 6), (9, 6), (4, 1))]
)
def test_shapes_that_do_not_fit_are_named(shapes: tuple[tuple[int, ...], ...]) -> None:
    hidden, weight, targets = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ValueError, match=r"hidden of shape .*, weight .*, targets .*must be"):
        linear_logprob(hidden, weight, targets.long())
    with pytest.raises(ValueError, match="states and up must be given together"):
        linear_logprob(torch.zeros(4, 6), torch.zeros(9, 6), torch.zeros(4).long(), states=torch.zeros(4, 2))

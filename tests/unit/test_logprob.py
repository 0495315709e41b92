"""The log-probs and entropies of the fused lm_head equal those of plain autograd in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rlpipe.kernels.logprob import IGNORED, linear_logprob

NUM_TOKENS, HIDDEN, VOCABULARY = 11, 6, 17


def make_inputs(dtype: torch.dtype = torch.float64, *, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(VOCABULARY, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)
    targets[[0, 4]] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_(), targets


def reference(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.T
    logits = logits if bias is None else logits + bias
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    log_softmax = (logits / temperature).log_softmax(-1)
    counts = targets != IGNORED
    logprobs = log_softmax.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return logprobs * counts, -(log_softmax.exp() * log_softmax).sum(-1) * counts


def objective(logprobs: Tensor, entropy: Tensor | None, num_tokens: int = NUM_TOKENS) -> Tensor:
    """A weighted sum of both results, so that every entry has a gradient of its own."""
    weights = torch.randn(2, num_tokens, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = (logprobs.double() * weights[0]).sum()
    return total if entropy is None else total + (entropy.double() * weights[1]).sum()


@pytest.mark.parametrize("chunk_tokens", [1, 2, 4, 8, 9, 10, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [True, False])
def test_equals_float64_autograd_for_every_chunking(chunk_tokens: int, temperature: float, with_bias: bool) -> None:
    hidden, weight, full_bias, targets = make_inputs()
    bias = full_bias if with_bias else None
    leaves = [hidden, weight, *([full_bias] if with_bias else [])]
    expected = reference(hidden, weight, targets, bias, temperature)
    actual = linear_logprob(hidden, weight, targets, bias=bias, temperature=temperature, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(
        torch.autograd.grad(objective(*actual), leaves),
        torch.autograd.grad(objective(*expected), leaves),
        rtol=1e-11,
        atol=1e-12,
    )


@pytest.mark.parametrize("chunk_tokens", [4, 100])
def test_capped_logits_equal_float64_autograd(chunk_tokens: int) -> None:
    hidden, weight, bias, targets = make_inputs()
    expected = reference(hidden, weight, targets, bias, 0.7, softcap=2.0)
    plain = reference(hidden, weight, targets, bias, 0.7)
    assert float((expected[0] - plain[0]).abs().max()) > 0.1, "the cap has something to do"
    actual = linear_logprob(hidden, weight, targets, bias=bias, temperature=0.7, softcap=2.0, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    leaves = [hidden, weight, bias]
    torch.testing.assert_close(
        torch.autograd.grad(objective(*actual), leaves),
        torch.autograd.grad(objective(*expected), leaves),
        rtol=1e-11,
        atol=1e-12,
    )


@pytest.mark.parametrize("chunk_tokens", [3, 100])
def test_gradients_agree_with_finite_differences(chunk_tokens: int) -> None:
    hidden, weight, bias, targets = make_inputs()

    def compute(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor | None]:
        return linear_logprob(hidden, weight, targets, bias=bias, temperature=1.3, chunk_tokens=chunk_tokens)

    assert torch.autograd.gradcheck(compute, (hidden, weight, bias))


@pytest.mark.parametrize("used", ["logprobs", "entropy"])
def test_either_result_may_be_used_alone(used: str) -> None:
    hidden, weight, bias, targets = make_inputs()
    index = ("logprobs", "entropy").index(used)
    actual = linear_logprob(hidden, weight, targets, bias=bias, chunk_tokens=4)[index]
    expected = reference(hidden, weight, targets, bias, 1.0)[index]
    assert actual is not None
    leaves = [hidden, weight, bias]
    torch.testing.assert_close(
        torch.autograd.grad(objective(actual, None), leaves), torch.autograd.grad(objective(expected, None), leaves)
    )


def test_entropy_is_left_out_unless_asked_for() -> None:
    hidden, weight, _, targets = make_inputs()
    logprobs, entropy = linear_logprob(hidden, weight, targets, chunk_tokens=4, with_entropy=False)
    assert entropy is None
    torch.testing.assert_close(logprobs, reference(hidden, weight, targets, None, 1.0)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_have_float32_results(dtype: torch.dtype) -> None:
    hidden, weight, bias, targets = make_inputs(dtype)
    actual = linear_logprob(hidden, weight, targets, bias=bias, chunk_tokens=4)
    assert actual[1] is not None
    assert actual[0].dtype == actual[1].dtype == torch.float32
    wide = [leaf.detach().double().requires_grad_() for leaf in (hidden, weight, bias)]
    expected = reference(wide[0], wide[1], targets, wide[2], 1.0)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    for got, want in zip(actual, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)
    gradients = torch.autograd.grad(objective(*actual), (hidden, weight, bias))
    assert [gradient.dtype for gradient in gradients] == [dtype] * 3
    for got, want in zip(gradients, torch.autograd.grad(objective(*expected), wide), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_frozen_weight_gets_no_gradient_and_changes_nothing_else() -> None:
    hidden, weight, _, targets = make_inputs()
    (expected,) = torch.autograd.grad(objective(*linear_logprob(hidden, weight, targets, chunk_tokens=4)), hidden)
    objective(*linear_logprob(hidden, weight.detach(), targets, chunk_tokens=4)).backward()
    assert weight.grad is None
    torch.testing.assert_close(hidden.grad, expected, rtol=0, atol=0)


def test_frozen_weight_costs_no_matrix_product() -> None:
    hidden, weight, _, targets = make_inputs()

    def products(weight: Tensor) -> int:
        loss = objective(*linear_logprob(hidden, weight, targets, chunk_tokens=100))
        with torch.profiler.profile() as profile:
            loss.backward()
        return sum(event.count for event in profile.key_averages() if event.key == "aten::mm")

    assert products(weight) == 2
    assert products(weight.detach()) == 1


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_without_counted_tokens_everything_is_zero(num_tokens: int) -> None:
    hidden, weight, bias, _ = make_inputs()
    targets = torch.full((num_tokens,), IGNORED)
    logprobs, entropy = linear_logprob(hidden[:num_tokens], weight, targets, bias=bias, chunk_tokens=4)
    assert entropy is not None
    assert logprobs.tolist() == entropy.tolist() == [0.0] * num_tokens
    for gradient in torch.autograd.grad((logprobs + entropy).sum(), (hidden, weight, bias)):
        assert not gradient.any()


def test_logprobs_of_near_certain_tokens_are_never_positive() -> None:
    hidden = torch.randn(256, 8, generator=torch.Generator().manual_seed(0)) * 20
    weight = torch.randn(50, 8, generator=torch.Generator().manual_seed(1))
    targets = (hidden @ weight.T).argmax(-1)
    logprobs, _ = linear_logprob(hidden, weight, targets, chunk_tokens=64)
    assert logprobs.max() <= 0
    assert logprobs.min() > -5


def test_no_operation_allocates_all_logits() -> None:
    num_tokens, vocabulary, num_bytes = 4096, 2048, 4
    hidden = torch.randn(num_tokens, 4, requires_grad=True)
    weight = torch.randn(vocabulary, 4, requires_grad=True)
    targets = torch.randint(0, vocabulary, (num_tokens,))

    def largest_allocation(chunk_tokens: int) -> int:
        with torch.profiler.profile(profile_memory=True) as profile:
            objective(*linear_logprob(hidden, weight, targets, chunk_tokens=chunk_tokens), num_tokens).backward()
        return max(event.cpu_memory_usage for event in profile.events())

    assert largest_allocation(64) <= 4 * 64 * vocabulary * num_bytes
    assert largest_allocation(num_tokens) >= num_tokens * vocabulary * num_bytes

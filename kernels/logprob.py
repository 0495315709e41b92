"""Log-probs and entropies of tokens from hidden states and the lm_head, without holding all logits.

Shapes: T tokens, H hidden size, V vocabulary, K tokens that are not ignored, C tokens of a chunk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

IGNORED = -100
"""The target of a token that does not count; its log-prob and entropy are 0 and have no gradient."""


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int = 1024,
    with_entropy: bool = True,
    has_ignored: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of ``targets`` under softmax((hidden @ weight.T + bias) / temperature), and the entropy in nats.

    ``softcap`` bounds the logits z, before the temperature, as softcap · tanh(z / softcap) (Gemma).

    ``hidden`` is ``[T, H]``, ``weight`` ``[V, H]``, ``bias`` ``[V]``, ``targets`` ``[T]`` integers, ``IGNORED`` where
    a token does not count; ``has_ignored=False`` says that all do, and spares the look. Returns ``logprobs [T]`` and
    ``entropy [T]`` (None unless asked for), in at least float32. Logits are formed for ``chunk_tokens`` tokens at a
    time, and again in the backward pass; when one chunk holds all tokens, its softmax is kept instead. Differentiable
    in ``hidden``, and in ``weight`` and ``bias`` where they require it, through both results.
    """
    if not has_ignored:
        return _compute(hidden, weight, targets, bias, temperature, softcap, chunk_tokens, with_entropy)
    counted = (targets != IGNORED).nonzero().squeeze(1)  # [K]
    if len(counted) == len(targets):
        return _compute(hidden, weight, targets, bias, temperature, softcap, chunk_tokens, with_entropy)
    logprobs, entropy = _compute(
        hidden.index_select(0, counted),
        weight,
        targets[counted],
        bias,
        temperature,
        softcap,
        chunk_tokens,
        with_entropy,
    )
    zeros = logprobs.new_zeros(len(targets))
    return zeros.index_copy(0, counted, logprobs), None if entropy is None else zeros.index_copy(0, counted, entropy)


def _compute(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    bias: Tensor | None,
    temperature: float,
    softcap: float | None,
    chunk_tokens: int,
    with_entropy: bool,
) -> tuple[Tensor, Tensor | None]:
    logprobs, entropy = LinearLogprob.apply(
        hidden.to(weight.dtype), weight, targets, bias, temperature, softcap, chunk_tokens, with_entropy
    )
    return logprobs, entropy if with_entropy else None


class LinearLogprob(torch.autograd.Function):
    """The torch reference; softmax in float32 or wider, matrix products in the type of the weight.

    For (capped) logits z with p = softmax(z): d logprob / dz = onehot(target) - p, and
    d entropy / dz = -p (log p + entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,  # [K, H]
        weight: Tensor,  # [V, H]
        targets: Tensor,  # [K]
        bias: Tensor | None,  # [V]
        temperature: float,
        softcap: float | None,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(weight.dtype, torch.float32)
        logprobs = hidden.new_empty(len(hidden), dtype=dtype)
        entropy = torch.zeros_like(logprobs)
        log_softmax = None
        for start in range(0, len(hidden), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            log_softmax = _log_softmax(linear_logits(hidden[rows], weight, bias, temperature, softcap))  # [C, V]
            logprobs[rows] = log_softmax.gather(1, targets[rows, None]).squeeze(1)
            if with_entropy:
                entropy[rows] = -torch.linalg.vecdot(log_softmax.exp(), log_softmax)
        kept = log_softmax if len(hidden) <= chunk_tokens and softcap is None else None
        ctx.save_for_backward(hidden, weight, targets, bias, entropy, kept)
        ctx.temperature, ctx.softcap, ctx.chunk_tokens = temperature, softcap, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 8
        hidden, weight, targets, bias, entropy, kept = ctx.saved_tensors
        needs_hidden, needs_weight, _, needs_bias, *_ = ctx.needs_input_grad
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=entropy.dtype) if needs_weight else None
        grad_bias = torch.zeros_like(bias, dtype=entropy.dtype) if needs_bias else None
        for start in range(0, len(hidden), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            slope = None
            if kept is None:
                logits = linear_logits(hidden[rows], weight, bias, ctx.temperature, ctx.softcap)  # [C, V]
                if ctx.softcap is not None:
                    slope = (logits * (ctx.temperature / ctx.softcap)).square_().neg_().add_(1)  # of tanh
            log_softmax = _log_softmax(logits) if kept is None else kept  # [C, V]
            grad_logits = _grad_logits(
                log_softmax,
                targets[rows],
                entropy[rows],
                None if grad_logprobs is None else grad_logprobs[rows] / ctx.temperature,
                None if grad_entropy is None else grad_entropy[rows] / ctx.temperature,
            )
            if slope is not None:
                grad_logits *= slope
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(weight.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, weight, out=grad_hidden[rows])
            if grad_weight is not None:
                grad_weight += grad_logits.T @ hidden[rows]
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None if grad_bias is None else grad_bias.to(bias.dtype),
            *(None, None, None, None),
        )


def linear_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float, softcap: float | None
) -> Tensor:
    """The logits ``[T, V]`` of ``linear_logprob``, in at least float32."""
    logits = functional.linear(hidden, weight, bias).to(torch.promote_types(weight.dtype, torch.float32))  # [C, V]
    if softcap is not None:
        logits = logits.div_(softcap).tanh_().mul_(softcap)
    if temperature != 1.0:
        logits /= temperature
    return logits


def _log_softmax(logits: Tensor) -> Tensor:
    """In the memory of the logits."""
    return logits.sub_(logits.logsumexp(1, keepdim=True))


def _grad_logits(
    log_softmax: Tensor,  # [C, V]
    targets: Tensor,  # [C]
    entropy: Tensor,  # [C]
    grad_logprobs: Tensor | None,  # [C]
    grad_entropy: Tensor | None,  # [C]
) -> Tensor:
    """The gradient of the logits ``[C, V]``; leaves ``log_softmax`` as it is."""
    grad = log_softmax.exp()
    if grad_entropy is not None:
        factor = (log_softmax + entropy[:, None]).mul_(-grad_entropy[:, None])
        grad *= factor if grad_logprobs is None else factor.sub_(grad_logprobs[:, None])
    elif grad_logprobs is not None:
        grad *= -grad_logprobs[:, None]
    if grad_logprobs is not None:
        grad.scatter_add_(1, targets[:, None], grad_logprobs[:, None])
    return grad

"""Log-probs and entropies of tokens from their logits, which are read once, and once more for the gradient.

Shapes: V vocabulary, T tokens in all; ``...`` is one dimension of tokens, or two.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlpipe.kernels.primitives import LogitChange, split_temperature
from rlpipe.kernels.softmax import RowStats, row_gradient, row_stats


def selective_logprob(
    logits: Tensor,
    targets: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = True,
    entropy_gradient: bool = True,
    in_place: bool = False,
    use_triton: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs of ``targets`` under softmax(z), and the entropies in nats.

    z = softcap · tanh(scale · logits / softcap) / temperature. ``logits`` ``[..., V]`` may be a slice along the token
    dimensions, and is then not copied; ``targets`` ``[...]`` are integers, ``IGNORED`` for tokens that do not count;
    ``temperature`` is one number, or one per token ``[...]``. Returns ``logprobs [...]`` and ``entropy [...]`` (None
    without ``with_entropy``), in at least float32; a target outside of the vocabulary gets -inf. Differentiable in the
    logits through both results, or through the log-probs only without ``entropy_gradient``. With ``in_place`` the
    gradient overwrites the logits, which nothing else may need then. ``use_triton`` chooses Triton or torch; None:
    Triton on CUDA.
    """
    if targets.shape != logits.shape[:-1] or not 2 <= logits.ndim <= 3:
        raise ValueError(
            f"logits of shape {[*logits.shape]} and targets of shape {[*targets.shape]}: they must be [..., V] and "
            "[...], with one dimension of tokens or two"
        )
    common_temperature, token_temperatures = split_temperature(temperature)
    change = LogitChange(scale=scale, softcap=softcap, temperature=common_temperature)
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    logprobs, entropy = SelectiveLogprob.apply(
        logits,
        targets,
        None if token_temperatures is None else token_temperatures.expand_as(targets),
        change,
        with_entropy,
        in_place,
        use_triton,
    )
    if not with_entropy:
        return logprobs, None
    return logprobs, entropy if entropy_gradient else entropy.detach()


class SelectiveLogprob(torch.autograd.Function):
    """Log-probs and entropies of logits in P parts of R rows each: one part if all rows are evenly spaced in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,  # [..., V]
        targets: Tensor,  # [...]
        temperatures: Tensor | None,  # [...]
        change: LogitChange,
        with_entropy: bool,
        in_place: bool,
        use_triton: bool | None,
    ) -> tuple[Tensor, Tensor]:
        chunk_values = [
            row_stats(
                chunk,
                chunk_targets,
                replace(change, temperatures=chunk_temperatures),
                with_entropy=with_entropy,
                use_triton=use_triton,
            ).values
            for chunk, chunk_targets, chunk_temperatures in zip(*_split(logits, targets, temperatures), strict=True)
        ]
        values = torch.stack(chunk_values)  # [P, 4, R]
        ctx.save_for_backward(logits, targets, temperatures, values)
        ctx.change, ctx.in_place, ctx.use_triton = change, in_place, use_triton
        ctx.set_materialize_grads(False)
        stats = RowStats(values.transpose(0, 1))
        logprobs = stats.logprobs.reshape(targets.shape)
        return logprobs, stats.entropy.reshape(targets.shape) if with_entropy else torch.zeros_like(logprobs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 7
        logits, targets, temperatures, values = ctx.saved_tensors
        gradient = logits if ctx.in_place else torch.empty_like(logits, memory_format=torch.contiguous_format)
        chunks = _split(logits, targets, temperatures, grad_logprobs, grad_entropy)
        for out, stats, chunk, chunk_targets, chunk_temperatures, chunk_grad_logprobs, chunk_grad_entropy in zip(
            gradient.view(len(values), values.shape[2], logits.shape[-1]), values, *chunks, strict=True
        ):
            row_gradient(
                chunk,
                chunk_targets,
                RowStats(stats),
                replace(ctx.change, temperatures=chunk_temperatures),
                grad_logprobs=chunk_grad_logprobs,
                grad_entropy=chunk_grad_entropy,
                out=out,
                use_triton=ctx.use_triton,
            )
        return gradient, *(None,) * 6


def _split(logits: Tensor, *token_tensors: Tensor | None) -> tuple[Iterable[Any], ...]:
    """Split the logits into chunks ``[P, R, V]``, and per-token tensors into ``[P, R]``; repeat None P times."""
    num_tokens = logits.shape[:-1].numel()
    is_even = logits.ndim == 2 or logits.stride(0) == logits.shape[1] * logits.stride(1)
    chunks = logits.view(1, num_tokens, logits.shape[-1]) if is_even else logits
    return chunks, *(
        [None] * len(chunks) if tensor is None else tensor.reshape(chunks.shape[:2]) for tensor in token_tensors
    )

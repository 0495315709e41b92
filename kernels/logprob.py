"""Log-probs and entropies of tokens from hidden states and the lm_head, without holding all logits in memory.

Shapes: T tokens, H hidden size, V vocabulary (a rank's rows of it, if it is sharded), r rank of a LoRA, K tokens that
are not ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlpipe.kernels.head_gradients import HeadGradients
from rlpipe.kernels.head_tiles import HeadOptions, HeadTiles, VocabularyShard, form_logits, sum_over_shards
from rlpipe.kernels.logit_change import LogitChange, split_temperature
from rlpipe.kernels.products import wide
from rlpipe.kernels.row_access import IGNORED
from rlpipe.kernels.softmax_stats import RowStats


def linear_logprob(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    states: Tensor | None = None,
    up: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
    chunk_tokens: int = 1024,
    with_entropy: bool = True,
    entropy_gradient: bool = True,
    has_ignored: bool = True,
    shard: VocabularyShard | None = None,
    use_triton: bool | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute log-probs of ``targets`` under softmax(z), and the entropies in nats.

    z = softcap · tanh(scale · x / softcap) / temperature, where x = hidden @ weight.T + states @ up.T + bias.
    ``hidden`` is ``[T, H]``, ``weight`` ``[V, H]``, ``bias`` ``[V]``; ``targets`` ``[T]`` are integers, ``IGNORED`` for
    tokens that do not count (``has_ignored=False`` asserts that there are none, and saves the check). ``states``
    ``[T, r]`` and ``up`` ``[V, r]`` belong to an optional LoRA. ``temperature`` is one number, or one per token. With
    ``shard``, weight, up and bias are this rank's rows, and all ranks must make the same call.

    Returns ``logprobs [T]`` and ``entropy [T]`` (None without ``with_entropy``), in at least float32; a target outside
    of the vocabulary gets -inf. Differentiable in all tensors but the temperature, through both results, or only the
    log-probs without ``entropy_gradient``. With ``shard``, the gradients of ``hidden`` and ``states`` are summed over
    the ranks.

    Logits exist for ``chunk_tokens`` tokens at a time, or for more tokens and a correspondingly smaller part of the
    vocabulary. With weight, up and bias frozen and no entropy gradient, the forward pass computes the log-probs'
    slopes, and the backward pass only scales them; else the backward pass forms the logits again. ``use_triton``
    chooses Triton or torch; None: Triton on CUDA.
    """
    _check_shapes(hidden, weight, targets, states, up)
    counted = _counted(targets) if has_ignored else None  # [K]
    of_all, of_each = split_temperature(temperature)
    options = HeadOptions(
        change=LogitChange(scale=scale, softcap=softcap, temperature=of_all),
        chunk_tokens=chunk_tokens,
        shard=shard,
        use_triton=use_triton,
    )
    found = _compute(
        _select(hidden, counted).to(weight.dtype),
        weight,
        bias,
        None if states is None else _select(states, counted).to(weight.dtype),
        None if up is None else up.to(weight.dtype),
        _select(targets, counted),
        None if of_each is None else _select(of_each, counted),
        options,
        with_entropy,
        entropy_gradient,
    )
    if counted is not None:
        found = [one.new_zeros(len(targets)).index_copy(0, counted, one) for one in found]
    return found[0], found[1] if with_entropy else None


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, states: Tensor | None, up: Tensor | None) -> None:
    if hidden.shape != (*targets.shape, weight.shape[1]) or (states is None) != (up is None):
        raise ValueError(
            f"hidden of shape {[*hidden.shape]}, weight {[*weight.shape]}, targets {[*targets.shape]}: they must be "
            "[T, H], [V, H] and [T]; and states need up, as it does states"
        )


def _counted(targets: Tensor) -> Tensor | None:
    """Return the indices of the targets that count; None if all do."""
    counted = (targets != IGNORED).nonzero().squeeze(1)  # [K]
    return None if len(counted) == len(targets) else counted


def _select(tensor: Tensor, counted: Tensor | None) -> Tensor:
    return tensor if counted is None else tensor.index_select(0, counted)


def _compute(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor | None,
    up: Tensor | None,
    targets: Tensor,
    temperatures: Tensor | None,
    options: HeadOptions,
    with_entropy: bool,
    entropy_gradient: bool,
) -> list[Tensor]:
    """Compute log-probs ``[T]``, and entropies ``[T]`` if asked for, with the cheapest way to their gradients."""
    tensors = (hidden, weight, bias, states, up, targets, temperatures)
    is_traced = torch.is_grad_enabled()
    if not is_traced or not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _results(HeadTiles(*tensors, options).stats(with_entropy), with_entropy)
    is_trained = any(tensor is not None and tensor.requires_grad for tensor in (weight, bias, up))
    if is_trained or (with_entropy and entropy_gradient):
        found = [*TrainedHead.apply(*tensors, options, with_entropy)]
        return found if entropy_gradient else [found[0], *(entropy.detach() for entropy in found[1:])]
    return [*FrozenHead.apply(*tensors, options, with_entropy)]


def _results(stats: RowStats, with_entropy: bool) -> list[Tensor]:
    return [stats.logprobs, stats.entropy] if with_entropy else [stats.logprobs]


class FrozenHead(torch.autograd.Function):
    """Log-probs of a frozen head; saves the gradient of each log-prob by its hidden state instead of the state."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, options, with_entropy = arguments
        tiles = HeadTiles(*[*tensors, options])
        slopes = torch.empty_like(tiles.hidden)  # [T, H]
        state_slopes = None if tiles.states is None else torch.empty_like(tiles.states)  # [T, r]
        ones = tiles.weight.new_ones(len(slopes), dtype=tiles.dtype)
        found = []
        for rows, logits in tiles.chunks():
            stats = tiles.stats_of(rows, logits, with_entropy)
            gradient = tiles.gradient_of(rows, slice(None), logits, stats, ones[rows], None)  # [C, V]
            torch.mm(gradient, tiles.weight, out=slopes[rows])
            if tiles.up is not None and state_slopes is not None:
                torch.mm(gradient, tiles.up, out=state_slopes[rows])
            del gradient  # before there is another
            found.append(stats)
        ctx.save_for_backward(slopes, state_slopes)
        ctx.options = options
        ctx.set_materialize_grads(False)
        results = _results(tiles.join(found), with_entropy)
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None:
            return (None,) * 9
        slopes, state_slopes = ctx.saved_tensors
        by_token = grad_logprobs[:, None]
        grads = [
            None if one is None else sum_over_shards(one * by_token, ctx.options.shard).to(one.dtype)
            for one in (slopes, state_slopes)
        ]
        return grads[0], None, None, grads[1], *(None,) * 5


class TrainedHead(torch.autograd.Function):
    """Log-probs and entropies of a trained head, which forms the logits again in the backward pass.

    They are formed for all tokens and one part of the vocabulary at a time, so that each row of a weight's gradient
    comes from a single product.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        *tensors, options, with_entropy = arguments
        stats = HeadTiles(*[*tensors, options]).stats(with_entropy)
        ctx.save_for_backward(*tensors, stats.values)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return tuple(_results(stats, with_entropy))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, *of_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_entropy = of_entropy[0] if of_entropy else None
        if grad_logprobs is None and grad_entropy is None:
            return (None,) * 9
        *tensors, values = ctx.saved_tensors
        tiles = HeadTiles(*[*tensors, ctx.options])
        stats, gradients = RowStats(values), HeadGradients.make(tiles, ctx.needs_input_grad)
        for columns, logits in tiles.columns():
            gradient = tiles.gradient_of(slice(None), columns, logits, stats, grad_logprobs, grad_entropy)
            gradients.add(columns, gradient)  # [T, N]
            del gradient  # before there is another
        return *gradients.finished(), *(None,) * 4


def linear_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    states: Tensor | None = None,
    up: Tensor | None = None,
    temperature: float | Tensor = 1.0,
    scale: float = 1.0,
    softcap: float | None = None,
) -> Tensor:
    """Compute all of z ``[T, V]`` of ``linear_logprob``, in at least float32, without gradient."""
    of_all, of_each = split_temperature(temperature)
    change = LogitChange(scale=scale, softcap=softcap, temperature=of_all, temperatures=of_each, bias=bias)
    with torch.no_grad():
        out = hidden.new_empty(len(hidden), len(weight), dtype=wide(weight.dtype))
        return change.apply_(form_logits(hidden, weight, states, up, out))

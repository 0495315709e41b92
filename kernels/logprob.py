"""Log-probs and entropy of chosen tokens from hidden states, without the whole matrix of logits.

Matrix products run in torch (cuBLAS); the rest of a tile's work is one pass of a kernel over its rows. Shapes:
T tokens, H hidden size, V vocabulary (a rank's rows of it, if it is sharded), r rank of a LoRA, C tokens of a chunk,
N columns of a tile.

Shapes: T tokens, H hidden size, V vocabulary, r rank of a LoRA, N columns of a tile.

Shapes: T tokens, H hidden size, V vocabulary (a rank's rows of it, if it is sharded), r rank of a LoRA, K tokens that
are not ignored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlpipe.kernels.primitives import IGNORED, LogitChange, add_product, product, split_temperature, wide
from rlpipe.kernels.softmax import RowStats, row_gradient, row_stats

COLUMN_MULTIPLE = 64
"""Tile widths are multiples of this, so that each row of a tile begins where tensor cores can read it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class VocabularyShard:
    """This rank's rows of an lm_head that is sharded over the ranks of a group, which all have the same tokens."""

    group: dist.ProcessGroup
    first_row: int
    """Index of this rank's first row in the whole vocabulary."""


@dataclass(kw_only=True, slots=True, frozen=True)
class HeadOptions:
    """Options of log-probs: a change of the logits, tokens at a time, sharding, and the use of Triton."""

    change: LogitChange
    """Change that is the same for all tokens and columns."""
    chunk_tokens: int
    shard: VocabularyShard | None
    use_triton: bool | None


@dataclass(slots=True, frozen=True)
class HeadTiles:
    """The tensors that logits are computed from, tile by tile."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V]
    states: Tensor | None  # [T, r]
    up: Tensor | None  # [V, r]
    targets: Tensor  # [T]
    temperatures: Tensor | None  # [T]
    options: HeadOptions

    @property
    def dtype(self) -> torch.dtype:
        """Type of the logits."""
        return wide(self.weight.dtype)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits ``[C, V]`` of one chunk of tokens after another; they may be overwritten."""
        buffer = self.weight.new_empty(
            min(self.options.chunk_tokens, len(self.hidden)), len(self.weight), dtype=self.dtype
        )
        for start in range(0, len(self.hidden), self.options.chunk_tokens):
            rows = slice(start, min(start + self.options.chunk_tokens, len(self.hidden)))
            yield rows, self._logits(rows, slice(None), buffer[: rows.stop - start])

    def columns(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the logits ``[T, N]`` of all tokens for one part of the vocabulary after another.

        The tiles are about as large as those of ``chunks``.
        """
        num_tokens, vocabulary = len(self.hidden), len(self.weight)
        num_tiles = math.ceil(num_tokens / self.options.chunk_tokens)
        width = math.ceil(vocabulary / num_tiles / COLUMN_MULTIPLE) * COLUMN_MULTIPLE if num_tiles > 1 else vocabulary
        buffer = self.weight.new_empty(num_tokens * width, dtype=self.dtype)
        for start in range(0, vocabulary, width):
            columns = slice(start, min(start + width, vocabulary))
            size = columns.stop - start
            yield columns, self._logits(slice(None), columns, buffer[: num_tokens * size].view(num_tokens, size))

    def stats(self, with_entropy: bool) -> RowStats:
        """Compute the statistics of all tokens."""
        return self.join([self.stats_of(rows, logits, with_entropy) for rows, logits in self.chunks()])

    def join(self, chunks: Sequence[RowStats]) -> RowStats:
        """Concatenate the statistics of all chunks."""
        values = [chunk.values for chunk in chunks]
        return RowStats(torch.cat(values, 1) if values else self.weight.new_empty(4, 0, dtype=self.dtype))

    def stats_of(self, rows: slice, logits: Tensor, with_entropy: bool) -> RowStats:
        """Compute the statistics of a chunk over the whole vocabulary, including other ranks' shards."""
        local_stats = row_stats(
            logits,
            self.targets[rows],
            self._change.of_rows(rows),
            first_column=self._first_row,
            with_entropy=with_entropy,
            use_triton=self.options.use_triton,
        )
        if self.options.shard is None:
            return local_stats
        group = self.options.shard.group
        num_ranks, (num_values, num_rows) = dist.get_world_size(group), local_stats.values.shape
        gathered = local_stats.values.new_empty(num_ranks * num_values, num_rows)
        dist.all_gather_into_tensor(gathered, local_stats.values, group=group)
        return RowStats.join(gathered.view(num_ranks, num_values, num_rows))

    def gradient_of(
        self,
        rows: slice,
        columns: slice,
        logits: Tensor,
        stats: RowStats,
        grad_logprobs: Tensor | None,
        grad_entropy: Tensor | None,
    ) -> Tensor:
        """Compute the gradient of a tile's logits, in the weight's type; it overwrites logits of the same type."""
        gradient = logits if logits.dtype == self.weight.dtype else torch.empty_like(logits, dtype=self.weight.dtype)
        return row_gradient(
            logits,
            self.targets[rows],
            stats,
            self._change.of_rows(rows).of_columns(columns),
            grad_logprobs=grad_logprobs,
            grad_entropy=grad_entropy,
            out=gradient,
            first_column=self._first_row + (columns.start or 0),
            has_ignored=False,
            use_triton=self.options.use_triton,
        )

    @property
    def _change(self) -> LogitChange:
        return replace(self.options.change, temperatures=self.temperatures, bias=self.bias)

    @property
    def _first_row(self) -> int:
        return 0 if self.options.shard is None else self.options.shard.first_row

    def _logits(self, rows: slice, columns: slice, out: Tensor) -> Tensor:
        states = None if self.states is None else self.states[rows]
        up = None if self.up is None else self.up[columns]
        return form_logits(self.hidden[rows], self.weight[columns], states, up, out)


def form_logits(hidden: Tensor, weight: Tensor, states: Tensor | None, up: Tensor | None, out: Tensor) -> Tensor:
    """Compute logits before any change into ``out`` ``[T, V]``, at least float32; other shapes as in ``HeadTiles``."""
    product(hidden, weight.T, out)
    if states is not None and up is not None:
        add_product(out, states, up.T)
    return out


def sum_over_shards(tensor: Tensor, shard: VocabularyShard | None) -> Tensor:
    """Sum a tensor over the ranks of a shard's group in place; without a shard, leave it unchanged."""
    if shard is not None:
        dist.all_reduce(tensor, group=shard.group)
    return tensor


@dataclass(slots=True, frozen=True)
class HeadGradients:
    """Gradients of an lm_head's tensors, None for those not needed.

    Those of ``hidden`` and ``states`` are sums over all tiles, and have the type of the logits.
    """

    tiles: HeadTiles
    hidden: Tensor | None  # [T, H]
    weight: Tensor | None  # [V, H]
    bias: Tensor | None  # [V]
    states: Tensor | None  # [T, r]
    up: Tensor | None  # [V, r]

    @classmethod
    def make(cls, tiles: HeadTiles, needed: Sequence[bool]) -> HeadGradients:
        """Allocate the gradients that are ``needed``, flags in the order of the tensors."""

        def zeros(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.zeros_like(tensor, dtype=tiles.dtype)

        def empty(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else torch.empty_like(tensor)

        makers = (
            (zeros, tiles.hidden),
            (empty, tiles.weight),
            (empty, tiles.bias),
            (zeros, tiles.states),
            (empty, tiles.up),
        )
        return cls(
            tiles,
            *(make(tensor) if is_needed else None for (make, tensor), is_needed in zip(makers, needed, strict=False)),
        )

    def add(self, columns: slice, gradient: Tensor) -> None:
        """Add the contribution of a tile, whose logits have the given ``gradient`` ``[T, N]``."""
        tiles = self.tiles
        if self.hidden is not None:
            add_product(self.hidden, gradient, tiles.weight[columns])
        if self.states is not None and tiles.up is not None:
            add_product(self.states, gradient, tiles.up[columns])
        if self.weight is not None:
            torch.mm(gradient.T, tiles.hidden, out=self.weight[columns])
        if self.up is not None and tiles.states is not None:
            torch.mm(gradient.T, tiles.states, out=self.up[columns])
        if self.bias is not None:
            self.bias[columns] = gradient.sum(0, dtype=tiles.dtype)

    def finished(self) -> list[Tensor | None]:
        """Return the gradients in the order and the types of the tensors, summed over shards where necessary."""
        shard = self.tiles.options.shard
        hidden, states = (
            None if gradient is None else sum_over_shards(gradient, shard).to(self.tiles.weight.dtype)
            for gradient in (self.hidden, self.states)
        )
        return [hidden, self.weight, self.bias, states, self.up]


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
    common_temperature, token_temperatures = split_temperature(temperature)
    options = HeadOptions(
        change=LogitChange(scale=scale, softcap=softcap, temperature=common_temperature),
        chunk_tokens=chunk_tokens,
        shard=shard,
        use_triton=use_triton,
    )
    results = _compute(
        _select(hidden, counted).to(weight.dtype),
        weight,
        bias,
        None if states is None else _select(states, counted).to(weight.dtype),
        None if up is None else up.to(weight.dtype),
        _select(targets, counted),
        None if token_temperatures is None else _select(token_temperatures, counted),
        options,
        with_entropy,
        entropy_gradient,
    )
    if counted is not None:
        results = [result.new_zeros(len(targets)).index_copy(0, counted, result) for result in results]
    return results[0], results[1] if with_entropy else None


def _check_shapes(hidden: Tensor, weight: Tensor, targets: Tensor, states: Tensor | None, up: Tensor | None) -> None:
    if hidden.shape != (*targets.shape, weight.shape[1]) or (states is None) != (up is None):
        raise ValueError(
            f"hidden of shape {[*hidden.shape]}, weight {[*weight.shape]}, targets {[*targets.shape]}: they must be "
            "[T, H], [V, H] and [T]; and states and up must be given together"
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
        results = [*TrainedHead.apply(*tensors, options, with_entropy)]
        return results if entropy_gradient else [results[0], *(entropy.detach() for entropy in results[1:])]
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
        chunk_stats = []
        for rows, logits in tiles.chunks():
            stats = tiles.stats_of(rows, logits, with_entropy)
            gradient = tiles.gradient_of(rows, slice(None), logits, stats, ones[rows], None)  # [C, V]
            torch.mm(gradient, tiles.weight, out=slopes[rows])
            if tiles.up is not None and state_slopes is not None:
                torch.mm(gradient, tiles.up, out=state_slopes[rows])
            del gradient  # before there is another
            chunk_stats.append(stats)
        ctx.save_for_backward(slopes, state_slopes)
        ctx.options = options
        ctx.set_materialize_grads(False)
        results = _results(tiles.join(chunk_stats), with_entropy)
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad_logprobs is None:
            return (None,) * 9
        slopes, state_slopes = ctx.saved_tensors
        token_grads = grad_logprobs[:, None]
        grads = [
            None if slope is None else sum_over_shards(slope * token_grads, ctx.options.shard).to(slope.dtype)
            for slope in (slopes, state_slopes)
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
    common_temperature, token_temperatures = split_temperature(temperature)
    change = LogitChange(
        scale=scale, softcap=softcap, temperature=common_temperature, temperatures=token_temperatures, bias=bias
    )
    with torch.no_grad():
        out = hidden.new_empty(len(hidden), len(weight), dtype=wide(weight.dtype))
        return change.apply_(form_logits(hidden, weight, states, up, out))

"""Packing of a micro batch into one row, in which sequences share their common beginnings, and the row's attention.

Shapes: N tokens and S sequences of the micro batch, M tokens of its row, K loss tokens, L tokens of the longest
sequence of a block.

A packed row of M tokens under a dense mask costs M² in time and memory; cut into sequences of length L, it costs M·L
and runs on the plain causal kernels. Shapes: h query heads, g heads of keys and values, d channels per head.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from hashlib import blake2b
from inspect import signature
from itertools import cycle, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward

from rlpipe.data.packing import PrefixIndex
from rlpipe.errors import ModelError
from rlpipe.kernels.strided_mask import StridedMask
from rlpipe.types import Images, MicroBatch, PlacedImage

Indices = NDArray[np.int64]

BLOCK_GROWTH = 1.5
"""The longest sequence of a block is at most this many times its shortest, which bounds the padding in attention."""


class AttentionLayout(Enum):
    """Ways to run the sequences of a micro batch."""

    SHARED = "in one row, common beginnings once, kept apart by the plan of its attention"
    POSITIONS = "in one row, kept apart by position ids that restart"
    APART = "each in a row of its own, filled up at the end"
    ALONE = "each in a pass of its own"


PLANNED = {AttentionLayout.SHARED, AttentionLayout.APART}


@dataclass(kw_only=True, slots=True, frozen=True)
class AttentionPlan:
    """The cut of a row into blocks of sequences of similar length, for attention within each sequence alone.

    A block ``[S, L]`` holds the index in the row of each token of its sequences; shorter sequences are padded at the
    end, where causal attention never looks. ``selected`` holds, for each token of the row, the index of its output in
    the concatenated outputs of all blocks.
    """

    blocks: list[Tensor]  # each [S, L], into the row
    selected: Tensor  # [M], into the sum of S * L
    groups: list[Tensor | None] | None = None  # [S, L] of each block
    """Tokens with the same number above 0 see each other in both directions; None if a block has no such tokens."""
    groups_in_full: bool = True
    """True if the groups apply in layers of full attention, too."""
    groups_past_window: bool = False
    """True if the groups apply to tokens that are further apart than a layer's window, too."""
    has_shared: bool = True
    """False if each token of the row is in one sequence alone."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Row:
    """One row for the backbone, with the tokens in it that predict the micro batch's loss tokens."""

    token_ids: Tensor  # [M]
    position_ids: Tensor  # [M], or [P, M] where tokens have several
    predictors: Tensor  # [K], the token of the row that predicts each loss token
    loss_tokens: Tensor  # [K], indices of the loss tokens in the micro batch
    targets: Tensor  # [K], token ids of the loss tokens
    attention: AttentionPlan | None = None
    """Attention plan in layout ``SHARED``; in ``APART``, a plan whose single block holds each sequence as a row."""
    mask: StridedMask | None = None
    """Attention mask of EBFT's strided rows, which have no plan."""
    sequences: Sequence[Indices] = ()
    """Indices in the row of each sequence's tokens, on the host."""
    images: Images = ()
    """Images, with their positions in the row."""
    num_shared: int = 0
    """Tokens of sequences that are not in the row, because an earlier sequence has them."""
    vision: Mapping[str, Tensor] = field(default_factory=dict)
    """Model inputs for the images, by argument name; on the host until a pass needs them."""


@dataclass(slots=True)
class _RowBuilder:
    """The tokens of a row that is being built, with the indices of each sequence's tokens."""

    sources: list[Indices] = field(default_factory=list)  # pieces of the micro batch, in the order of the row
    sequences: list[Indices] = field(default_factory=list)  # indices in the row of each sequence's tokens
    num_tokens: int = 0
    images: list[PlacedImage] = field(default_factory=list)
    prefixes: PrefixIndex = field(default_factory=PrefixIndex)
    paths: list[Indices] = field(default_factory=list)  # indices of each sequence in the prefix index
    num_shared: int = 0

    def append(self, start: int, stop: int, images: Images = ()) -> Indices:
        """Append a piece of the micro batch, and return its indices in the row."""
        indices = np.arange(self.num_tokens, self.num_tokens + stop - start)
        self.sources.append(np.arange(start, stop))
        self.images += [image.moved(self.num_tokens - start) for image in _images_within(images, start, stop)]
        self.num_tokens += stop - start
        return indices

    def append_shared(self, token_ids: Indices, start: int, stop: int, images: Images) -> Indices:
        """Append what no earlier sequence begins with; return the indices of all tokens, and note a new sequence."""
        number, shared = self.prefixes.add(
            _with_image_digests(token_ids[start:stop], _images_within(images, start, stop), start)
        )
        shared_indices = self.paths[number][:shared] if shared else np.zeros(0, np.int64)
        indices = np.concatenate([shared_indices, self.append(start + shared, stop, images)])
        self.paths.append(indices)
        self.num_shared += shared
        if start + shared < stop:
            self.sequences.append(indices)
        return indices


def _with_image_digests(token_ids: Indices, images: Images, start: int) -> Indices:
    """Return the tokens of a sequence with numbers below 0 for those of images, which differ by their pixels."""
    if not images:
        return token_ids
    marked = token_ids.copy()
    for image in images:
        digest = int.from_bytes(blake2b(image.content, digest_size=7).digest(), "little")
        marked[image.start - start : image.start - start + image.num_tokens] = -1 - digest
    return marked


def plan_row(micro_batch: MicroBatch, *, layout: AttentionLayout, device: torch.device) -> Row:
    """Plan the row of a micro batch, without the tokens that predict no loss token.

    A sequence is cut after the token that predicts its last loss token, and dropped if it has no loss tokens. In
    ``AttentionLayout.SHARED``, sequences share the tokens and images with which they begin alike. A micro
    batch without loss tokens becomes a row of one token, for a rank that runs it only because others have work. If it
    has images, its row has at least one.
    """
    loss_tokens = np.flatnonzero(micro_batch.loss_mask)
    builder = _RowBuilder()
    predictors = []
    starts = micro_batch.sequence_starts
    first_losses = np.searchsorted(loss_tokens, starts)  # [S + 1], into loss_tokens
    for index, (begin, end) in enumerate(pairwise(first_losses)):
        if begin == end:
            continue
        start, last = int(starts[index]), int(loss_tokens[end - 1])
        if layout is AttentionLayout.ALONE:  # a token may attend to a later image, so all images are kept
            ends = [image.start + image.num_tokens for image in micro_batch.images if image.start < starts[index + 1]]
            last = max([last, *ends])
        if layout is AttentionLayout.SHARED:
            indices = builder.append_shared(micro_batch.token_ids, start, last, micro_batch.images)
        else:
            indices = builder.append(start, last, micro_batch.images)
            builder.sequences.append(indices)
        predictors.append(indices[loss_tokens[begin:end] - 1 - start])
    if micro_batch.images and not builder.images:
        image = micro_batch.images[0]
        start = int(starts[np.searchsorted(starts, image.start, side="right") - 1])
        builder.sequences.append(builder.append(start, image.start + image.num_tokens, (image,)))
    elif not predictors:
        builder.sequences.append(builder.append(0, 1))
    return _to_row(micro_batch, builder, predictors, loss_tokens, layout, device)


def to_device(array: NDArray[np.integer], device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device, non_blocking=True)


def _to_row(
    micro_batch: MicroBatch,
    builder: _RowBuilder,
    predictors: list[Indices],
    loss_tokens: Indices,
    layout: AttentionLayout,
    device: torch.device,
) -> Row:
    sources = np.concatenate(builder.sources)
    tensor = partial(to_device, device=device)
    return Row(
        token_ids=tensor(micro_batch.token_ids[sources]),
        position_ids=tensor(micro_batch.position_ids[sources]),
        predictors=tensor(np.concatenate(predictors) if predictors else np.zeros(0, np.int64)),
        loss_tokens=tensor(loss_tokens),
        targets=tensor(micro_batch.token_ids[loss_tokens]),
        attention=_plan_attention(builder, layout, device) if layout in PLANNED else None,
        sequences=builder.sequences,
        images=tuple(builder.images),
        num_shared=builder.num_shared,
    )


def _images_within(images: Images, start: int, stop: int) -> Images:
    return tuple(image for image in images if start <= image.start < stop)


def _plan_attention(builder: _RowBuilder, layout: AttentionLayout, device: torch.device) -> AttentionPlan:
    growth = BLOCK_GROWTH if layout is AttentionLayout.SHARED else math.inf
    ordered = sorted(builder.sequences, key=len)
    blocks: list[Tensor] = []
    selected = np.zeros(builder.num_tokens, np.int64)
    offset = first = 0
    while first < len(ordered):
        last = first + 1
        while last < len(ordered) and len(ordered[last]) <= growth * len(ordered[first]):
            last += 1
        longest = len(ordered[last - 1])
        block = np.empty((last - first, longest), np.int64)
        for slot, indices in enumerate(ordered[first:last]):
            block[slot, : len(indices)] = indices
            block[slot, len(indices) :] = indices[0]
            selected[indices] = np.arange(offset, offset + len(indices))
            offset += longest
        blocks.append(torch.from_numpy(block).to(device, non_blocking=True))
        first = last
    return AttentionPlan(
        blocks=blocks,
        selected=torch.from_numpy(selected).to(device, non_blocking=True),
        has_shared=sum(map(len, ordered)) > builder.num_tokens,
    )


NAME = "rlpipe_packed"
FLEX = "flex_attention"
REPLACED_LAYERS = {"full_attention", "sliding_attention"}
"""Layer types whose attention this module implements."""
MASKED_LAYERS = REPLACED_LAYERS | {"chunked_attention"}
"""Layer types that transformers masks by position ids; others, such as linear attention, mix sequences."""


def find_layout(model: PreTrainedModel, implementation: str) -> AttentionLayout:
    """Return how a model keeps sequences apart, given transformers' attention implementation."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if not model.is_backend_compatible() or not layers <= MASKED_LAYERS:
        return AttentionLayout.APART
    if model.base_model is not model and "cross_attention_mask" in signature(model.base_model.forward).parameters:
        return AttentionLayout.ALONE  # tokens before a sequence's first image attend to all images of the pass
    replaceable = implementation == "sdpa" and layers <= REPLACED_LAYERS and not chunked
    return AttentionLayout.SHARED if replaceable else AttentionLayout.POSITIONS


def use_packed_attention(model: PreTrainedModel) -> None:
    """Make the language model's attention run by attention plans; a vision tower keeps its own attention."""
    has_text_config = getattr(model.config, "text_config", None) is not None
    model.set_attn_implementation({"text_config": NAME} if has_text_config else NAME)


def use_masks(model: PreTrainedModel, implementation: str, *, takes_flex: bool) -> None:
    """Make a model's attention take rlpipe's masks: with ``takes_flex`` flex_attention's, else dense ones.

    Raises ``ModelError`` if the model has other kinds of layers, or caps its attention outside of eager mode.
    """
    config = model.config.get_text_config()
    if find_layout(model, "sdpa") is not AttentionLayout.SHARED:
        raise ModelError(
            f"{type(model).__name__} can't use custom attention masks, which algorithm.kind=ebft_strided needs"
        )
    if implementation != "eager":
        if getattr(config, "attn_logit_softcapping", None) is not None:
            raise ModelError(f"{type(model).__name__} caps its attention: set model.attention=eager")
        implementation = FLEX if takes_flex and model._supports_flex_attn else "sdpa"
    model.set_attn_implementation(implementation)


def mask_for(model: PreTrainedModel, mask: StridedMask, queries: slice = slice(None)) -> Any:
    """Return the mask in the form that the model's attention takes; a dict by layer type if these differ."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ())
    if not layer_types:
        return _to_attention_mask(model, mask, queries, getattr(config, "sliding_window", None))
    if layer_types == {"full_attention"}:
        return _to_attention_mask(model, mask, queries, None)
    windows = {
        layer_type: config.sliding_window if layer_type == "sliding_attention" else None for layer_type in layer_types
    }
    return {layer_type: _to_attention_mask(model, mask, queries, window) for layer_type, window in windows.items()}


def _to_attention_mask(model: PreTrainedModel, mask: StridedMask, queries: slice, window: int | None) -> Any:
    implementation = model.config.get_text_config()._attn_implementation
    if implementation == FLEX:
        return mask.blocks(queries, window=window)
    visible = mask.dense(queries, window=window)[None, None]
    if implementation == "sdpa":
        return visible
    hidden = torch.finfo(model.dtype).min
    return torch.zeros(visible.shape, dtype=model.dtype, device=visible.device).masked_fill_(~visible, hidden)


FUSED_WIDTH = 256
"""Largest width of a head in torch's fused attention."""


def packed_attention(
    module: nn.Module,
    query: Tensor,  # [1, h, M, d]
    key: Tensor,  # [1, g, M, d]
    value: Tensor,  # [1, g, M, d]
    attention_mask: Tensor | None,
    *,
    attention_plan: AttentionPlan | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Compute attention ``[1, M, h, d]``; raise ``ModelError`` if the model caps or biases its attention."""
    if any(argument is not None for argument in (attention_mask, softcap, s_aux, position_bias)):
        raise ModelError(f"{type(module).__name__} caps or biases its attention: set model.attention=eager")
    assert attention_plan is not None, f"{type(module).__name__} does not hand its arguments on to attention"
    blocks, selected = attention_plan.blocks, attention_plan.selected
    queries = _split_into_blocks(query, blocks, selected)
    keys, values = (
        _split_into_blocks(tensor, blocks, None if attention_plan.has_shared else selected) for tensor in (key, value)
    )
    outputs = []
    for block, groups, q, k, v in zip(
        blocks, attention_plan.groups or cycle([None]), queries, keys, values, strict=False
    ):
        applied_groups = groups if sliding_window is not None or attention_plan.groups_in_full else None
        mask = _visibility_mask(
            block.shape[1], sliding_window, applied_groups, attention_plan.groups_past_window, q.device
        )
        is_grouped = q.shape[1] != k.shape[1]
        if is_grouped and q.is_cuda and (mask is not None or max(k.shape[-1], v.shape[-1]) > FUSED_WIDTH):
            # The fused kernels take grouped heads only so; the one for all other cases holds all scores.
            repeats, is_grouped = q.shape[1] // k.shape[1], False
            k, v = (tensor.repeat_interleave(repeats, 1) for tensor in (k, v))
        output = scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=is_grouped
        )  # [S, h, L, d]
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return _Selected.apply(joined, selected)[None], None  # type: ignore[no-untyped-call]


def _split_into_blocks(tensor: Tensor, blocks: Sequence[Tensor], selected: Tensor | None) -> Iterable[Tensor]:
    """Return a tensor ``[1, h, M, d]`` by blocks ``[S, h, L, d]``.

    ``selected`` may be given if only these indices have a gradient: for queries, whose other indices are not among the
    outputs, and for keys and values whose tokens are in one sequence each, as padding is never seen.
    """
    row = tensor[0].transpose(0, 1)
    indices = [block.view(-1) for block in blocks]
    if selected is None:
        pieces: Sequence[Tensor] = [row.index_select(0, block_indices) for block_indices in indices]
    elif len(blocks) == 1:
        pieces = [_Placed.apply(row, indices[0], selected)]  # type: ignore[no-untyped-call]
    else:
        placed: Tensor = _Placed.apply(row, torch.cat(indices), selected)  # type: ignore[no-untyped-call]
        pieces = placed.split([len(block_indices) for block_indices in indices])
    return [piece.unflatten(0, block.shape).transpose(1, 2) for piece, block in zip(pieces, blocks, strict=True)]


class _Placed(torch.autograd.Function):
    """Tokens of a row at indices of blocks; the gradient is that of the selected indices, one for each token.

    A gather both ways: the sum over all indices, which PyTorch takes otherwise, needs atomic additions.
    """

    @staticmethod
    def forward(ctx: Any, row: Tensor, indices: Tensor, selected: Tensor) -> Tensor:
        ctx.save_for_backward(selected)
        return row.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (selected,) = ctx.saved_tensors
        return gradient.index_select(0, selected), None, None


class _Selected(torch.autograd.Function):
    """Outputs at the selected indices, each of which is selected once, so that gradients are copied and not added."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, selected: Tensor) -> Tensor:
        ctx.save_for_backward(selected)
        ctx.num_indices = len(outputs)
        return outputs.index_select(0, selected)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (selected,) = ctx.saved_tensors
        return gradient.new_zeros(ctx.num_indices, *gradient.shape[1:]).index_copy_(0, selected, gradient), None


def _visibility_mask(
    length: int, window: int | None, groups: Tensor | None, groups_past_window: bool, device: torch.device
) -> Tensor | None:
    """Return the mask ``[L, L]``, True where a token is visible, or None if it is just causal.

    With groups ``[S, L]``, which are numbered from 1, it is ``[S, 1, L, L]``.
    """
    narrow = window is not None and window < length
    if groups is None and not narrow:
        return None
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    in_window = everything.triu(1 - window) if narrow and window is not None else everything
    visible = everything.tril() & in_window
    if groups is None:
        return visible
    same_group = (groups[:, :, None] == groups[:, None, :]) & (groups[:, :, None] > 0)
    return (visible | (same_group if groups_past_window else same_group & in_window))[:, None]


def flex_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    """Compute transformers' flex_attention with queries and keys in the values' dtype.

    Autocast leaves norms, and so queries and keys, in float32 if the weights are; it knows sdpa, but not this.
    """
    return flex_attention_forward(module, query.to(value.dtype), key.to(value.dtype), value, *arguments, **options)


AttentionInterface.register(NAME, packed_attention)
AttentionInterface.register(FLEX, flex_attention)

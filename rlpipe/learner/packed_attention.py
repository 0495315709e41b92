"""Attention over a packed row, block by block of sequences, as an attention implementation of transformers.

A packed row of M tokens under a dense mask costs M² in time and memory; cut into sequences of length L it costs M·L,
and runs on the plain causal kernels. Shapes: h heads, of which g are for keys and values, d channels a head.
"""

from __future__ import annotations

from inspect import signature
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel

from rlpipe.errors import ModelError
from rlpipe.kernels.strided_mask import StridedMask
from rlpipe.learner.row_plan import AttentionLayout, AttentionPlan

NAME = "rlpipe_packed"
REPLACED_LAYERS = {"full_attention", "sliding_attention"}
"""Whose attention this file can do."""
MASKED_LAYERS = REPLACED_LAYERS | {"chunked_attention"}
"""Whose masks transformers makes by position ids; all others, such as linear attention, see across sequences."""


def find_layout(model: PreTrainedModel, implementation: str) -> AttentionLayout:
    """How sequences are kept apart in a model, given transformers' attention implementation."""
    config = model.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ["full_attention"])
    chunked = getattr(config, "attention_chunk_size", None) is not None
    if not model.is_backend_compatible() or not layers <= MASKED_LAYERS:
        return AttentionLayout.APART
    if model.base_model is not model and "cross_attention_mask" in signature(model.base_model.forward).parameters:
        return AttentionLayout.ALONE  # tokens in front of a sequence's first image look at all images of the pass
    replaceable = implementation == "sdpa" and layers <= REPLACED_LAYERS and not chunked
    return AttentionLayout.SHARED if replaceable else AttentionLayout.POSITIONS


def use_packed_attention(model: PreTrainedModel) -> None:
    """Has the language model's attention run by plans; a vision tower keeps its own."""
    own = getattr(model.config, "text_config", None) is not None
    model.set_attn_implementation({"text_config": NAME} if own else NAME)


def use_masks(model: PreTrainedModel, implementation: str) -> None:
    """Has a model's attention take masks of ours: flex_attention's on a GPU, else dense ones.

    Raises ``ModelError`` where tokens are mixed in other ways, or the result would be another one.
    """
    config = model.config.get_text_config()
    if find_layout(model, "sdpa") is not AttentionLayout.SHARED:
        raise ModelError(f"{type(model).__name__} can't take masks of its own, which algorithm.kind=ebft_strided needs")
    if implementation != "eager":
        if getattr(config, "attn_logit_softcapping", None) is not None:
            raise ModelError(f"{type(model).__name__} caps its attention: set model.attention=eager")
        on_gpu = next(model.parameters()).is_cuda
        implementation = "flex_attention" if on_gpu and model._supports_flex_attn else "sdpa"
    model.set_attn_implementation(implementation)


def mask_for(model: PreTrainedModel, mask: StridedMask, queries: slice = slice(None)) -> Any:
    """A mask as the model's attention takes it: of each kind of its layers, if they differ."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if not kinds:
        return _as_taken(model, mask, queries, getattr(config, "sliding_window", None))
    if kinds == {"full_attention"}:
        return _as_taken(model, mask, queries, None)
    windows = {kind: config.sliding_window if kind == "sliding_attention" else None for kind in kinds}
    return {kind: _as_taken(model, mask, queries, window) for kind, window in windows.items()}


def _as_taken(model: PreTrainedModel, mask: StridedMask, queries: slice, window: int | None) -> Any:
    implementation = model.config.get_text_config()._attn_implementation
    if implementation == "flex_attention":
        return mask.blocks(queries, window=window)
    seen = mask.dense(queries, window=window)[None, None]
    if implementation == "sdpa":
        return seen
    hidden = torch.finfo(model.dtype).min
    return torch.zeros(seen.shape, dtype=model.dtype, device=seen.device).masked_fill_(~seen, hidden)


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
    """Returns ``[1, M, h, d]``; raises ``ModelError`` for kinds of attention whose result it would change."""
    if softcap is not None or s_aux is not None or position_bias is not None:
        raise ModelError(f"{type(module).__name__} caps or biases its attention: set model.attention=eager")
    assert attention_plan is not None, f"{type(module).__name__} does not hand its arguments on to attention"
    rows = [tensor[0].transpose(0, 1) for tensor in (query, key, value)]  # [M, h or g, d]
    outputs = []
    for block, groups in zip(attention_plan.blocks, attention_plan.groups or cycle([None]), strict=False):
        q, k, v = (row.index_select(0, block.view(-1)).unflatten(0, block.shape).transpose(1, 2) for row in rows)
        heeded = groups if sliding_window is not None or attention_plan.groups_in_full else None
        mask = _seen(block.shape[1], sliding_window, heeded, attention_plan.groups_past_window, q.device)
        output = scaled_dot_product_attention(
            q, k, v, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )  # [S, h, L, d]
        outputs.append(output.transpose(1, 2).flatten(0, 1))
    together = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return together.index_select(0, attention_plan.selected)[None], None


def _seen(
    length: int, window: int | None, groups: Tensor | None, groups_past_window: bool, device: torch.device
) -> Tensor | None:
    """True where a token is seen ``[L, L]``, or with groups ``[S, L]``, which count from 1, ``[S, 1, L, L]``.

    None where that is all up to each token.
    """
    narrow = window is not None and window < length
    if groups is None and not narrow:
        return None
    everything = torch.ones(length, length, dtype=torch.bool, device=device)
    within = everything.triu(1 - window) if narrow and window is not None else everything
    seen = everything.tril() & within
    if groups is None:
        return seen
    together = (groups[:, :, None] == groups[:, None, :]) & (groups[:, :, None] > 0)
    return (seen | (together if groups_past_window else together & within))[:, None]


AttentionInterface.register(NAME, packed_attention)

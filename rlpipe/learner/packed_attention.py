"""Attention over a packed row in blocks of sequences, as an attention implementation for transformers.

A packed row of M tokens under a dense mask costs M² in time and memory; cut into sequences of length L, it costs M·L
and runs on the plain causal kernels. Shapes: h query heads, g heads of keys and values, d channels per head.
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
    own = getattr(model.config, "text_config", None) is not None
    model.set_attn_implementation({"text_config": NAME} if own else NAME)


def use_masks(model: PreTrainedModel, implementation: str) -> None:
    """Make a model's attention take rlpipe's masks: flex_attention's on a GPU, else dense ones.

    Raises ``ModelError`` if the model has other kinds of layers, or caps its attention outside of eager mode.
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
    """Return the mask in the form that the model's attention takes; a dict by layer type if these differ."""
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
    """Compute attention ``[1, M, h, d]``; raise ``ModelError`` if the model caps or biases its attention."""
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
    """Return the mask ``[L, L]``, True where a token is seen, or None if it is plainly causal.

    With groups ``[S, L]``, which are numbered from 1, it is ``[S, 1, L, L]``.
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

"""Gathers the trained weights, and packs them for the engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from rlpipe.learner.policy import Policy
from rlpipe.types import ByteArray, TensorOutline, WeightsManifest
from rlpipe.weights import BucketMemory, pack_weights


def publish_weights(
    policy: Policy,
    *,
    version: int,
    bucket_bytes: int,
    emit: Callable[[ByteArray], None],
    memory: BucketMemory | None = None,
) -> WeightsManifest | None:
    """Packs the present weights into buckets, which rank 0 hands to ``emit`` one by one; all ranks must call it.

    A LoRA policy publishes its adapter, a whole model the tensors of its checkpoint, each gathered when its turn comes.
    Returns the manifest on rank 0, None elsewhere. With ``memory``, a bucket is valid only until ``emit`` returns.
    """
    tensors = named_weights(policy)
    if policy.sharding.rank != 0:
        for _ in tensors:
            pass
        return None
    return pack_weights(
        version=version,
        kind=policy.kind,
        named_tensors=tensors,
        bucket_bytes=bucket_bytes,
        adapter_config=adapter_config(policy),
        emit=emit,
        dtype=policy.scorer.compute_dtype,
        memory=memory,
    )


def outline_weights(policy: Policy) -> list[TensorOutline]:
    """What ``named_weights`` of a whole model yields, in the type that engines serve, without gathering anything."""
    model, outlines = policy.scorer.causal_model, []
    for name, tensor in _untied_state(policy).items():
        hollow = torch.empty(policy.sharding.shape(tensor), dtype=tensor.dtype, device="meta")
        for published, part in revert_weight_conversion(model, {name: hollow}).items():
            dtype = policy.scorer.compute_dtype if part.is_floating_point() else part.dtype
            outlines.append(
                TensorOutline(name=published, dtype=str(dtype).removeprefix("torch."), shape=tuple(part.shape))
            )
    return outlines


def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """The weights by the names that ``save_pretrained`` of PEFT or transformers gives them, gathered one at a time.

    Tensors are in the type that they are trained in. Every rank must exhaust it.
    """
    return _adapter_weights(policy) if isinstance(policy.model, PeftModel) else _model_weights(policy)


def _adapter_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in policy.adapter_parameters.items():
        yield name, policy.sharding.full(parameter).detach()


def _model_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    model = policy.scorer.causal_model
    for name, tensor in _untied_state(policy).items():
        gathered = policy.sharding.full(tensor).detach()
        # Some models are held with other names or fused tensors than their files have.
        yield from revert_weight_conversion(model, {name: gathered}).items()


def _untied_state(policy: Policy) -> dict[str, Tensor]:
    """Parameters, each tied one once, and the buffers that are saved with them."""
    parameters = dict(policy.model.named_parameters())
    tied = dict(policy.model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    return {name: tensor for name, tensor in policy.model.state_dict(keep_vars=True).items() if name not in tied}


def adapter_config(policy: Policy) -> dict[str, Any] | None:
    """PEFT's config of the adapter as plain JSON values, or None for a whole model."""
    if not isinstance(policy.model, PeftModel):
        return None
    config = replace(policy.model.peft_config["default"], inference_mode=True)
    return json.loads(json.dumps(config.to_dict(), default=lambda value: sorted(value)))

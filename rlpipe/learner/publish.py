"""Publishing of the trained weights: gathered over the ranks and packed for the engines."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor

from rlpipe.learner.policy import Policy
from rlpipe.models.hf_weight_map import to_files, untied_state
from rlpipe.types import ByteArray, TensorOutline, WeightsKind, WeightsManifest
from rlpipe.weights.buckets import BucketMemory, pack_weights


def publish_weights(
    policy: Policy,
    *,
    version: int,
    bucket_bytes: int,
    emit: Callable[[ByteArray], None],
    memory: BucketMemory | None = None,
) -> WeightsManifest | None:
    """Pack the current weights into buckets, which rank 0 passes to ``emit`` one by one; all ranks must call it.

    An adapter that engines can serve is published alone, any other policy as the tensors of a whole model's checkpoint,
    gathered (and merged with the adapter, if there is one) one at a time. Returns the manifest on rank 0, None on the
    others. With ``memory``, a bucket is valid only until ``emit`` returns.
    """
    tensors = served_weights(policy)
    if policy.sharding.rank != 0:
        for _ in tensors:
            pass
        return None
    return pack_weights(
        version=version,
        kind=policy.kind,
        named_tensors=tensors,
        bucket_bytes=bucket_bytes,
        adapter_config=adapter_config(policy) if policy.kind is WeightsKind.LORA else None,
        emit=emit,
        dtype=policy.scorer.compute_dtype,
        memory=memory,
    )


def outline_weights(policy: Policy) -> list[TensorOutline]:
    """Return names, dtypes and shapes of what ``served_weights`` yields for a whole model, without gathering it.

    The dtypes are those that engines serve.
    """
    model, outlines = policy.scorer.causal_model, []
    for name, hollow in _hollow_state(policy).items():
        for published, part in to_files(model, name, hollow).items():
            dtype = policy.scorer.compute_dtype if part.is_floating_point() else part.dtype
            outlines.append(
                TensorOutline(name=published, dtype=str(dtype).removeprefix("torch."), shape=tuple(part.shape))
            )
    return outlines


def _hollow_state(policy: Policy) -> dict[str, Tensor]:
    if isinstance(policy.model, PeftModel):
        return policy.merged.outlines()
    return {
        name: torch.empty(policy.sharding.shape(tensor), dtype=tensor.dtype, device="meta")
        for name, tensor in untied_state(policy.model).items()
    }


def served_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over the tensors for engines, by their names in ``save_pretrained``, gathered one at a time.

    All ranks must exhaust it. Raises ``ModelError`` if an adapter can't be merged exactly.
    """
    if policy.kind is WeightsKind.FULL and isinstance(policy.model, PeftModel):
        return policy.merged.tensors()
    return named_weights(policy)


def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over the adapter's or whole model's tensors, gathered one at a time.

    Names are those of ``save_pretrained`` of PEFT or transformers, dtypes those of training. All ranks must exhaust it.
    """
    return _adapter_weights(policy) if isinstance(policy.model, PeftModel) else _model_weights(policy)


def _adapter_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in policy.adapter_parameters.items():
        yield name, policy.sharding.full(parameter).detach()


def _model_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    model = policy.scorer.causal_model
    for name, tensor in untied_state(model).items():
        yield from to_files(model, name, policy.sharding.full(tensor).detach()).items()


def adapter_config(policy: Policy) -> dict[str, Any] | None:
    """Return PEFT's config of the adapter as plain JSON values, or None for a whole model."""
    if not isinstance(policy.model, PeftModel):
        return None
    config = replace(policy.model.peft_config["default"], inference_mode=True)
    return json.loads(json.dumps(config.to_dict(), default=lambda value: sorted(value)))

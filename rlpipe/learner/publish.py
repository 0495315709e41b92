"""Publication of the policy's weights: to the object store, or directly to the engines."""

from __future__ import annotations

import json
import math
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from peft import PeftModel
from torch import Tensor

from rlpipe.configs.schema.root_config import WeightsConfig
from rlpipe.learner.policy import Policy
from rlpipe.models.hf_weight_map import to_files, untied_state
from rlpipe.types import ByteArray, TensorSpec, Transfer, WeightsKind, WeightsManifest
from rlpipe.weights.buckets import BucketMemory, GlooGroup, add_checksum, digest_of_sums, listen, pack_weights


def publish_weights(
    policy: Policy,
    *,
    version: int,
    bucket_bytes: int,
    emit: Callable[[ByteArray], None],
    memory: BucketMemory | None = None,
    kind: WeightsKind | None = None,
) -> WeightsManifest | None:
    """Pack the current weights into buckets, which rank 0 passes to ``emit`` one by one; all ranks must call it.

    An adapter is published alone, any other ``kind`` (None: the model's own) as the tensors of a whole model's
    checkpoint, gathered (and merged with the adapter, if there is one) one at a time. Returns the manifest on rank 0,
    None on the others. With ``memory``, a bucket is valid only until ``emit`` returns.
    """
    kind = kind or policy.kind
    tensors = whole_weights(policy) if kind is WeightsKind.FULL else named_weights(policy)
    if policy.sharding.rank != 0:
        for _ in tensors:
            pass
        return None
    return pack_weights(
        version=version,
        kind=kind,
        named_tensors=tensors,
        bucket_bytes=bucket_bytes,
        adapter_config=None if kind is WeightsKind.FULL else adapter_config(policy),
        emit=emit,
        dtype=getattr(torch, policy.served_dtype),
        memory=memory,
        merged_digest=lambda config, adapter: policy.served.digest(config, adapter, policy.device),
    )


def weight_specs(policy: Policy) -> list[TensorSpec]:
    """Return names, dtypes and shapes of what ``whole_weights`` yields for a whole model, without gathering it.

    The dtypes are those that engines serve.
    """
    model, specs = policy.module.causal_model, []
    for name, tensor in _meta_state(policy).items():
        for published, value in to_files(model, name, tensor).items():
            dtype = policy.served_dtype if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
            specs.append(TensorSpec(name=published, dtype=dtype, shape=tuple(value.shape)))
    return specs


def _meta_state(policy: Policy) -> dict[str, Tensor]:
    if isinstance(policy.model, PeftModel):
        return policy.merged.meta_tensors()
    return {
        name: torch.empty(policy.sharding.shape(tensor), dtype=tensor.dtype, device="meta")
        for name, tensor in untied_state(policy.model).items()
    }


def whole_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over a whole model's tensors, by their names in ``save_pretrained``, gathered one at a time.

    An adapter is merged. All ranks must exhaust it. Raises ``ModelError`` if an adapter can't be merged exactly.
    """
    return policy.merged.tensors() if isinstance(policy.model, PeftModel) else named_weights(policy)


def named_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """Return an iterator over the adapter's or whole model's tensors, gathered one at a time.

    Names are those of ``save_pretrained`` of PEFT or transformers, dtypes those of training. All ranks must exhaust it.
    """
    return _adapter_weights(policy) if isinstance(policy.model, PeftModel) else _model_weights(policy)


def _adapter_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in policy.adapter_parameters.items():
        yield name, policy.sharding.full(parameter).detach()


def _model_weights(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    model = policy.module.causal_model
    for name, tensor in untied_state(model).items():
        yield from to_files(model, name, policy.sharding.full(tensor).detach()).items()


def adapter_config(policy: Policy) -> dict[str, Any] | None:
    """Return PEFT's config of the adapter as plain JSON values, or None for a whole model."""
    if not isinstance(policy.model, PeftModel):
        return None
    config = replace(policy.model.peft_config["default"], inference_mode=True)
    return json.loads(json.dumps(config.to_dict(), default=lambda value: sorted(value)))


class DirectSender:
    """One rank's sender: all ranks gather one tensor at a time, and rank 0 sends it to the engines."""

    def __init__(self, policy: Policy, config: WeightsConfig) -> None:
        self._policy, self._timeout_s, self._buffer_bytes = policy, config.timeout_s, config.bucket_bytes
        self._sums: dict[int, int] = {}
        self._store: dist.TCPStore | None = None
        self.specs = weight_specs(policy)
        self.num_bytes = sum(math.prod(spec.shape) * getattr(torch, spec.dtype).itemsize for spec in self.specs)

    def open(self, address: str) -> Transfer:
        """Choose a port at ``address``, rank 0's own, and return the transfer that the engines' workers join there."""
        if self._policy.device.type == "cuda":
            with socket.socket() as listener:  # vLLM listens itself, on the port that it is given
                listener.bind((address, 0))
                port = listener.getsockname()[1]
        else:
            self._store = listen(address)
            port = self._store.port
        return Transfer(address=address, port=port, specs=self.specs, buffer_bytes=self._buffer_bytes)

    def send(self, transfer: Transfer | None) -> str:
        """Send the weights and return their digest; with None, only take part in gathering them.

        Raises ``TimeoutError`` if the transfer takes longer than ``weights.timeout_s``, and any error of the transfer;
        the process group can't be used after that.
        """
        self._sums.clear()
        sent: Future[None] = Future()

        def run() -> None:
            try:
                if self._policy.device.type == "cuda":
                    torch.cuda.set_device(self._policy.device)  # the current device is per thread
                self._send(transfer)
            except BaseException as error:  # noqa: BLE001 - raised in the waiting thread
                sent.set_exception(error)
            else:
                sent.set_result(None)

        # A hanging transfer can't be interrupted; as a daemon, its thread does not keep the process from exiting.
        threading.Thread(target=run, name="transfer", daemon=True).start()
        sent.result(self._timeout_s)
        return digest_of_sums(self._sums)

    def _send(self, transfer: Transfer | None) -> None:
        weights = self._cast_weights()
        if transfer is None:
            for _ in weights:
                pass
        elif self._policy.device.type == "cuda":
            from rlpipe.learner.nccl_broadcast import send_by_nccl

            send_by_nccl(transfer, weights)
        else:
            GlooGroup.join(transfer, 0, self._timeout_s, self._store).send(weights)

    def _cast_weights(self) -> Iterator[tuple[str, Tensor]]:
        dtype: torch.dtype = getattr(torch, self._policy.served_dtype)
        for name, tensor in whole_weights(self._policy):
            cast = tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype)
            if self._policy.sharding.rank == 0:
                add_checksum(self._sums, name, cast)
            yield name, cast

"""The learner's side of vLLM's weight transfer between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from rlpipe.types import Transfer


def send_by_nccl(transfer: Transfer, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Join the waiting workers, and broadcast the weights in vLLM's packed format."""
    rendezvous_arguments = NCCLTrainerInitInfo(
        master_address=transfer.address,
        master_port=transfer.port,
        world_size=transfer.num_processes,
        packed_buffer_size_bytes=transfer.buffer_bytes,
        rank=0,
    )
    source = OneVersion(transfer, weights)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(rendezvous_arguments, client=EnginesWait(), source=source)
    try:
        engine.send_weights()
    finally:
        engine.shutdown()


class OneVersion(WeightSource):
    """The source of one version's weights, which is iterated only once; vLLM would reuse a source for every version."""

    def __init__(self, transfer: Transfer, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._transfer, self._weights = transfer, weights

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name=spec.name, dtype=getattr(torch, spec.dtype), shape=spec.shape)
            for spec in self._transfer.specs
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights


class EnginesWait:
    """A client that does nothing, because the weights actor calls the engines, which vLLM's trainer would do."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass

"""The learner's side of vLLM's own transfer of weights between GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo, NCCLTrainerWeightTransferEngine

from rlpipe.types import Transfer


def send_by_nccl(transfer: Transfer, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Meets the workers, which wait already, and broadcasts the weights in vLLM's packed form."""
    meeting = NCCLTrainerInitInfo(
        master_address=transfer.address,
        master_port=transfer.port,
        world_size=transfer.num_processes,
        packed_buffer_size_bytes=transfer.buffer_bytes,
        rank=0,
    )
    source = OneVersion(transfer, weights)
    engine = NCCLTrainerWeightTransferEngine.trainer_init(meeting, client=EnginesWait(), source=source)
    try:
        engine.send_weights()
    finally:
        engine.shutdown()


class OneVersion(WeightSource):
    """What is sent in one go; vLLM would iterate it again for every version."""

    def __init__(self, transfer: Transfer, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._transfer, self._weights = transfer, weights

    def metadata(self) -> list[ParamMeta]:
        return [
            ParamMeta(name=outline.name, dtype=getattr(torch, outline.dtype), shape=outline.shape)
            for outline in self._transfer.outlines
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._weights


class EnginesWait:
    """vLLM's trainer would call the engines itself; here the weights actor has done so."""

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        pass

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: Any) -> None:
        pass

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        pass

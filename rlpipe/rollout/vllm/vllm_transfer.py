"""The engines' side of direct weight transfer from the learner: vLLM's NCCL transfer, and gloo between CPUs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo
from vllm.platforms import current_platform

from rlpipe.rollout.vllm.vllm_experts import begin_experts, end_experts
from rlpipe.types import TensorOutline, Transfer
from rlpipe.weights.broadcast import GlooGroup

GLOO = "rlpipe_gloo"


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    transfer: dict[str, Any]
    timeout_s: float


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """No further fields: ``GlooInitInfo`` already describes the whole transfer."""


class GlooTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """A transfer engine for CPU workers, which receives weights over gloo and loads them in place, as from buckets."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo

    def __init__(
        self, config: WeightTransferConfig, vllm_config: VllmConfig, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._group: GlooGroup | None = None

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        fields = init_info.transfer
        outlines = [TensorOutline(**outline) for outline in fields["outlines"]]
        self._transfer = Transfer(**fields | {"outlines": outlines})
        rank = self._transfer.first_rank + self.parallel_config.rank
        self._group = GlooGroup.join(self._transfer, rank, init_info.timeout_s)

    def start_weight_update(self) -> None:
        begin_experts(self.model, self.vllm_config)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        assert self._group is not None, "init_transfer_engine comes first"
        model: Any = self.model
        model.load_weights(self._group.receive(self._transfer))

    def finish_weight_update(self) -> None:
        end_experts(self.model, self.vllm_config)

    def shutdown(self) -> None:
        self._group = None


def backend() -> str:
    """Return vLLM's name of the transfer engine for its platform."""
    return GLOO if current_platform.is_cpu() else "nccl"


def meeting(transfer: Transfer, timeout_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return vLLM's arguments for joining a transfer, and for receiving its tensors."""
    if current_platform.is_cpu():
        return {"transfer": asdict(transfer), "timeout_s": timeout_s}, {}
    joined = NCCLWeightTransferInitInfo(
        master_address=transfer.address,
        master_port=transfer.port,
        rank_offset=transfer.first_rank,
        world_size=transfer.num_processes,
        packed=True,  # the sender's default
        packed_buffer_size_bytes=transfer.buffer_bytes,
    )
    update = NCCLWeightTransferUpdateInfo(
        names=[outline.name for outline in transfer.outlines],
        dtype_names=[outline.dtype for outline in transfer.outlines],
        shapes=[list(outline.shape) for outline in transfer.outlines],
    )
    return worker_init_payload(joined), asdict(update)


WeightTransferEngineFactory.register_engine(GLOO, GlooTransferEngine)

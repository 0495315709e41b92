"""Transfer of weights into a running vLLM engine: backend, experts, weights in 4 bit, and packing for CPUs.

New weights are collected until a layer has all of them, and vLLM then lays them out as when it loads a model. All
other layers are written in place.

vLLM's own NF4 uses less memory, but needs a GPU and other kernels; set
``rollout.engine_args.quantization=bitsandbytes`` to use it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import LoadConfig, ModelConfig, VllmConfig, WeightTransferConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_common import worker_init_payload
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.utils import check_cpu_sgl_kernel, dispatch_cpu_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod, VocabParallelEmbedding
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from rlpipe.errors import ModelError
from rlpipe.models.loading import meta_model
from rlpipe.models.nf4 import nf4_parameters, nf4_round_trip
from rlpipe.types import TensorSpec, Transfer
from rlpipe.weights.buckets import GlooGroup


def begin_experts(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Prepare the experts for new weights; call ``end_experts`` once all weights are loaded."""
    with set_current_vllm_config(vllm_config):
        for layer in _experts(model):
            initialize_layerwise_reload(layer)
            if current_platform.is_cpu():
                # With a kernel set, vLLM would keep the weights in the file's layout, which is right only on GPUs.
                layer.quant_method.moe_kernel = None


def end_experts(model: nn.Module, vllm_config: VllmConfig) -> None:
    with set_current_vllm_config(vllm_config):
        for layer in _experts(model):
            finalize_layerwise_reload(layer, vllm_config.model_config)


def _experts(model: nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]


def refresh_sinks(model: nn.Module, dtype: torch.dtype) -> None:
    """Pass new attention sinks on to kernels that hold a copy of them, such as FlashInfer's, which is in float32."""
    for layer in model.modules():
        kernels: Any = getattr(layer, "impl", None)
        if is_deferred_attention_layer(layer) and getattr(kernels, "sinks", None) is not None:
            kernels.process_weights_after_loading(dtype)


def pack_layers(model: nn.Module) -> None:
    """Pack the weights of linear and output layers for the CPU's matrix products, beside the plain ones.

    The plain weights stay for the next load, and to be read back. Packing a layer again frees what it had packed.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if isinstance(layer, LinearBase | VocabParallelEmbedding) and _is_packable(layer):
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def _is_packable(layer: Any) -> bool:
    """Return whether packing leaves a layer's weight and bias as they are."""
    unquantized = isinstance(layer.quant_method, UnquantizedLinearMethod | UnquantizedEmbeddingMethod)
    if not unquantized or layer.weight.ndim != MATRIX_DIMENSIONS:
        return False
    rows, columns = layer.weight.shape
    return getattr(layer, "bias", None) is None or not check_cpu_sgl_kernel(rows, columns, layer.weight.dtype)


LOAD_FORMAT = "rlpipe_nf4"


@register_model_loader(LOAD_FORMAT)
class Nf4Loader(DefaultModelLoader):
    """A loader that rounds the weights to NF4 and back, as QLoRA's base has them."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(replace(load_config, load_format="auto"))

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Generator[tuple[str, Tensor], None, None]:
        remaining = nf4_parameters(meta_model(model_config.hf_config, trust_remote_code=model_config.trust_remote_code))
        for name, weight in super().get_all_weights(model_config, model):
            quantized = name in remaining
            remaining.discard(name)
            yield name, nf4_round_trip(weight.to(model_config.dtype)) if quantized else weight
        if remaining:
            raise ModelError(
                f"{type(model).__name__} has files whose weight names differ from those of transformers, such as "
                f"{min(remaining)}: set rollout.engine=hf, or model.adapter.kind=lora"
            )


MATRIX_DIMENSIONS = 2
GLOO = "rlpipe_gloo"


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Arguments of vLLM's workers to join the group that sends weights over gloo."""

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
        specs = [TensorSpec(**spec) for spec in fields["specs"]]
        self._transfer = Transfer(**fields | {"specs": specs})
        rank = self._transfer.first_rank + self.parallel_config.rank
        self._group = GlooGroup.join(self._transfer, rank, init_info.timeout_s)

    def start_weight_update(self) -> None:
        begin_experts(self.model, self.vllm_config)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        assert self._group is not None, "init_transfer_engine must be called first"
        model: Any = self.model
        model.load_weights(self._group.receive(self._transfer))

    def finish_weight_update(self) -> None:
        end_experts(self.model, self.vllm_config)

    def shutdown(self) -> None:
        self._group = None


def backend() -> str:
    """Return vLLM's name of the transfer engine for its platform."""
    return GLOO if current_platform.is_cpu() else "nccl"


def rendezvous_arguments(transfer: Transfer, timeout_s: float) -> tuple[dict[str, Any], dict[str, Any]]:
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
        names=[spec.name for spec in transfer.specs],
        dtype_names=[spec.dtype for spec in transfer.specs],
        shapes=[list(spec.shape) for spec in transfer.specs],
    )
    return worker_init_payload(joined), asdict(update)


WeightTransferEngineFactory.register_engine(GLOO, GlooTransferEngine)

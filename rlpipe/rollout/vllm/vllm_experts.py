"""Reloading of fused experts, whose kernels need weights in a layout of their own: padded, and in another order.

New weights are collected until a layer has all of them, and vLLM then lays them out as when it loads a model. All
other layers are written in place.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform


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

"""QLoRA's base model: linear layers with NF4 weights, as bitsandbytes quantizes and transformers loads them."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import BitsAndBytesConfig, PreTrainedModel
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.quantizers.quantizers_utils import should_convert_module

from rlpipe.errors import ModelError

BLOCK = 64


def nf4_config(dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return transformers' config for NF4 with double quantisation (arXiv:2305.14314), computing in ``dtype``.

    Codes are stored as elements of ``dtype`` too, so that FSDP2 can shard them like all other parameters.
    """
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=dtype,
    )


def resolve_nf4(model: nn.Module, device: torch.device) -> None:
    """Prepare NF4 layers for use on the device that their parameters, whole or sharded, have been moved to.

    The scales are not part of the parameters, so they are moved here. On some CPUs bitsandbytes would also repack the
    weights and round their scales at the first use without gradients; this is turned off. Raises ``ModelError`` for
    widths that bitsandbytes misreads.
    """
    from bitsandbytes.nn import Linear4bit

    for module in model.modules():
        if isinstance(module, Linear4bit):
            if device.type == "cpu" and module.in_features % BLOCK:
                raise ModelError(
                    f"bitsandbytes reads NF4 wrongly on a CPU where a layer's width, here {module.in_features}, is not "
                    f"a multiple of {BLOCK}: set model.adapter.kind=lora, or train on a GPU"
                )
            module.support_avx512bf16_for_cpu = False
            assert module.quant_state is not None, "transformers quantizes while it loads"
            module.quant_state.to(device)


def nf4_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the NF4 layers of a loaded model, by the names of their weights."""
    if not getattr(model, "is_loaded_in_4bit", False):
        return {}
    from bitsandbytes.nn import Linear4bit

    return {f"{name}.weight": layer for name, layer in model.named_modules() if isinstance(layer, Linear4bit)}


def from_nf4(codes: Tensor, layer: nn.Module) -> Tensor:
    """Dequantize the weight of an NF4 layer from its unsharded codes."""
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(codes, cast(Any, layer).quant_state)


def nf4_round_trip(weight: Tensor) -> Tensor:
    """Quantize a weight to NF4 and dequantize it again, in the weight's own type."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    # One block per row, because on the CPU bitsandbytes misreads rows that end within a block.
    flat = weight.flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    quantized, state = quantize_4bit(blocks, blocksize=BLOCK, compress_statistics=True, quant_type="nf4")
    return dequantize_4bit(quantized, state).to(weight.dtype).flatten()[: len(flat)].view_as(weight)


def to_nf4_and_back(model: PreTrainedModel) -> None:
    """Replace a model's weights in place by the dequantized NF4 weights of QLoRA's base."""
    quantized = nf4_parameters(model)
    for name, parameter in model.named_parameters():
        if name in quantized:
            parameter.data = nf4_round_trip(parameter.data)


def nf4_parameters(model: PreTrainedModel) -> set[str]:
    """Return the weights that transformers would load in NF4: all linear layers but the lm_head and those tied to it.

    Call it before an adapter is added to the model.
    """
    excluded = get_keys_to_not_convert(model)
    return {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and should_convert_module(name, excluded)
    }

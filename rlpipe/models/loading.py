"""Loading of transformers' models according to the config's ``model`` section, for learners and engines alike."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.hardware.dtype_speed import device_types
from rlpipe.hardware.dtypes import AUTO
from rlpipe.models.known_configs import model_products


def describe_model(path: str, config: ModelConfig) -> PreTrainedConfig:
    """Load transformers' config of the model."""
    return AutoConfig.from_pretrained(path, revision=config.revision, trust_remote_code=config.trust_remote_code)


def with_dtype(config: ModelConfig, device: torch.device) -> ModelConfig:
    """Replace dtype ``auto`` by the best type for this device; a run has already settled one for all processes."""
    return replace(config, dtype=own_dtype(device, config.path)) if config.dtype == AUTO else config


def own_dtype(device: torch.device, path: str) -> str:
    """Return the type that ``auto`` stands for on a device of this process, for a model that reads whole sequences."""
    return device_types(device, model_products(path, torch.get_num_threads())).auto


def own_device() -> torch.device:
    """Return the GPU of this process, or the CPU if it has none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def open_model(path: str, config: ModelConfig, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Load a model with its weights; ``options`` are passed on to ``from_pretrained``, whose errors are raised."""
    described = describe_model(path, config)
    model: PreTrainedModel = find_class(described, images=config.images).from_pretrained(
        path,
        config=described,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        dtype=dtype,
        attn_implementation=config.attention,
        **options,
    )
    return model


def outline_model(
    described: PreTrainedConfig, *, images: bool = False, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Create the model without weights, on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = find_class(described, images=images).from_config(
            described, trust_remote_code=trust_remote_code
        )
    return model


def hollow_model(
    described: PreTrainedConfig,
    own_class: type[PreTrainedModel] | None = None,
    *,
    images: bool = False,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Create the model on the CPU with its buffers, but with each parameter a single expanded zero, to save memory.

    An adapter that is added to it has values; on the meta device, PEFT would put the adapter on that device too.
    """
    with init_empty_weights():  # buffers that no file holds still get their values
        if own_class is not None:
            model: PreTrainedModel = own_class(deepcopy(described))
        else:
            model = find_class(described, images=images).from_config(described, trust_remote_code=trust_remote_code)
    cast(nn.Module, model).to(described.dtype or torch.float32)
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(hollow(parameter), requires_grad=False))
    return model


def hollow(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type that is a single expanded zero on the CPU."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def find_class(described: PreTrainedConfig, *, images: bool) -> Any:
    """Return transformers' auto class for a model: the text class, or the one for images and text.

    The latter is used if ``images`` asks for it or if there is no text class. A model with code of its own always gets
    the text class, because its ``auto_map`` names the actual class.
    """
    own_code = getattr(described, "auto_map", None) is not None
    if images and type(described) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not own_code:
        return AutoModelForImageTextToText
    text = own_code or type(described) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if text else AutoModelForImageTextToText


def has_vision(model: PreTrainedModel) -> bool:
    """Return whether the model has a vision tower beside the language model."""
    return getattr(model.config, "vision_config", None) is not None

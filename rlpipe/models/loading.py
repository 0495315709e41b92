"""Opens models of transformers as ``model`` of the config says, for learners and engines alike."""

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
    """transformers' config of the model."""
    return AutoConfig.from_pretrained(path, revision=config.revision, trust_remote_code=config.trust_remote_code)


def with_dtype(config: ModelConfig, device: torch.device) -> ModelConfig:
    """With the type in the place of ``auto`` that is best on this device; a run has settled one for all before."""
    return replace(config, dtype=own_dtype(device, config.path)) if config.dtype == AUTO else config


def own_dtype(device: torch.device, path: str) -> str:
    """What ``auto`` is on a device of this process, for a model that reads whole sequences there."""
    return device_types(device, model_products(path, torch.get_num_threads())).auto


def own_device() -> torch.device:
    """The GPU that this process has, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def open_model(path: str, config: ModelConfig, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """With its weights; ``options`` are further arguments of ``from_pretrained``, whose errors are raised."""
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
    """The model without weights, on the meta device."""
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
    """The model on the CPU with its buffers, but each parameter one zero that is repeated, which takes no memory.

    An adapter that is put on it has values; on the meta device PEFT would take these there too.
    """
    with init_empty_weights():  # buffers that are in no file get their values
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
    """One of the same shape and type, a single zero on the CPU that is repeated."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def find_class(described: PreTrainedConfig, *, images: bool) -> Any:
    """transformers' class for models of text, or where there is none, or ``images`` are asked for, for both.

    A model's own code says itself.
    """
    own_code = getattr(described, "auto_map", None) is not None
    if images and type(described) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not own_code:
        return AutoModelForImageTextToText
    text = own_code or type(described) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if text else AutoModelForImageTextToText


def has_vision(model: PreTrainedModel) -> bool:
    """Whether it has a vision tower beside the language model."""
    return getattr(model.config, "vision_config", None) is not None

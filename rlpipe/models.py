"""Opens models of transformers as ``model`` of the config says, for learners and engines alike."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from rlpipe.configs.schema import ModelConfig


def describe_model(path: str, config: ModelConfig) -> PreTrainedConfig:
    """transformers' config of the model."""
    return AutoConfig.from_pretrained(path, revision=config.revision, trust_remote_code=config.trust_remote_code)


def open_model(path: str, config: ModelConfig, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """With its weights; ``options`` are further arguments of ``from_pretrained``, whose errors are raised."""
    described = describe_model(path, config)
    model: PreTrainedModel = find_class(described).from_pretrained(
        path,
        config=described,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        dtype=dtype,
        attn_implementation=config.attention,
        **options,
    )
    return model


def outline_model(described: PreTrainedConfig, *, trust_remote_code: bool = False) -> PreTrainedModel:
    """The model without weights, on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = find_class(described).from_config(described, trust_remote_code=trust_remote_code)
    return model


def find_class(described: PreTrainedConfig) -> Any:
    """transformers' class for models of text, or where there is none for images and text; a model's own code says."""
    own_code = getattr(described, "auto_map", None) is not None
    text = own_code or type(described) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if text else AutoModelForImageTextToText

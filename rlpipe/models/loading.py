"""Loading of transformers' models according to the config's ``model`` section, for learners and engines alike."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import init_empty_weights
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING,
)

from rlpipe.common.imports import reading_files
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.errors import ModelError
from rlpipe.hardware.dtype_speed import device_types
from rlpipe.hardware.dtypes import AUTO
from rlpipe.models.model_files import QUANTIZATION_OPTIONS, model_products

COMPLETE = "give a complete and undamaged copy of the model"
"""Fix for a model that can't be loaded."""
CLASSIFIER = "score"
"""Name of the reward head in transformers' classes."""
CLASSES: Mapping[str, tuple[Any, Any, int]] = {
    "reward_model": (AutoModelForSequenceClassification, MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, 1),
    "process_reward_model": (AutoModelForTokenClassification, MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, 2),
}
"""Auto class, its mapping, and number of labels of each reward head."""
COUNT = re.compile(r"(?:num|n)_.*(?:layer|head|expert|block)s?|depth|.*_(?:layers|depth)")
SIZE = re.compile(r".*(?:size|dim|embd|inner|positions|embeddings|labels)")
MAX_COUNT, MAX_SIZE = 10_000, 2**28
"""Limits on sizes in a model's config, above which transformers would build objects until memory is full."""


def describe_model(path: str, config: ModelConfig, name: str | None = None) -> PreTrainedConfig:
    """Load transformers' config of the model; raise ``ModelError``, which names the model, if it is broken."""
    name = name or f"model.path={config.path}"
    with reading_files(f"{name} can't be read", COMPLETE, error=ModelError):
        values, _ = PreTrainedConfig.get_config_dict(path, revision=config.revision)
        for size, value in _numbers(values):
            if value > (MAX_COUNT if COUNT.fullmatch(size) else MAX_SIZE if SIZE.fullmatch(size) else value):
                raise ValueError(f"its config has {size}={value:.3g}")
        is_known = values.get("model_type") in CONFIG_MAPPING or "AutoConfig" not in (values.get("auto_map") or {})
        if not (is_known or config.trust_remote_code):
            fix = "set model.trust_remote_code (--trust-remote-code) if you trust it"
            raise ModelError(f"{name} has code of its own: {fix}")
        described: PreTrainedConfig = AutoConfig.from_pretrained(
            path, revision=config.revision, trust_remote_code=config.trust_remote_code
        )
    return described


def is_quantized(config: PreTrainedConfig) -> bool:
    """Return whether a model's files hold quantized weights."""
    parts = (config, config.get_text_config())
    return any(getattr(part, name, None) is not None for part in parts for name in QUANTIZATION_OPTIONS)


def _numbers(config: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield name, value


def with_dtype(config: ModelConfig, device: torch.device) -> ModelConfig:
    """Replace dtype ``auto`` by the best type for this device; a run has already settled one for all processes."""
    return replace(config, dtype=own_dtype(device, config.path)) if config.dtype == AUTO else config


def own_dtype(device: torch.device, path: str) -> str:
    """Return the type that ``auto`` stands for on a device of this process, for a model that reads whole sequences."""
    return device_types(device, model_products(path, torch.get_num_threads())).auto


def num_embeddings(model: PreTrainedModel) -> int:
    """Return the number of tokens that a model has embeddings for, before its weights are sharded."""
    return len(cast(nn.Embedding, model.get_input_embeddings()).weight)


def unknown_token(token_ids: NDArray[np.integer], num_embeddings: int) -> str | None:
    """Return what is wrong with tokens ``[T]`` of a text if one is beyond the model's embeddings, or None."""
    largest = int(token_ids.max(initial=0))
    if largest < num_embeddings:
        return None
    return f"token {largest} is beyond the model's {num_embeddings} embeddings: use its own tokenizer, or resize them"


def torch_device() -> torch.device:
    """Return the GPU of this process, or the CPU if it has none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def open_model(path: str, config: ModelConfig, dtype: torch.dtype, **options: Any) -> PreTrainedModel:
    """Load a model with its weights; ``options`` are passed on to ``from_pretrained``, whose errors are raised.

    Raises ``ModelError`` for parameters that the files lack.
    """
    described = describe_model(path, config)
    return load_complete(
        find_class(described, images=config.images),
        path,
        config=described,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
        dtype=dtype,
        attn_implementation=config.attention,
        **options,
    )


def open_reward_model(path: str, config: ModelConfig, dtype: torch.dtype, *, head: str, seed: int) -> PreTrainedModel:
    """Load a model with a reward head, initialized from ``seed`` if the files have none; raises as ``open_model``.

    Raises ``ModelError`` for a model that transformers has no such class of, or that takes images.
    """
    described = describe_model(path, config)
    auto_class = _set_labels(described, head)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = load_complete(
            auto_class,
            path,
            initialized=(f"{CLASSIFIER}.weight", f"{CLASSIFIER}.bias"),
            config=described,
            revision=config.revision,
            dtype=dtype,
            attn_implementation=config.attention,
        )
    return _with_classifier(model)


def meta_reward_model(described: PreTrainedConfig, *, head: str) -> PreTrainedModel:
    """Create a model with a reward head without weights, on the meta device; raise as ``open_reward_model`` does."""
    described = deepcopy(described)
    auto_class = _set_labels(described, head)
    with torch.device("meta"):
        return _with_classifier(auto_class.from_config(described))


def _set_labels(described: PreTrainedConfig, head: str) -> Any:
    """Set the number of labels of a reward head, and return its auto class; raise as ``open_reward_model`` does."""
    auto_class, classes, num_labels = CLASSES[head]
    if type(described) not in classes:
        raise ModelError(f"transformers has no class for {described.model_type} models in {auto_class.__name__}")
    if getattr(described, "vision_config", None) is not None:
        raise ModelError(f"{described.model_type} models take images, which reward models can't be trained on so far")
    described.num_labels = num_labels
    return auto_class


def _with_classifier(model: PreTrainedModel) -> PreTrainedModel:
    if not isinstance(getattr(model, CLASSIFIER, None), nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear head named {CLASSIFIER}, which reward models need")
    return model


def load_complete(auto_class: Any, path: str, *, initialized: Collection[str] = (), **options: Any) -> PreTrainedModel:
    """Load a model with ``from_pretrained``; raise ``ModelError`` for missing parameters, instead of initializing them.

    Only those that ``initialized`` names, of a new reward head, may be missing.
    """
    model, info = auto_class.from_pretrained(path, output_loading_info=True, ignore_mismatched_sizes=True, **options)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    name = Path(path, options.get("gguf_file", ""))
    refuse_missing(name, (info["missing_keys"] & parameters.keys()) - {*initialized})
    if info["mismatched_keys"]:
        parameter, in_files, in_model = min(info["mismatched_keys"])
        if parameter in initialized:
            raise ModelError(
                f"{name} has a head of {in_files[0]} labels, and this kind of reward model has {in_model[0]}: give a "
                f"model with {in_model[0]}, or one without a head, such as the chat model"
            )
        shapes = f"shape {list(in_files)} in the files, and {list(in_model)} by the config"
        raise ModelError(f"{name}: {parameter} has {shapes}: {COMPLETE}")
    return model  # type: ignore[no-any-return]


def refuse_missing(path: object, missing: Collection[str]) -> None:
    """Raise ``ModelError`` if names of parameters are ``missing`` in a model's files."""
    if missing:
        more = f" and {len(missing) - 1} more parameters" if len(missing) > 1 else ""
        raise ModelError(f"{path} lacks {min(missing)}{more}, which its config asks for: {COMPLETE}")


def meta_model(
    described: PreTrainedConfig, *, images: bool = False, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Create the model without weights, on the meta device."""
    with torch.device("meta"):
        model: PreTrainedModel = find_class(described, images=images).from_config(
            described, trust_remote_code=trust_remote_code
        )
    return model


def empty_model(
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
            setattr(module, name, nn.Parameter(placeholder(parameter), requires_grad=False))
    return model


def placeholder(tensor: Tensor) -> Tensor:
    """Return a tensor of the same shape and type that is a single expanded zero on the CPU."""
    return torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)


def find_class(described: PreTrainedConfig, *, images: bool) -> Any:
    """Return transformers' auto class for a model: the text class, or the one for images and text.

    The latter is used if ``images`` asks for it or if there is no text class. A model with code of its own always gets
    the text class, because its ``auto_map`` names the actual class.
    """
    has_custom_code = getattr(described, "auto_map", None) is not None
    if images and type(described) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not has_custom_code:
        return AutoModelForImageTextToText
    text = has_custom_code or type(described) in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForCausalLM if text else AutoModelForImageTextToText


def has_vision(model: PreTrainedModel) -> bool:
    """Return whether the model has a vision tower in addition to the language model."""
    return getattr(model.config, "vision_config", None) is not None

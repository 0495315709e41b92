"""Shape of a model, read from its config without its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from rlpipe.common.hub import hub_has
from rlpipe.common.imports import reading_files
from rlpipe.configs.schema.root_config import ModelConfig
from rlpipe.errors import ModelError
from rlpipe.models.gguf_models import model_folder
from rlpipe.models.loading import COMPLETE, describe_model, meta_model
from rlpipe.models.nf4 import nf4_parameters

HUB_TIMEOUT_S = 2.0


def describe_offline(path: str, config: ModelConfig, option: str = "model.path") -> PreTrainedConfig:
    """Return transformers' config of a model, from the first source that has it.

    The sources are the folder, the hub's cache, ``offline_models.yaml`` if no revision is asked for, and the hub.
    Raises ``ModelError``, which names the ``option`` with the path, if none has it or if the config can't be read.
    """
    folder = Path(model_folder(path)).expanduser()
    if folder.exists():
        return describe_model(str(folder), config, f"{option}={path}")
    cached = _cached_folder(path, config, option)
    if cached is not None:
        return describe_model(cached, config, f"{option}={path}")
    if config.revision is None and path in known_models():
        return _make_config(known_models()[path])
    if hub_has(path, kind="model", option=option, error=ModelError, revision=config.revision, timeout_s=HUB_TIMEOUT_S):
        return describe_model(path, config, f"{option}={path}")
    raise ModelError(
        f"{option}={path}: there is no such folder, the hub can't be reached, and the model is not among those "
        f"built into rlpipe: {_fix(option)}"
    )


@cache
def known_models() -> dict[str, dict[str, Any]]:
    """Return, by repository, the fields of ``config.json`` that determine a model's shape."""
    content = yaml.safe_load(Path(__file__).with_name("offline_models.yaml").read_text())
    return {name: entry["config"] for entry in content for name in entry["repositories"]}


def _make_config(values: dict[str, Any]) -> PreTrainedConfig:
    shape = dict(values)
    return AutoConfig.for_model(shape.pop("model_type"), **shape)


def _cached_folder(path: str, config: ModelConfig, option: str) -> str | None:
    try:
        file = try_to_load_from_cache(path, "config.json", revision=config.revision)
    except HFValidationError:
        remedy = _remedy(config, option)
        raise ModelError(f"{option}: there is no folder {path!r}, and it is not a hub id: {remedy}") from None
    return str(Path(file).parent) if isinstance(file, str) else None


def _remedy(config: ModelConfig, option: str) -> str:
    if config.prepare is not None:
        return f"{config.prepare} creates it when a run starts; start one, or {_fix(option)}"
    return _fix(option)


def _fix(option: str) -> str:
    return f"set {option} to a folder with a config.json"


@dataclass(kw_only=True, slots=True, frozen=True)
class ModelShape:
    """Shape of a model; parameters are counted in elements."""

    num_parameters: int
    num_looked_up: int
    """Parameters of embeddings that are not tied to the output layer: rows are read, nothing is multiplied."""
    num_in_experts: int
    """Parameters in routed experts."""
    num_experts: int
    """Experts per layer; 1 if there are none."""
    experts_per_token: int
    num_quantizable: int
    """Parameters in linear layers and experts, without the output layer."""
    adapter_width: int
    """Parameters of a LoRA adapter of rank 1: inputs plus outputs of the layers that engines prepare for adapters."""
    num_layers: int
    num_heads: int
    """Heads per layer; if layers differ, the greatest number that divides those of each."""
    hidden_size: int
    intermediate_size: int
    """Width that a token passes through in a layer, over all of its experts."""
    vocab_size: int

    def num_used(self, num_tokens: float) -> float:
        """Return the parameters that a pass over ``num_tokens`` multiplies with, if experts are drawn uniformly."""
        missed = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.num_parameters - self.num_looked_up - self.num_in_experts * missed

    @property
    def num_active(self) -> float:
        """Parameters that one token is multiplied with."""
        return self.num_used(1)


def read_shape(described: PreTrainedConfig, model: ModelConfig) -> ModelShape:
    """Read the shape from the model on the meta device, without weights; raise ``ModelError`` if it can't be built."""
    meta = meta_described(described, model)
    text: Any = described.get_text_config()
    experts = {name: entry.numel() for name, entry in meta.named_parameters() if ".experts." in name}
    num_experts, per_token = _num_experts(text) if experts else (1, 1)
    linear = nf4_parameters(meta) - experts.keys()
    sizes = {name: entry.numel() for name, entry in meta.named_parameters()}
    width = max(_widths(text))
    if experts:
        width = max(width, per_token * getattr(text, "moe_intermediate_size", width))
    return ModelShape(
        num_parameters=sum(sizes.values()),
        num_looked_up=_num_looked_up(meta),
        num_in_experts=sum(experts.values()),
        num_experts=num_experts,
        experts_per_token=per_token,
        num_quantizable=sum(experts.values()) + sum(sizes[name] for name in linear if name in sizes),
        adapter_width=_adapter_width(meta, model.adapter.target_modules),
        num_layers=text.num_hidden_layers,
        num_heads=math.gcd(*(layer.num_attention_heads for layer in layer_configs(text))),
        hidden_size=text.hidden_size,
        intermediate_size=width,
        vocab_size=text.vocab_size,
    )


def meta_described(described: PreTrainedConfig, model: ModelConfig) -> PreTrainedModel:
    """Create the model without weights; raise ``ModelError`` if its config does not describe one."""
    with reading_files(f"model.path={model.path}: its config does not describe a model", COMPLETE, error=ModelError):
        return meta_model(described, images=model.images, trust_remote_code=model.trust_remote_code)


def layer_configs(text: Any) -> Sequence[Any]:
    """Return the config of each layer; only these have what differs between layers, such as Gemma 4's head size."""
    return getattr(text, "per_layer_config", None) or [text] * text.num_hidden_layers


def _widths(text: Any) -> Iterator[int]:
    """Yield the widths of the MLPs; Gemma 3n has a list of them."""
    for layer in layer_configs(text):
        width = getattr(layer, "intermediate_size", None) or 4 * layer.hidden_size
        yield from width if isinstance(width, list) else [width]


def _num_experts(text: Any) -> tuple[int, int]:
    """Return the routed experts of a layer and those per token, which models name in several ways."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    counts = [getattr(text, name) for name in names if getattr(text, name, None)]
    per_token = getattr(text, "num_experts_per_tok", None) or getattr(text, "top_k_experts", None)
    return (counts[0], per_token) if counts and per_token else (1, 1)


def _num_looked_up(meta: PreTrainedModel) -> int:
    head: Any = meta.get_output_embeddings() or meta.get_input_embeddings()
    embeddings = [module.weight for module in meta.modules() if isinstance(module, nn.Embedding)]
    return sum(weight.numel() for weight in embeddings if weight is not head.weight)


def _adapter_width(meta: PreTrainedModel, targets: str | Sequence[str]) -> int:
    """Return the adapter's width; vLLM adapts layers by name suffix, or for a string all linear ones but the output."""
    suffixes = None if isinstance(targets, str) else {target.rsplit(".", 1)[-1] for target in targets}
    return sum(
        layer.in_features + layer.out_features
        for name, layer in meta.named_modules()
        if isinstance(layer, nn.Linear)
        and (name.rsplit(".", 1)[-1] != "lm_head" if suffixes is None else name.rsplit(".", 1)[-1] in suffixes)
    )

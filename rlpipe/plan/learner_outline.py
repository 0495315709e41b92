"""The policy on the meta device, without weights, as the learner would load it; and the size of its tensors."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.model_config import AdapterConfig, ModelConfig
from rlpipe.errors import ConfigError, ModelError
from rlpipe.learner import packed_attention
from rlpipe.learner.forward import TokenScorer
from rlpipe.learner.fused_lora import fuse_lora
from rlpipe.learner.policy import lora_config
from rlpipe.learner.row_plan import AttentionLayout
from rlpipe.models.loading import outline_model
from rlpipe.models.nf4 import BLOCK as NF4_BLOCK
from rlpipe.models.nf4 import nf4_parameters
from rlpipe.offload.units import Unit, find_units

NF4_SCALES = 256
"""Number of 8-bit scales that share one 32-bit scale (arXiv:2305.14314)."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Outline:
    """A policy without weights; ``nf4`` has the elements of each 4-bit parameter, by its name in ``scorer``."""

    scorer: TokenScorer
    nf4: Mapping[str, int]
    units: Sequence[Unit]
    kinds: Mapping[int, Hashable]
    """Kinds of the units that are blocks; units of one kind are alike."""
    is_mapped: bool
    """Whether its files have the dtypes in which it is loaded, so that it takes only page cache until it is moved."""

    @property
    def nf4_sizes(self) -> list[list[int]]:
        """Elements of the 4-bit parameters, by unit."""
        names = {id(parameter): name for name, parameter in self.scorer.named_parameters()}
        inside = ([names[id(entry)] for entry in unit.module.parameters()] for unit in self.units)
        return [[self.nf4[name] for name in own if name in self.nf4] for own in inside]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.scorer.parameters() if parameter.requires_grad]

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.scorer.parameters())

    @property
    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.trained)

    def stored_bytes(self, module: nn.Module | None = None, *, trained_dtype: torch.dtype | None = None) -> int:
        """Return the bytes of a module's parameters as loaded, the trained ones in ``trained_dtype`` if given."""
        names = {id(parameter): name for name, parameter in self.scorer.named_parameters()}
        total = 0
        for parameter in (module or self.scorer).parameters():
            itemsize = parameter.itemsize
            if parameter.requires_grad and trained_dtype is not None:
                itemsize = trained_dtype.itemsize
            elements = self.nf4.get(names[id(parameter)])
            total += parameter.numel() * itemsize if elements is None else nf4_bytes(elements)
        return total


def outline_policy(described: PreTrainedConfig, model: ModelConfig, *, frozen: bool = False) -> Outline:
    """Outline the policy, or with ``frozen`` a copy of the initial model, which has no adapter.

    ``described`` is transformers' config of the model. Raises ``ModelError`` if the model or its adapter can't be
    outlined, ``ConfigError`` for a dtype that the model can't have.
    """
    whole = model.adapter.kind == "none" and not frozen
    compute_dtype: torch.dtype = getattr(torch, model.dtype)
    causal = _outline(described, model)
    cast(nn.Module, causal).to(torch.float32 if whole else compute_dtype)
    layout = _set_attention(causal, model.attention)
    quantized = nf4_parameters(causal) if model.adapter.kind == "qlora" else set()
    nf4 = [parameter for name, parameter in causal.named_parameters() if name in quantized]
    scorer = TokenScorer(causal, compute_dtype=compute_dtype, layout=layout)
    if frozen:
        scorer.requires_grad_(False)
    elif not whole:
        scorer.model = _add_adapter(causal, model.adapter)
    scorer.train()
    ids = {id(parameter) for parameter in nf4}
    units = find_units(scorer)
    return Outline(
        scorer=scorer,
        nf4={name: parameter.numel() for name, parameter in scorer.named_parameters() if id(parameter) in ids},
        units=units,
        kinds=_kinds(causal, units),
        is_mapped=not nf4 and (described.dtype or compute_dtype) is causal.dtype,
    )


def nf4_bytes(num_elements: int) -> int:
    """Return the bytes of the 4-bit codes and of their scales, which are quantised, too."""
    scales = -(-num_elements // NF4_BLOCK)
    return -(-num_elements // 2) + scales + 4 * -(-scales // NF4_SCALES)


def _outline(described: PreTrainedConfig, model: ModelConfig) -> PreTrainedModel:
    try:
        causal = outline_model(described, images=model.images, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
        raise ModelError(f"model.path={model.path}: its config describes no model ({describe_error(error)})") from None
    if causal.base_model is causal or causal.get_output_embeddings() is None:
        raise ModelError(f"model.path={model.path}: {type(causal).__name__} has no lm_head of its own")
    return causal


def _set_attention(causal: PreTrainedModel, implementation: str) -> AttentionLayout:
    """Set the attention; GPU kernels are outlined with torch's own, which keeps as much for the backward pass."""
    layout = packed_attention.find_layout(causal, "eager" if implementation == "eager" else "sdpa")
    if layout is AttentionLayout.SHARED:
        packed_attention.use_packed_attention(causal)
    elif implementation == "eager":
        causal.set_attn_implementation("eager")
    return layout


def _add_adapter(causal: PreTrainedModel, config: AdapterConfig) -> PeftModel:
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # the run itself logs it
            adapted = cast(PeftModel, get_peft_model(causal, _lora_config(config, causal)))
    except (OSError, ValueError) as error:
        raise ModelError(f"model.adapter can't be outlined: {describe_error(error)}") from None
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # as the learner trains it
            parameter.data = parameter.data.float()
    fuse_lora(causal)
    return adapted


def _lora_config(config: AdapterConfig, causal: PreTrainedModel) -> LoraConfig:
    """Return the LoRA config in ``adapter.path`` if that folder exists, otherwise that of the adapter's options."""
    folder = Path(config.path).expanduser() if config.path is not None else None
    if folder is None or not folder.exists():
        return lora_config(config, causal)
    found = LoraConfig.from_pretrained(str(folder))
    if not isinstance(found, LoraConfig):
        raise ConfigError(f"model.adapter.path={config.path} holds no LoRA adapter; give another folder, or null")
    found.inference_mode = False
    return found


def _kinds(causal: PreTrainedModel, units: Sequence[Unit]) -> dict[int, Hashable]:
    """Return the kind of each block, from its parameters and, if the model names it, its kind of attention."""
    blocks = [index for index, unit in enumerate(units) if unit.is_block]
    types = getattr(causal.config.get_text_config(), "layer_types", None) or []
    named = types if len(types) == len(blocks) else [None] * len(blocks)
    return {index: (kind, _signature(units[index].module)) for index, kind in zip(blocks, named, strict=True)}


def _signature(block: nn.Module) -> Hashable:
    parameters = tuple(
        (name, parameter.shape, parameter.dtype, parameter.requires_grad)
        for name, parameter in block.named_parameters()
    )
    return parameters, tuple(type(module) for module in block.modules())

"""Merging of an adapter into the weights of a model in memory.

The base is empty (without values) and only the adapter has values, so that a model of any size fits. A patch puts the
given weight into the adapted module, has PEFT merge it, and removes it again.

An empty copy of the model provides the modules to merge in. The base's tensors are gathered one at a time, each merged
with the adapter's tensors for that parameter, so that no rank ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import torch
import transformers
from peft import LoraConfig, PeftConfig, PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from peft.utils.other import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlpipe.common.imports import reading_files
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.errors import ModelError
from rlpipe.learner.adapter_layers import apply_factors, parameter_of
from rlpipe.learner.strategies.sharding import Sharding
from rlpipe.models.adapter import ADAPTER, put_tensors
from rlpipe.models.hf_weight_map import to_files, untied_state
from rlpipe.models.loading import COMPLETE, describe_model, empty_model, is_quantized, placeholder
from rlpipe.models.nf4 import from_nf4, nf4_layers, nf4_round_trip
from rlpipe.models.served_weights import NESTED, PREFIX, changed_tie
from rlpipe.weights.buckets import UNMERGEABLE

Patch = Callable[[Tensor], Tensor]
"""Function from a parameter of the base, which it may change in place, to the merged parameter."""
UNQUANTIZED = "merge into the model that it was made from (--base)"
"""Fix for a base whose weights are rounded, in which the merge would be rounded, too."""
LORA, BASE_COPY = ".lora_", f"{NESTED}.weight"


def empty_base(folder: Path, *, as_named: bool = False, trust_remote_code: bool = False) -> PreTrainedModel:
    """Return the empty model that a folder's config describes.

    For a model of images and text, this is the text-only class if there is one, which rlpipe's learner trains. With
    ``as_named``, it is the class that the config names, which other trainers put their adapters on.
    """
    with reading_files(f"the base {folder} can't be used", COMPLETE, error=ModelError):
        described = ModelConfig(trust_remote_code=trust_remote_code)
        config = describe_model(str(folder), described, f"the base {folder}")
        if is_quantized(config):
            raise ModelError(f"the base {folder} is quantized: {UNQUANTIZED}")
        named = getattr(transformers, next(iter(config.architectures or ()), ""), None)
        return empty_model(config, named if as_named else None, trust_remote_code=trust_remote_code)


def is_made_for(model: PreTrainedModel, tensors: Collection[str]) -> bool:
    """Return whether the model has every module that the names of LoRA's tensors refer to."""
    modules = {f"{PREFIX}{name}" for name, _ in model.named_modules()}
    return {name.partition(LORA)[0].replace(NESTED, "") for name in tensors if LORA in name} <= modules


def load_adapter(
    model: PreTrainedModel, adapter: Path, config: PeftConfig, tensors: Mapping[str, Tensor]
) -> tuple[PeftModel, dict[str, Patch], dict[str, Patch]]:
    """Put the adapter on ``model``; return it with patches for changed parameters, by their names in ``model``.

    The last are those of embeddings that PEFT saved beside the adapter, which are the base's also without the adapter.
    Raises ``ModelError``, with the names, if the adapter has unexpected tensors or lacks some, if it can't be merged
    exactly, or if it changes a parameter that is tied to another.
    """
    names = {id(module): name for name, module in model.named_modules()}
    adapted, copies = _attach_adapter(model, adapter, config, tensors)
    patches = {
        f"{names[id(base)]}.{parameter}": patch
        for module in adapted.modules()
        for base, parameter, patch in patches_of(module)
    }
    if not patches and not copies:
        raise ModelError(f"the adapter {adapter} changes no parameter of {type(model).__name__}")
    if tied := changed_tie(model, patches):
        name, tied_name = tied
        raise ModelError(
            f"the adapter {adapter} changes {name}, but the base ties it to {tied_name}, and both would change: save "
            "the base with tie_word_embeddings=false, and merge into that"
        )
    return adapted, patches, _copying_patches(model, copies)


def _attach_adapter(
    model: PreTrainedModel, folder: Path, config: PeftConfig, tensors: Mapping[str, Tensor]
) -> tuple[PeftModel, dict[str, Tensor]]:
    """Put the adapter on ``model``; return it, and its copies of the base's own parameters, by their names there."""
    subject = f"the adapter {folder}"
    with reading_files(f"{subject} does not fit the base", "give the base that it was trained on", error=ModelError):
        adapted = PeftModel(model, replace(check_mergeable(config), init_lora_weights=False), ADAPTER)
        parameters = dict(adapted.named_parameters(remove_duplicate=False))
        copied = [name for name in tensors if name in parameters and NESTED not in name]
        for name in copied:
            _check_size(name, tensors[name], parameters[name])
        _allocate_embeddings(adapted, tensors)
        put_tensors(adapted, {name: tensor for name, tensor in tensors.items() if name not in copied}, subject)
    return adapted.eval(), {name.removeprefix(PREFIX): tensors[name] for name in copied}


def _check_size(name: str, copy: Tensor, parameter: Tensor) -> None:
    if copy.shape != parameter.shape:
        raise ModelError(
            f"the adapter holds {name} of shape {list(copy.shape)}, and the base has {list(parameter.shape)}: resize "
            f"the base to {len(copy)} tokens (resize_token_embeddings), save it, and merge into that (--base)"
        )


def _copying_patches(model: PreTrainedModel, copies: Mapping[str, Tensor]) -> dict[str, Patch]:
    """Return patches that replace the base's embeddings by the copies that PEFT saved with an adapter.

    Raises ``ModelError`` for different copies of tied embeddings.
    """
    patches = {name: _replacing_patch(copy) for name, copy in copies.items()}
    for name, tied_name in (model.all_tied_weights_keys or {}).items():
        present = [copies[key] for key in (name, tied_name) if key in copies]
        if len(present) > 1 and not torch.equal(*present):
            raise ModelError(
                f"the adapter holds different {name} and {tied_name}, which the base ties: save the base with "
                "tie_word_embeddings=false, and merge into that"
            )
        if present:
            patches[name] = patches[tied_name] = _replacing_patch(present[0])
    return patches


def check_mergeable(config: PeftConfig) -> LoraConfig:
    """Raise ``ValueError`` for an adapter that PEFT can't merge, or that a merge into the weights does not capture."""
    if not isinstance(config, LoraConfig):
        raise ValueError(f"{config.peft_type} is not LoRA, and can't be merged")
    if config.bias != "none":
        raise ValueError(f"it trained biases of the base (bias={config.bias!r}), which are not merged")
    for feature in UNMERGEABLE:
        if getattr(config, feature, None):
            raise ValueError(f"it uses {feature}, which can't be merged")
    return config


def _allocate_embeddings(adapted: PeftModel, tensors: Collection[str]) -> None:
    """Allocate memory for the base's embeddings that PEFT saves along with an adapter on them."""
    for name in tensors:
        if name.endswith(BASE_COPY):
            layer = adapted.get_submodule(name.removesuffix(".weight"))
            layer.weight = nn.Parameter(cast(Tensor, layer.weight).contiguous(), requires_grad=False)


def patches_of(module: nn.Module) -> Iterator[tuple[nn.Module, str, Patch]]:
    """Yield the base module, parameter name and patch for each parameter that the adapter module changes."""
    if isinstance(module, ParamWrapper):
        base = module.get_base_layer()
        yield base, module.parameter_name, _merging_patch(module, base, module.parameter_name)
    elif isinstance(module, LoraLayer):
        base = module.get_base_layer()
        yield base, "weight", _merging_patch(module, base, "weight")
        if module.lora_bias[ADAPTER]:
            yield base, "bias", _bias_patch(module)
    elif isinstance(module, ModulesToSaveWrapper):
        for name, trained in module.modules_to_save[ADAPTER].named_parameters():
            yield module.original_module, name, _replacing_patch(trained)
    elif isinstance(module, AuxiliaryTrainingWrapper):
        raise ModelError(f"{type(module).__name__} can't be merged: train without trainable_token_indices")


def _merging_patch(layer: LoraLayer, base: nn.Module, name: str) -> Patch:
    base_weight = cast(Tensor, getattr(base, name))
    saved = (
        base_weight if base_weight.is_contiguous() else None
    )  # PEFT merges into the embeddings that came with the adapter

    def patch(weight: Tensor) -> Tensor:
        if saved is not None:
            weight = saved.detach().to(weight.dtype, copy=True)
        placeholders = dict(base.named_parameters(recurse=False))
        for parameter_name, parameter in placeholders.items():  # PEFT merges weight and bias together
            placeholder_value = (
                weight.new_zeros(parameter.shape, dtype=parameter.dtype) if parameter_name == "bias" else parameter
            )
            values = weight if parameter_name == name else placeholder_value
            setattr(base, parameter_name, nn.Parameter(values, requires_grad=False))
        layer.merge()
        merged = cast(Tensor, getattr(base, name)).data
        layer.merged_adapters.clear()
        for parameter_name, parameter in placeholders.items():
            setattr(base, parameter_name, parameter)
        return merged

    return patch


def _bias_patch(layer: LoraLayer) -> Patch:
    """Return a patch that adds LoRA's bias itself, because PEFT adds it only while merging the weight."""
    return lambda bias: bias.add_(cast(Tensor, layer.lora_B[ADAPTER].bias).data * layer.scaling[ADAPTER])


def _replacing_patch(saved: Tensor) -> Patch:
    return lambda weight: saved.detach().to(weight.dtype)


def over_nf4(patches: Mapping[str, Patch], quantized: Collection[str]) -> dict[str, Patch]:
    """Return the patches for a base whose ``quantized`` parameters are rounded to NF4 first."""

    return _patch_after(patches, dict.fromkeys(quantized, nf4_round_trip))


def over_scaled(patches: Mapping[str, Patch], factors: Mapping[str, float]) -> dict[str, Patch]:
    """Return the patches for a base whose parameters are multiplied by ``factors`` first."""

    def scale(name: str) -> Patch:
        return lambda weight: apply_factors(name, weight, factors)

    return _patch_after(patches, {name: scale(name) for name in set(map(parameter_of, factors))})


def _patch_after(patches: Mapping[str, Patch], first: Mapping[str, Patch]) -> dict[str, Patch]:
    def compose(earlier: Patch, later: Patch) -> Patch:
        return lambda weight: later(earlier(weight))

    return {
        **first,
        **{name: compose(first[name], patch) if name in first else patch for name, patch in patches.items()},
    }


BASE_PARTS = ("base_layer.", "original_module.")
"""Prefixes under which an adapter module holds the base module that it wraps."""


@dataclass(frozen=True, slots=True)
class MergedParameter:
    """A parameter of the base that the adapter changes."""

    patch: Patch
    parts: Mapping[str, nn.Parameter]
    """Adapter parameters that change it, placeholders in the empty model, by their names in the policy."""

    def merge(self, weight: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Return ``weight`` merged with the adapter's ``parts``; may change ``weight`` in place."""
        for name, parameter in self.parts.items():
            parameter.data = parts[name]
        try:
            return self.patch(weight)
        finally:
            self.empty()

    def empty(self) -> None:
        for parameter in self.parts.values():
            parameter.data = placeholder(parameter)


class LiveMerge:
    """The merged weights of a LoRA policy; all ranks must create it and exhaust ``tensors``."""

    def __init__(self, model: PeftModel, sharding: Sharding) -> None:
        self._model, self._sharding = model, sharding
        self._base = cast(PreTrainedModel, model.get_base_model())
        self._empty_model = empty_model(self._base.config, type(self._base))
        meta_tensors = {
            id(tensor): (name, tensor.detach().to("meta")) for name, tensor in untied_state(self._empty_model).items()
        }
        modules = {id(module): name for name, module in self._empty_model.named_modules()}
        try:
            config = check_mergeable(model.peft_config[ADAPTER])
        except ValueError as error:
            raise ModelError(f"model.adapter.merge: engines can't use this adapter: {error}") from None
        with torch.random.fork_rng(devices=[]):  # the values it draws are not used
            adapted = PeftModel(self._empty_model, replace(config, init_lora_weights=False), ADAPTER)
        self._meta_tensors = {
            live: meta_tensors[id(tensor)]
            for live, tensor in adapted.state_dict(keep_vars=True).items()
            if id(tensor) in meta_tensors
        }
        """Name and meta tensor in the plain model of each tensor of the base, by its name in the policy."""
        self._merged = {
            f"{modules[id(base)]}.{parameter}": MergedParameter(patch, _adapter_parameters(prefix, module, parameter))
            for prefix, module in adapted.named_modules()
            for base, parameter, patch in patches_of(module)
        }
        for parameter in self._merged.values():
            parameter.empty()
        if tied := changed_tie(self._empty_model, self._merged):
            raise ModelError(
                f"model.adapter changes {tied[0]}, which the model ties to {tied[1]}, and engines can't serve them "
                "separately: leave it out of model.adapter, or use a model with tie_word_embeddings=false"
            )

    def meta_tensors(self) -> dict[str, Tensor]:
        """Return the names and shapes of the whole model's tensors, without the adapter, on the meta device."""
        return dict(self._meta_tensors[live] for live in untied_state(self._model) if live in self._meta_tensors)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the merged model's files, in the dtype of the base, on rank 0; nothing on other ranks.

        One parameter is gathered and merged at a time. Peak memory is that parameter, one copy of it, and the float32
        delta that PEFT computes.
        """
        layers, trained = nf4_layers(self._model), dict(self._model.named_parameters())
        for live, tensor in untied_state(self._model).items():
            if live not in self._meta_tensors:
                continue
            name, _ = self._meta_tensors[live]
            merged = self._merged.get(name)
            weight = self._sharding.full(tensor).detach()
            adapter_tensors = (
                {key: self._sharding.full(trained[key]).detach() for key in merged.parts} if merged else {}
            )
            if self._sharding.rank != 0:
                continue
            if live in layers:
                weight = from_nf4(weight, layers[live])
            if merged is not None:
                if weight.data_ptr() == self._sharding.local(tensor).data_ptr():
                    weight = weight.clone()
                weight = merged.merge(weight, adapter_tensors)
            yield from to_files(self._base, name, weight).items()


def _adapter_parameters(prefix: str, module: nn.Module, parameter: str) -> dict[str, nn.Parameter]:
    parameters = {name: value for name, value in module.named_parameters() if not name.startswith(BASE_PARTS)}
    if isinstance(module, ModulesToSaveWrapper):
        key = f"modules_to_save.{ADAPTER}.{parameter}"
        parameters = {key: parameters[key]}
    return {f"{prefix}.{name}": value for name, value in parameters.items()}

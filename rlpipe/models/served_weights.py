"""The weights that an engine serves if it merges each adapter into its weights, computed from the base's files.

Engines compute them to load them, and the learner and ``rlpipe audit`` to know their digest. The files are mapped into
memory, so that all processes of a machine share one copy of the base, and every version is computed from the unchanged
base: no error adds up over versions.

Shapes: E experts, O outputs, I inputs, r rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlpipe.common.hub import local_model
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.errors import ModelError
from rlpipe.models.gguf_models import model_folder
from rlpipe.models.hf_weight_map import WeightGroup, plan_units, untied_state
from rlpipe.models.loading import describe_model, empty_model, is_quantized
from rlpipe.models.weight_files import open_files
from rlpipe.weights.buckets import (
    MAGNITUDE,
    UNMERGEABLE,
    add_checksum,
    check_parameters,
    digest_of_sums,
    lora_scaling,
    merge_sums,
)
from rlpipe.weights.exact_merge import low_rank

PREFIX = "base_model.model."
"""Prefix of all tensor names in PEFT's files."""
NESTED = ".base_layer"
"""Part of the names of modules that PEFT wraps several times, for several of their parameters."""
EXPERTS, EXPERT_DIMENSIONS = ".experts.", 3
_PART = re.compile(rf"(?P<module>.+)\.(?P<part>lora_[AB]\.weight|lora_B\.bias|lora_embedding_[AB]|{MAGNITUDE})")

Merge = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""Function from a parameter of the base and the adapter's tensors to the parameter that is served."""


class ServedWeights:
    """Weights of a base model with an adapter in them, one parameter at a time.

    Raises ``ModelError`` if the base's files can't be read as safetensors or are quantized, or if the adapter was
    trained on a base in NF4.
    """

    def __init__(self, model: ModelConfig) -> None:
        if model.adapter.kind == "qlora":
            raise ModelError(
                "weights.serve=merged: the adapter was trained on a base in NF4, and can't be merged into the base's "
                "files: set weights.serve=adapter"
            )
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        folder = local_model(model_folder(model.path), "model.path", revision=model.revision)
        self._files, self._opened = open_files(folder), ExitStack()
        described = describe_model(str(folder), model)
        if is_quantized(described):
            raise ModelError(
                f"weights.serve=merged: {model.path} is quantized, and an adapter can't be merged into its files: set "
                "weights.serve=adapter, or use an unquantized base"
            )
        self._model = empty_model(described, images=model.images, trust_remote_code=model.trust_remote_code)
        tied: Mapping[str, str] = self._model.all_tied_weights_keys or {}
        self._parameters = [name for name in untied_state(self._model) if name not in tied]
        """Parameters and saved buffers of the model, tied ones once."""
        self._checksums: dict[str, dict[int, int]] = {}
        """Checksums of the base's parameters that an adapter leaves unchanged."""
        self._plan: _Plan | None = None
        self._touched: dict[str, None] = {}
        """Parameters that any version so far has changed."""

    @cached_property
    def _handles(self) -> dict[str, Any]:
        """The open file of every tensor."""
        handles: dict[str, Any] = {}
        for file, names in self._files.by_file.items():
            opened = self._opened.enter_context(safe_open(self._files.folder / file, "pt"))
            handles |= dict.fromkeys(names, opened)
        return handles

    @cached_property
    def _units(self) -> dict[str, WeightGroup]:
        """The tensors in the files that make up each parameter, by its name; of tied ones, by one name."""
        meta_tensors, units = self._files.meta_tensors(), dict[str, WeightGroup]()
        for unit in plan_units(self._model, meta_tensors):
            for name in unit.to_parameters({source: meta_tensors[source] for source in unit.sources}):
                units[name] = unit
        tied = dict(self._model.all_tied_weights_keys or {})
        units |= {
            alias: units[parameter] for parameter, alias in tied.items() if parameter in units and alias not in units
        }
        return units

    @cached_property
    def file_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all tensors that the model uses, by their names in the files."""
        used = {name for parameter in self._parameters for name in self._units[parameter].sources}
        return {name: tuple(tensor.shape) for name, tensor in self._files.meta_tensors().items() if name in used}

    def changed(
        self, config: Mapping[str, Any], adapter: Mapping[str, Tensor], device: torch.device
    ) -> Iterator[tuple[WeightGroup, dict[str, Tensor]]]:
        """Yield the parameters that the adapter changes, in the served type, with the group of tensors they belong to.

        Parameters that only an earlier version changed are yielded, too, as the base has them. If one expert changes,
        all experts are yielded, because vLLM lays them out together.

        Args:
            config: PEFT's config of the adapter.
            adapter: tensors by PEFT's names.
            device: the device to compute on.

        Raises:
            ModelError: the adapter does not fit the base, or can't be merged into it.
        """
        merges = self._merges(config, adapter)
        placed = {name: tensor.to(device) for name, tensor in adapter.items()}
        experts = (
            [name for name in self._parameters if EXPERTS in name] if self.changes_experts(config, adapter) else []
        )
        self._touched |= dict.fromkeys(merges)
        units = {id(unit): unit for unit in (self._units[name] for name in [*self._touched, *experts])}
        for unit in units.values():
            parameters = self._read(unit, device)
            for name in parameters.keys() & merges.keys():
                parameters[name] = merges[name](parameters[name], placed)
                if not parameters[name].isfinite().all():
                    raise ModelError(f"the adapter makes {name} infinite or NaN in {self.dtype}")
            yield unit, parameters

    def changes_experts(self, config: Mapping[str, Any], adapter: Mapping[str, Tensor]) -> bool:
        """Return whether ``changed`` yields experts of a mixture; raise as it does."""
        return any(EXPERTS in name for name in [*self._merges(config, adapter), *self._touched])

    @torch.no_grad()
    def digest(self, config: Mapping[str, Any], adapter: Mapping[str, Tensor], device: torch.device) -> str:
        """Return the digest of all weights that are served; raise as ``changed`` does."""
        sums: dict[int, int] = {}
        remaining = dict.fromkeys(self._parameters)
        for _, parameters in self.changed(config, adapter, device):
            for name, tensor in parameters.items():
                if name in remaining:
                    add_checksum(sums, name, tensor)
                    del remaining[name]
        return digest_of_sums(merge_sums([sums, *(self._base_checksum(name, device) for name in remaining)]))

    def _base_checksum(self, name: str, device: torch.device) -> dict[int, int]:
        if name not in self._checksums:
            sums = self._checksums[name] = {}
            add_checksum(sums, name, self._read(self._units[name], device)[name])
        return self._checksums[name]

    def _read(self, unit: WeightGroup, device: torch.device) -> dict[str, Tensor]:
        tensors = {name: self._handles[name].get_tensor(name) for name in unit.sources}
        parameters = unit.to_parameters({name: self._cast(tensor).to(device) for name, tensor in tensors.items()})
        tied = {
            alias: parameters[parameter]
            for parameter, alias in (self._model.all_tied_weights_keys or {}).items()
            if parameter in parameters
        }
        return {name: value for name, value in {**tied, **parameters}.items() if name in self._parameters}

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _merges(self, config: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Merge]:
        """Return how each parameter that the adapter changes is computed; the adapters of a run share their layout."""
        if self._plan is None or not self._plan.fits(config, names):
            merges = plan_merges(self._model, config, names, self.dtype)
            check_parameters(merges, self._parameters, complete=False)
            self._plan = _Plan(dict(config), set(names), merges)
        return self._plan.merges


@dataclass(frozen=True, slots=True)
class _Plan:
    config: Mapping[str, Any]
    names: Collection[str]
    merges: Mapping[str, Merge]

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return self.names == set(names) and self.config == config


def plan_merges(
    model: PreTrainedModel, config: Mapping[str, Any], names: Collection[str], dtype: torch.dtype
) -> dict[str, Merge]:
    """Return a merge for each parameter of ``model`` that adapter tensors of these names change.

    Raises ``ModelError`` for tensors without a place in the model, for a tied parameter, and for features of PEFT that
    a merge does not capture.
    """
    for feature in UNMERGEABLE:
        if config.get(feature):
            raise ModelError(f"the adapter uses {feature}, which can't be merged into the weights that engines serve")
    by_module: dict[str, dict[str, str]] = {}
    merges: dict[str, Merge] = {}
    for name in sorted(names):
        plain = name.removeprefix(PREFIX)
        if match := _PART.fullmatch(plain):
            by_module.setdefault(match["module"], {})[match["part"].removesuffix(".weight")] = name
        else:
            merges[plain] = _replacing(name, dtype)
    for module, layer_tensors in by_module.items():
        merges |= _merges_of(model, module, layer_tensors, config, dtype)
    if tied := changed_tie(model, merges):
        raise ModelError(
            f"model.adapter changes {tied[0]}, which the model ties to {tied[1]}, and engines can't serve them "
            "separately: leave it out of model.adapter, or use a model with tie_word_embeddings=false"
        )
    return merges


def _merges_of(
    model: PreTrainedModel, module: str, tensors: Mapping[str, str], config: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Merge]:
    """Return the merges of the parameters that one of PEFT's layers changes, from its ``tensors``, by part."""
    plain = module.replace(NESTED, "")
    layer = dict(model.named_modules()).get(plain)
    changed = None if layer is None else _changed_parameter(layer, plain, module.count(NESTED), config)
    if layer is None or changed is None:
        raise ModelError(f"the adapter changes {plain}, which is not a layer of {type(model).__name__}")
    halves = ["lora_embedding_A", "lora_embedding_B"] if "lora_embedding_A" in tensors else ["lora_A", "lora_B"]
    if missing := [half for half in halves if half not in tensors]:
        raise ModelError(f"the adapter has no {missing[0]} for {plain}")
    a, b = (tensors[half] for half in halves)
    name = f"{plain}.{changed}"
    scaling = lora_scaling(config, plain if changed == "weight" else name)
    if cast(Tensor, getattr(layer, changed)).ndim == EXPERT_DIMENSIONS:
        return {name: _merging_experts(a, b, scaling, dtype, transposed=getattr(layer, "is_transposed", False))}
    transposed = isinstance(layer, Conv1D | nn.Embedding)
    merges = {name: _merging(a, b, tensors.get(MAGNITUDE), scaling, dtype, transposed=transposed)}
    if "lora_B.bias" in tensors:
        merges[f"{plain}.bias"] = _adding(tensors["lora_B.bias"], scaling, dtype)
    return merges


def _changed_parameter(layer: nn.Module, name: str, depth: int, config: Mapping[str, Any]) -> str | None:
    """Return the parameter that PEFT's layer on ``layer`` changes, or None.

    Of several ``target_parameters`` of one module, PEFT wraps the first one first, so the last one is the outermost.
    """
    targets = config.get("target_parameters") or []
    wrapped = [
        parameter
        for parameter, _ in layer.named_parameters(recurse=False)
        if any(f".{name}.{parameter}".endswith(f".{target}") for target in targets)
    ]
    if wrapped:
        return wrapped[-1 - depth] if depth < len(wrapped) else None
    return "weight" if isinstance(getattr(layer, "weight", None), nn.Parameter) else None


def changed_tie(model: PreTrainedModel, changed: Collection[str]) -> tuple[str, str] | None:
    """Return the first changed parameter that is tied to another, with that other one, or None."""
    for name, tied_name in (model.all_tied_weights_keys or {}).items():
        if name in changed:
            return name, tied_name
        if tied_name in changed:
            return tied_name, name
    return None


def _replacing(name: str, dtype: torch.dtype) -> Merge:
    return lambda base, adapter: adapter[name].to(dtype).view_as(base)


def _adding(name: str, scaling: float, dtype: torch.dtype) -> Merge:
    return lambda base, adapter: (base.double() + adapter[name].double() * scaling).float().to(dtype)


def _merging(a: str, b: str, magnitude: str | None, scaling: float, dtype: torch.dtype, *, transposed: bool) -> Merge:
    """Return the merge of a layer's weight; ``transposed`` ones are stored as ``[I, O]``."""

    def merge(base: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        change = low_rank(adapter[a], adapter[b], scaling, None if magnitude is None else adapter[magnitude])
        return change.merge_into(base.T, dtype).T if transposed else change.merge_into(base, dtype)

    return merge


def _merging_experts(a: str, b: str, scaling: float, dtype: torch.dtype, *, transposed: bool) -> Merge:
    """Return the merge of experts ``[E, O, I]``, or ``[E, I, O]``, for A ``[E * r, I]`` and B ``[O, r * E]``."""

    def merge(base: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        merged, num_experts = torch.empty_like(base, dtype=dtype), len(base)
        experts_a = adapter[a].view(num_experts, -1, adapter[a].shape[1])  # [E, r, I]
        experts_b = adapter[b].view(len(adapter[b]), -1, num_experts)  # [O, r, E]
        for expert, weight in enumerate(base):
            change = low_rank(experts_a[expert], experts_b[:, :, expert], scaling)
            merged[expert] = change.merge_into(weight.T, dtype).T if transposed else change.merge_into(weight, dtype)
        return merged

    return merge

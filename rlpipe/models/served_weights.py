"""The weights that an engine serves if it folds each adapter into its weights, computed from the base's files.

Engines compute them to load them, and the learner and ``rlpipe audit`` to know their digest. The files are mapped into
memory, so that all processes of a machine share one copy of the base, and every version is computed from the unchanged
base: no error adds up over versions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.errors import ModelError
from rlpipe.models.hf_weight_map import WeightGroup, plan_units, untied_state
from rlpipe.models.loading import describe_model, hollow_model
from rlpipe.models.model_files import model_folder
from rlpipe.models.weight_files import open_files
from rlpipe.weights.buckets import MAGNITUDE, add_checksum, check_parameters, digest_of_sums, lora_scaling, merge_sums
from rlpipe.weights.folding import low_rank

PREFIX = "base_model.model."
"""Prefix of all tensor names in PEFT's files."""
_PART = re.compile(rf"(?P<module>.+)\.(?P<part>lora_[AB]\.weight|lora_embedding_[AB]|{MAGNITUDE})")

Fold = Callable[[Tensor, Mapping[str, Tensor]], Tensor]
"""Function from a parameter of the base and the adapter's tensors to the parameter that is served."""


class ServedWeights:
    """Weights of a base model with an adapter in them, one parameter at a time.

    Raises ``ModelError`` if the base's files can't be read as safetensors.
    """

    def __init__(self, model: ModelConfig) -> None:
        self.dtype: torch.dtype = getattr(torch, model.dtype)
        folder = Path(model_folder(model.path)).expanduser()
        if not folder.is_dir():
            folder = Path(snapshot_download(model.path, revision=model.revision))
        self._files, self._opened = open_files(folder), ExitStack()
        described = describe_model(str(folder), model)
        self._model = hollow_model(described, images=model.images, trust_remote_code=model.trust_remote_code)
        tied: Mapping[str, str] = self._model.all_tied_weights_keys or {}
        self._parameters = [name for name in untied_state(self._model) if name not in tied]
        """Parameters and saved buffers of the model, tied ones once."""
        self._checksums: dict[str, dict[int, int]] = {}
        """Checksums of the base's parameters that an adapter leaves unchanged."""
        self._plan: _Plan | None = None

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
        outlines, units = self._files.outlines(), dict[str, WeightGroup]()
        for unit in plan_units(self._model, outlines):
            for name in unit.to_parameters({source: outlines[source] for source in unit.sources}):
                units[name] = unit
        tied = dict(self._model.all_tied_weights_keys or {})
        units |= {other: units[one] for one, other in tied.items() if one in units and other not in units}
        return units

    @property
    def file_names(self) -> set[str]:
        """Names in the files of all tensors that the model uses."""
        return {name for parameter in self._parameters for name in self._units[parameter].sources}

    def changed(
        self, config: Mapping[str, Any], adapter: Mapping[str, Tensor], device: torch.device
    ) -> Iterator[tuple[WeightGroup, dict[str, Tensor]]]:
        """Yield the parameters that the adapter changes, in the served type, with the group of tensors they belong to.

        Args:
            config: PEFT's config of the adapter.
            adapter: tensors by PEFT's names.
            device: the device to compute on.

        Raises:
            ModelError: the adapter does not fit the base, or can't be folded into it.
        """
        folds = self._folds(config, adapter)
        placed = {name: tensor.to(device) for name, tensor in adapter.items()}
        units = {id(unit): unit for unit in (self._units[name] for name in folds)}
        for unit in units.values():
            parameters = self._read(unit, device)
            yield (
                unit,
                {name: folds[name](value, placed) if name in folds else value for name, value in parameters.items()},
            )

    @torch.no_grad()
    def digest(self, config: Mapping[str, Any], adapter: Mapping[str, Tensor], device: torch.device) -> str:
        """Return the digest of all weights that are served; raise as ``changed`` does."""
        sums: dict[int, int] = {}
        left = dict.fromkeys(self._parameters)
        for _, parameters in self.changed(config, adapter, device):
            for name, tensor in parameters.items():
                if name in left:
                    add_checksum(sums, name, tensor)
                    del left[name]
        return digest_of_sums(merge_sums([sums, *(self._base_checksum(name, device) for name in left)]))

    def _base_checksum(self, name: str, device: torch.device) -> dict[int, int]:
        if name not in self._checksums:
            sums = self._checksums[name] = {}
            add_checksum(sums, name, self._read(self._units[name], device)[name])
        return self._checksums[name]

    def _read(self, unit: WeightGroup, device: torch.device) -> dict[str, Tensor]:
        tensors = {name: self._handles[name].get_tensor(name) for name in unit.sources}
        made = unit.to_parameters({name: self._cast(tensor).to(device) for name, tensor in tensors.items()})
        tied = {other: made[one] for one, other in (self._model.all_tied_weights_keys or {}).items() if one in made}
        return {name: value for name, value in {**tied, **made}.items() if name in self._parameters}

    def _cast(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.dtype) if tensor.is_floating_point() else tensor

    def _folds(self, config: Mapping[str, Any], names: Collection[str]) -> Mapping[str, Fold]:
        """Return how each parameter that the adapter changes is computed; the adapters of a run share their layout."""
        if self._plan is None or not self._plan.fits(config, names):
            folds = plan_folds(self._model, config, names, self.dtype)
            check_parameters(folds, self._parameters, complete=False)
            self._plan = _Plan(dict(config), set(names), folds)
        return self._plan.folds


@dataclass(frozen=True, slots=True)
class _Plan:
    config: Mapping[str, Any]
    names: Collection[str]
    folds: Mapping[str, Fold]

    def fits(self, config: Mapping[str, Any], names: Collection[str]) -> bool:
        return self.names == set(names) and self.config == config


def plan_folds(
    model: PreTrainedModel, config: Mapping[str, Any], names: Collection[str], dtype: torch.dtype
) -> dict[str, Fold]:
    """Return a fold for each parameter of ``model`` that adapter tensors of these names change.

    Raises ``ModelError`` for tensors without a place in the model, and for a tied parameter.
    """
    modules = dict(model.named_modules())
    parts: dict[str, dict[str, str]] = {}
    folds: dict[str, Fold] = {}
    for name in sorted(names):
        plain = name.removeprefix(PREFIX)
        if match := _PART.fullmatch(plain):
            parts.setdefault(match["module"], {})[match["part"].removesuffix(".weight")] = name
        else:
            folds[plain] = _replacing(name, dtype)
    for module, own in parts.items():
        if not isinstance(getattr(modules.get(module), "weight", None), nn.Parameter):
            raise ModelError(f"the adapter changes {module}, which is not a layer of {type(model).__name__}")
        stored_as_inputs = isinstance(modules[module], Conv1D)
        folds[f"{module}.weight"] = _folding(module, own, config, dtype, transposed=stored_as_inputs)
    if tied := changed_tie(model, folds):
        raise ModelError(
            f"model.adapter changes {tied[0]}, which the model ties to {tied[1]}, and engines can't serve them "
            "separately: leave it out of model.adapter, or use a model with tie_word_embeddings=false"
        )
    return folds


def changed_tie(model: PreTrainedModel, changed: Collection[str]) -> tuple[str, str] | None:
    """Return the first changed parameter that is tied to another, with that other one, or None."""
    for one, other in (model.all_tied_weights_keys or {}).items():
        if one in changed:
            return one, other
        if other in changed:
            return other, one
    return None


def _replacing(name: str, dtype: torch.dtype) -> Fold:
    return lambda base, adapter: adapter[name].to(dtype).view_as(base)


def _folding(
    module: str, own: Mapping[str, str], config: Mapping[str, Any], dtype: torch.dtype, *, transposed: bool
) -> Fold:
    """Return the fold of a layer's weight; ``transposed`` ones are stored as ``[I, O]``, and so are embeddings."""
    of_embedding = "lora_embedding_A" in own
    wanted = {f"lora_embedding_{half}" for half in "AB"} if of_embedding else {f"lora_{half}" for half in "AB"}
    if missing := sorted(wanted - own.keys()):
        raise ModelError(f"the adapter has no {missing[0]} for {module}")
    if of_embedding and MAGNITUDE in own:
        raise ModelError(f"DoRA of the embedding {module} can't be folded into it: leave it out of target_modules")
    a, b = (own[name] for name in sorted(wanted))
    magnitude, scaling = own.get(MAGNITUDE), lora_scaling(config, module)

    def fold(base: Tensor, adapter: Mapping[str, Tensor]) -> Tensor:
        change = low_rank(adapter[a], adapter[b], scaling, None if magnitude is None else adapter[magnitude])
        return change.fold(base.T, dtype).T if transposed or of_embedding else change.fold(base, dtype)

    return fold

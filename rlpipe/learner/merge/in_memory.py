"""The weights of a policy in training with its adapter merged, for engines that can't serve the adapter itself.

A hollow twin of the model provides the modules to merge in. The base's tensors are gathered one at a time, each merged
with the adapter's tensors for that parameter, so that no rank ever holds the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from peft import PeftModel
from peft.utils.other import ModulesToSaveWrapper
from torch import Tensor, nn
from transformers import PreTrainedModel

from rlpipe.errors import ModelError
from rlpipe.learner.merge.adapter_patches import ADAPTER, Patch, changed_tie, check_mergeable, patches_of
from rlpipe.learner.strategies.sharding import Sharding
from rlpipe.models.hf_weight_map import to_files, untied_state
from rlpipe.models.loading import hollow, hollow_model
from rlpipe.models.nf4 import from_nf4, nf4_layers

BASE_PARTS = ("base_layer.", "original_module.")
"""Prefixes under which an adapter module holds the base module that it wraps."""


@dataclass(frozen=True, slots=True)
class MergedParameter:
    """A parameter of the base that the adapter changes."""

    patch: Patch
    parts: Mapping[str, nn.Parameter]
    """Adapter parameters that change it, hollow in the twin, by their names in the policy."""

    def merge(self, weight: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        """Return ``weight`` merged with the adapter's ``parts``; may change ``weight`` in place."""
        for name, part in self.parts.items():
            part.data = parts[name]
        try:
            return self.patch(weight)
        finally:
            self.empty()

    def empty(self) -> None:
        for part in self.parts.values():
            part.data = hollow(part)


class LiveMerge:
    """The merged weights of a LoRA policy; all ranks must create it and exhaust ``tensors``."""

    def __init__(self, model: PeftModel, sharding: Sharding) -> None:
        self._model, self._sharding = model, sharding
        self._base = cast(PreTrainedModel, model.get_base_model())
        self._twin = hollow_model(self._base.config, type(self._base))
        outlines = {id(tensor): (name, tensor.detach().to("meta")) for name, tensor in untied_state(self._twin).items()}
        modules = {id(module): name for name, module in self._twin.named_modules()}
        try:
            config = check_mergeable(model.peft_config[ADAPTER])
        except ValueError as error:
            raise ModelError(f"model.adapter.merge: engines can't be given this adapter: {error}") from None
        with torch.random.fork_rng(devices=[]):  # the values it draws are not used
            adapted = PeftModel(self._twin, replace(config, init_lora_weights=False), ADAPTER)
        self._outlines = {
            live: outlines[id(tensor)]
            for live, tensor in adapted.state_dict(keep_vars=True).items()
            if id(tensor) in outlines
        }
        """Name and meta tensor in the plain model of each tensor of the base, by its name in the policy."""
        self._places = {
            f"{modules[id(base)]}.{parameter}": MergedParameter(patch, _parts(prefix, module, parameter))
            for prefix, module in adapted.named_modules()
            for base, parameter, patch in patches_of(module)
        }
        for place in self._places.values():
            place.empty()
        if tied := changed_tie(self._twin, self._places):
            raise ModelError(
                f"model.adapter changes {tied[0]}, which the model ties to {tied[1]}, and engines can't serve them "
                "apart: leave it out of model.adapter, or take a model with tie_word_embeddings=false"
            )

    def outlines(self) -> dict[str, Tensor]:
        """Return the names and shapes of the whole model's tensors, without the adapter, on the meta device."""
        return dict(self._outlines[live] for live in untied_state(self._model) if live in self._outlines)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the merged model's files, in the dtype of the base, on rank 0; nothing on other ranks.

        One parameter is gathered and merged at a time. Peak memory is that parameter, one copy of it, and the float32
        delta that PEFT computes.
        """
        layers, trained = nf4_layers(self._model), dict(self._model.named_parameters())
        for live, tensor in untied_state(self._model).items():
            if live not in self._outlines:
                continue
            name, _ = self._outlines[live]
            place = self._places.get(name)
            weight = self._sharding.full(tensor).detach()
            parts = {part: self._sharding.full(trained[part]).detach() for part in place.parts} if place else {}
            if self._sharding.rank != 0:
                continue
            if live in layers:
                weight = from_nf4(weight, layers[live])
            if place is not None:
                if weight.data_ptr() == self._sharding.local(tensor).data_ptr():
                    weight = weight.clone()
                weight = place.merge(weight, parts)
            yield from to_files(self._base, name, weight).items()


def _parts(prefix: str, module: nn.Module, parameter: str) -> dict[str, nn.Parameter]:
    own = {name: part for name, part in module.named_parameters() if not name.startswith(BASE_PARTS)}
    if isinstance(module, ModulesToSaveWrapper):
        saved = f"modules_to_save.{ADAPTER}.{parameter}"
        own = {saved: own[saved]}
    return {f"{prefix}.{name}": part for name, part in own.items()}

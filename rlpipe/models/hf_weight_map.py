"""The mapping between the tensors in a model's files and the model's parameters, as transformers converts them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor in a file."""

    pattern: str | None
    """The converter's pattern that the tensor's name matches."""
    renamed: str
    """The tensor's name as the converter sees it."""


@dataclass(slots=True)
class WeightGroup:
    """Tensors in the files that together make up one or several parameters of the model."""

    model: PreTrainedModel
    target: str
    """Name of the parameter, or of the first of several."""
    converter: WeightConverter | None
    """Converter of the sources; None if the only source is the parameter itself, perhaps under another name."""
    sources: dict[str, Source] = field(default_factory=dict)
    """Source tensors by their names in the files, in the order of conversion."""

    def to_parameters(self, tensors: Tensors) -> dict[str, Tensor]:
        if self.converter is None:
            return {self.target: tensors[next(iter(self.sources))]}
        converter: Any = deepcopy(self.converter)
        for name, source in self.sources.items():
            converter.add_tensor(self.target, name, source.pattern, tensors[name])
        return self._convert(converter, self.target)

    def to_sources(self, parameters: Tensors) -> dict[str, Tensor]:
        """Convert parameters back to the sources; raise ``ValueError`` if transformers can't."""
        if self.converter is None:
            return {next(iter(self.sources)): parameters[self.target]}
        reverse: Any = self.converter.reverse_transform()
        keys = {name: reverse.rename_source_key(name) for name in parameters}
        target = next(iter(keys.values()))[0]
        for name, (_, pattern) in keys.items():
            reverse.add_tensor(target, name, pattern, parameters[name])
        tensors = self._convert(reverse, target)
        return {name: _find(tensors, source.renamed) for name, source in self.sources.items()}

    def _convert(self, converter: Any, target: str) -> dict[str, Tensor]:
        tensors = converter.convert(target, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}


def plan_units(model: PreTrainedModel, names: Iterable[str]) -> list[WeightGroup]:
    """Group the tensors of a model's files by the parameters that they make up, as ``from_pretrained`` would."""
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if isinstance(conversion, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    meta_tensors = model.state_dict()
    prefix = model.base_model_prefix
    units: dict[str, WeightGroup] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, meta_tensors)
        if target not in meta_tensors and name in meta_tensors:
            target, pattern = rename_source_key(name, [], [], prefix, meta_tensors)
        renamed, _ = rename_source_key(name, renamings, [])
        converter = None if pattern is None else by_pattern[pattern]
        units.setdefault(target, WeightGroup(model, target, converter)).sources[name] = Source(pattern, renamed)
    return list(units.values())


def untied_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters, tied ones once, and the buffers that are saved with them."""
    parameters = dict(model.named_parameters())
    tied = dict(model.named_parameters(remove_duplicate=False)).keys() - parameters.keys()
    return {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if name not in tied}


def to_files(model: PreTrainedModel, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return the tensors that ``save_pretrained`` writes for a model's tensor: renamed, or split if it is fused."""
    written: dict[str, Tensor] = revert_weight_conversion(model, {name: tensor})
    return written


def _find(tensors: Tensors, renamed: str) -> Tensor:
    """Return the tensor named ``renamed``; either name may have the base model's prefix."""
    for name, tensor in tensors.items():
        if name == renamed or name.endswith(f".{renamed}") or renamed.endswith(f".{name}"):
            return tensor
    raise ValueError(f"transformers can't convert it back to {renamed}")

"""A model whose weights stay in its files: each module loads them for its call and frees them after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel

from rlpipe.learner.merge.adapter_patches import Patch
from rlpipe.learner.merge.model_files import ModelFiles
from rlpipe.models.hf_weight_map import WeightGroup


class Streamed:
    """A hollow model whose modules load their weights from files; create it before an adapter is put on the model."""

    def __init__(self, model: PreTrainedModel, files: ModelFiles, units: Sequence[WeightGroup]) -> None:
        self._files = files
        self._names = {module: name for name, module in model.named_modules() if _own(module)}
        outlines = files.outlines()
        self._units = {
            parameter: unit
            for unit in units
            for parameter in unit.to_parameters({name: outlines[name] for name in unit.sources})
        }
        self._tied: Mapping[str, str] = dict(model.all_tied_weights_keys or {})

    @contextmanager
    def running(self, patches: Mapping[str, Patch]) -> Iterator[None]:
        """Make calls of the model load the patched weights, inside the context."""
        handles: list[Any] = []
        for module in self._names:
            hollow = _own(module)
            handles += [
                module.register_forward_pre_hook(lambda module, _: self._fill(module, patches)),
                module.register_forward_hook(lambda module, *_, hollow=hollow: _set(module, hollow), always_call=True),
            ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def filled(self, module: nn.Module, patches: Mapping[str, Patch]) -> Iterator[None]:
        """Load one module's patched weights without calling it, inside the context; it may be an adapter's wrapper."""
        module = module if module in self._names else module.get_base_layer()  # type: ignore[operator]
        hollow = _own(module)
        self._fill(module, patches)
        try:
            yield
        finally:
            _set(module, hollow)

    def _fill(self, module: nn.Module, patches: Mapping[str, Patch]) -> None:
        _set(module, {name: self._read(f"{self._names[module]}.{name}", patches) for name in _own(module)})

    def _read(self, name: str, patches: Mapping[str, Patch]) -> Tensor:
        name = name if name in self._units else self._tied[name]
        unit = self._units[name]
        weight = unit.to_parameters(self._files.read(unit.sources))[name]
        return patches[name](weight) if name in patches else weight


def _own(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters(recurse=False))


def _set(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    for name, weight in weights.items():
        parameter = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
        if is_parametrized(module, name):  # PEFT adapts expert weights by a parametrization
            module.parametrizations[name].original = parameter  # type: ignore[index,union-attr]
        else:
            setattr(module, name, parameter)

"""The modules that FSDP2 gathers, computes and frees one by one, selected by ``learner.fsdp.wrap``."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from torch import nn
from transformers import PreTrainedModel

from rlpipe.configs.schema.learner_config import FsdpConfig
from rlpipe.errors import ModelError
from rlpipe.learner.fused_lora import FusedLora

CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_units(scorer: nn.Module, model: PreTrainedModel, config: FsdpConfig) -> list[nn.Module]:
    """Return the modules inside ``scorer`` to shard as units, inner ones before those around them.

    ``scorer`` is the unit of all other parameters. The lm_head and modules that share its weight are never units,
    because the scorer reads that weight without calling them; nor are the parts of a fused LoRA layer, which does the
    same. Raises ``ModelError`` if the model lacks a class that the config names.
    """
    fused = [module for module in scorer.modules() if isinstance(module, FusedLora)]
    never_called = {id(part) for layer in fused for part in layer.modules() if part is not layer}
    modules = [module for name, module in scorer.named_modules() if name and id(module) not in never_called]
    if config.wrap == "none":
        found = []
    elif config.wrap == "size":
        found = [module for module in modules if _is_large_leaf(module, config.min_num_params)]
    elif config.wrap == "blocks":
        found = _find_blocks(modules, model)
    else:
        found = _find_classes(modules, [config.wrap] if isinstance(config.wrap, str) else config.wrap)
    head = {id(parameter) for parameter in model.get_output_embeddings().parameters()}
    return [module for module in reversed(found) if head.isdisjoint(map(id, module.parameters()))]


def _find_blocks(modules: Collection[nn.Module], model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    found = [module for module in modules if type(module).__name__ in names]
    if not found:
        raise ModelError(
            f"{type(model).__name__} does not name its layers: set learner.fsdp.wrap=size, or their classes"
        )
    return found


def _find_classes(modules: Collection[nn.Module], names: Collection[str]) -> list[nn.Module]:
    classes = {type(module).__name__ for module in modules}
    if missing := sorted(set(names) - classes):
        raise ModelError(
            f"learner.fsdp.wrap: the model has no {missing[0]}; its modules are {', '.join(sorted(classes))}"
        )
    return [module for module in modules if type(module).__name__ in names]


def _is_large_leaf(module: nn.Module, min_num_params: int) -> bool:
    if isinstance(module, CONTAINERS):
        return False
    return _num_params(module) >= min_num_params > max(map(_num_params, _children(module)), default=0)


def _children(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the children that can be units; a list, which is never called itself, is replaced by its items."""
    for child in () if isinstance(module, FusedLora) else module.children():
        if isinstance(child, CONTAINERS):
            yield from _children(child)
        else:
            yield child


def _num_params(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())

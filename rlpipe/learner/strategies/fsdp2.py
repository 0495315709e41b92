"""Strategy ``fsdp2``: weights, gradients and optimizer state sharded by torch's FSDP2."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rlpipe.configs.schema.learner_config import FsdpConfig, OptimizerConfig
from rlpipe.errors import ModelError
from rlpipe.learner.adapter_layers import FusedLora
from rlpipe.learner.forward import LogprobModel, output_head
from rlpipe.learner.strategies.optimizer import TorchUpdates
from rlpipe.learner.strategies.sharding import RankGroup, Updates
from rlpipe.weights.dcp import Read

logger = logging.getLogger(__name__)

CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def find_fsdp_units(module: nn.Module, model: PreTrainedModel, config: FsdpConfig) -> list[nn.Module]:
    """Return the modules inside ``module`` to shard as units, inner ones before those around them.

    ``module`` is the unit of all other parameters. The output head and modules that share its weight are never units,
    because ``module`` reads that weight without calling them; nor are the parts of a fused LoRA layer, which does the
    same. Raises ``ModelError`` if the model lacks a class that the config names.
    """
    fused = [child for child in module.modules() if isinstance(child, FusedLora)]
    never_called = {id(submodule) for layer in fused for submodule in layer.modules() if submodule is not layer}
    modules = [child for name, child in module.named_modules() if name and id(child) not in never_called]
    head = {id(parameter) for parameter in output_head(model).parameters()}
    if config.wrap == "none":
        units = []
    elif config.wrap == "size":
        chosen = _BySize(module, config.min_num_params, head).chosen
        units = [module for module in modules if id(module) in chosen]
    elif config.wrap == "blocks":
        units = _find_blocks(modules, model)
    else:
        units = _find_classes(modules, [config.wrap] if isinstance(config.wrap, str) else config.wrap)
    return [module for module in reversed(units) if head.isdisjoint(map(id, module.parameters()))]


def _find_blocks(modules: Collection[nn.Module], model: PreTrainedModel) -> list[nn.Module]:
    names = set(model._no_split_modules or ())
    blocks = [module for module in modules if type(module).__name__ in names]
    if not blocks:
        raise ModelError(
            f"{type(model).__name__} does not name its layers: set learner.fsdp.wrap=size, or their classes"
        )
    return blocks


def _find_classes(modules: Collection[nn.Module], names: Collection[str]) -> list[nn.Module]:
    classes = {type(module).__name__ for module in modules}
    if missing := sorted(set(names) - classes):
        raise ModelError(
            f"learner.fsdp.wrap: the model has no {missing[0]}; its modules are {', '.join(sorted(classes))}"
        )
    return [module for module in modules if type(module).__name__ in names]


def share_of_root(module: nn.Module, units: Iterable[nn.Module]) -> float:
    """Return the share of all parameters that are in none of the units."""
    sizes = {id(parameter): parameter.numel() for parameter in module.parameters()}
    in_units = {id(parameter) for unit in units for parameter in unit.parameters()}
    return sum(size for key, size in sizes.items() if key not in in_units) / max(sum(sizes.values()), 1)


class _BySize:
    """The choice of units of at least ``min_num_params`` parameters that are in no unit inside them.

    Layers of a list that are smaller are a unit each if the list as a whole is large enough, since neither the list nor
    what is around it, which often has the head's tied weight, can be one.
    """

    def __init__(self, model: nn.Module, min_num_params: int, excluded: AbstractSet[int]) -> None:
        """Choose units in ``model``; ``excluded`` has the ids of parameters that no unit may hold."""
        self._min_num_params, self._excluded = min_num_params, excluded
        self._counted: set[int] = set()
        self.chosen: set[int] = set()
        """Ids of the units."""
        for child in model.children():
            self._visit(child)

    def _visit(self, module: nn.Module) -> int:
        """Choose the units of a module, and return the number of its parameters that are in no unit."""
        is_leaf = isinstance(module, FusedLora)
        num_remaining = self._count(module.parameters(recurse=is_leaf))
        num_remaining += sum(self._visit(child) for child in (() if is_leaf else module.children()))
        if num_remaining < self._min_num_params:
            return num_remaining
        if not isinstance(module, CONTAINERS):
            return 0 if self._choose(module) else num_remaining
        items = list(module.values() if isinstance(module, nn.ModuleDict) else module)
        chosen = [self._choose(item) for item in items]
        return 0 if all(chosen) else num_remaining

    def _choose(self, module: nn.Module) -> bool:
        if not self._excluded.isdisjoint(map(id, module.parameters())):
            return False
        self.chosen.add(id(module))
        return True

    def _count(self, parameters: Iterable[nn.Parameter]) -> int:
        sizes = {id(parameter): parameter.numel() for parameter in parameters if id(parameter) not in self._counted}
        self._counted |= sizes.keys()
        return sum(sizes.values())


class Fsdp2(RankGroup):
    """A group of ranks that holds models sharded by FSDP2; needs torch's default process group.

    Parameters are kept in their own dtype and computed with in the model's ``compute_dtype``. Gradients are summed over
    the ranks in float32: once per update for an adapter, and after every backward pass for a whole model, whose
    unsharded gradients would not fit.
    """

    def __init__(self, config: FsdpConfig, device: torch.device, *, on_cpu: bool, reduce_every_backward: bool) -> None:
        """Create the device mesh; ``on_cpu`` keeps parameters, gradients and optimizer state on the CPU."""
        super().__init__(device)
        self._config, self._on_cpu = config, on_cpu
        self._reduce_every_backward = reduce_every_backward
        self._mesh = init_device_mesh(device.type, (self.num_ranks,))
        self._trained: LogprobModel | None = None

    def shard(self, module: LogprobModel, *, trained: bool) -> None:
        """Shard the model of ``module`` in place, and move it to the device."""
        narrow = module.compute_dtype is not torch.float32
        precision = MixedPrecisionPolicy(
            param_dtype=module.compute_dtype if narrow else None, reduce_dtype=torch.float32 if narrow else None
        )
        offload = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self._on_cpu else OffloadPolicy()
        units = find_fsdp_units(module, module.causal_model, self._config)
        logger.info(
            "FSDP2: %d units; %.1f%% of the parameters are in none and stay gathered up to the backward pass",
            len(units),
            100 * share_of_root(module, units),
        )
        for unit in units:
            fully_shard(
                unit,
                mesh=self._mesh,
                reshard_after_forward=self._config.reshard_after_forward,
                mp_policy=precision,
                offload_policy=offload,
            )
        fully_shard(module, mesh=self._mesh, reshard_after_forward=False, mp_policy=precision, offload_policy=offload)
        for child in module.modules():
            if isinstance(child, FSDPModule):
                # The loss is divided by counts of all ranks: gradients are summed, where FSDP would average them.
                child.set_gradient_divide_factor(1.0)
                child.set_force_sum_reduction_for_comms(True)
        if trained:
            self._trained = module

    def make_updates(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> Updates:
        return TorchUpdates(parameters, config, local=self.local, begin_backward=self._begin_backward)

    def _begin_backward(self, last: bool) -> None:
        assert isinstance(self._trained, FSDPModule)
        self._trained.set_requires_gradient_sync(last or self._reduce_every_backward)

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        return {name: parameter.detach() for name, parameter in parameters.items()}

    def load_state(self, parameters: Mapping[str, nn.Parameter], read: Read) -> None:
        read(self.state(parameters))

    def end_inference(self, module: LogprobModel) -> None:
        # The root keeps its parameters gathered for a backward pass, but the optimizer needs them sharded.
        assert isinstance(module, FSDPModule)
        module.reshard()

    def move(self, parameter: nn.Parameter, towards: nn.Parameter, by: float) -> None:
        self.local(parameter).lerp_(self.local(towards), by)

    def shape(self, tensor: Tensor) -> torch.Size:
        return tensor.shape

    def local(self, tensor: Tensor) -> Tensor:
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def full(self, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        # Offloaded shards are on the CPU, but the process group may support the device only.
        return cast(DTensor, tensor.detach().to(self.device)).full_tensor()

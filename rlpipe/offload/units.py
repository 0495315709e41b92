"""Division of a model into units that run one after another, blocks and others, and the tensors that each uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from rlpipe.offload.layout import TensorInfo

ADAPTER_MARKS = ("lora_", "modules_to_save")
"""Marks in the names of parameters that PEFT adds to a model."""
SCALES = ("absmax", "state2.absmax")
"""Tensors that bitsandbytes keeps beside the codes of a 4-bit weight, and whose size grows with it."""


Fill = Callable[[str, Tensor], None]
"""Function of a name and a host tensor that writes the named tensor's values into it; for models on the meta device."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Member:
    """A tensor of the model, with functions that return it and replace it."""

    name: str
    get: Callable[[], Tensor]
    put: Callable[[Tensor], None]
    dtype: torch.dtype
    """Compute dtype."""

    @classmethod
    def of_parameter(cls, name: str, parameter: torch.nn.Parameter, dtype: torch.dtype | None = None) -> Member:
        def put(tensor: Tensor) -> None:
            set_values(parameter, tensor)

        return cls(name=name, get=lambda: parameter.data, put=put, dtype=dtype or parameter.dtype)

    @classmethod
    def of_attribute(cls, name: str, owner: object, path: str) -> Member:
        """Create a member for a tensor that accompanies a parameter, such as the scales of a 4-bit weight."""
        *owners, attribute = path.split(".")
        holder = attrgetter(".".join(owners))(owner) if owners else owner
        return cls(
            name=name,
            get=lambda: getattr(holder, attribute),
            put=lambda tensor: setattr(holder, attribute, tensor),
            dtype=getattr(holder, attribute).dtype,
        )


@dataclass(kw_only=True, slots=True, eq=False)
class Unit:
    """A part of the model that runs as a whole."""

    name: str
    module: nn.Module
    is_block: bool
    """Whether it is one of the model's repeated layers, whose activations may be kept in different modes."""


@dataclass(kw_only=True, slots=True)
class Inventory:
    """The units of a model, and its tensors by whether they move in chunks."""

    units: Sequence[Unit]
    tensors: list[TensorInfo] = field(default_factory=list)
    """Tensors to lay out in chunks, in the order of first use."""
    members: dict[str, Member] = field(default_factory=dict)
    """The same tensors as members of the model, by name."""
    uses: dict[str, set[int]] = field(default_factory=dict)
    """Indices of the units that use each of these tensors, by name."""
    resident: dict[str, nn.Parameter] = field(default_factory=dict)
    """Parameters that stay on the device: adapters, trained vectors, and those in no unit."""


def find_units(model: nn.Module) -> list[Unit]:
    """Return the model's units in the order of registration, which is that of use in transformers' models.

    Blocks are the entries of the outermost module lists that hold parameters; the modules beside them make up the other
    units, each as large as possible.
    """
    blocks = {id(block) for entries in _block_lists(model) for block in entries}
    units: dict[int, Unit] = {}

    def visit(name: str, module: nn.Module) -> None:
        if not any(True for _ in module.parameters()):
            return
        inside = {id(child) for child in module.modules()}
        if id(module) in blocks or (inside.isdisjoint(blocks) and not isinstance(module, nn.ModuleList)):
            units.setdefault(id(module), Unit(name=name, module=module, is_block=id(module) in blocks))
            return
        for key, child in module.named_children():
            visit(f"{name}.{key}" if name else key, child)

    visit("", model)
    return list(units.values())


def _block_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) and any(True for _ in child.parameters()):
            yield child
        else:
            yield from _block_lists(child)


def take_inventory(
    model: nn.Module, units: Sequence[Unit], *, trained: bool = True, compute_dtype: torch.dtype | None = None
) -> Inventory:
    """Divide the model's parameters into those laid out in chunks and those that stay on the device.

    Without ``trained``, no parameter is trained. Trained parameters in chunks are loaded to the device in
    ``compute_dtype``, if it is given, and updated in their own dtype.
    """
    inventory = Inventory(units=units)
    adapted = is_adapted(model)
    users: dict[int, set[int]] = {}
    for index, unit in enumerate(units):
        for parameter in unit.module.parameters():
            users.setdefault(id(parameter), set()).add(index)
    for name, parameter in model.named_parameters():
        is_trained = trained and parameter.requires_grad
        is_adapter = adapted and any(mark in name for mark in ADAPTER_MARKS)
        if id(parameter) not in users or is_adapter or (is_trained and (adapted or parameter.ndim < 2)):
            inventory.resident[name] = parameter
            continue
        used_by = users[id(parameter)]
        first = min(used_by)
        block = first if units[first].is_block else None
        dtype = compute_dtype if is_trained else None
        _add(inventory, Member.of_parameter(name, parameter, dtype), block, used_by, is_trained=is_trained)
        for member in _scales(name, parameter):
            _add(inventory, member, block, used_by, is_trained=False)
    return inventory


def is_adapted(model: nn.Module) -> bool:
    """Return whether the model has a PEFT adapter; if so, chunks hold no trained parameters."""
    return any(hasattr(module, "peft_config") for module in model.modules())


def _add(inventory: Inventory, member: Member, block: int | None, uses: set[int], *, is_trained: bool) -> None:
    inventory.tensors.append(
        TensorInfo(
            name=member.name,
            num_bytes=member.get().numel() * member.dtype.itemsize,
            block=block,
            is_trained=is_trained,
            dtype=f"{member.get().dtype} {member.dtype}" if is_trained else "",
        )
    )
    inventory.members[member.name] = member
    inventory.uses[member.name] = uses


def _scales(name: str, parameter: nn.Parameter) -> Iterator[Member]:
    state: Any = getattr(parameter, "quant_state", None)
    for path in SCALES if state is not None else ():
        owner: Any = state
        for attribute in path.split("."):
            owner = getattr(owner, attribute, None)
        if isinstance(owner, Tensor):
            yield Member.of_attribute(f"{name}.{path}", state, path)


def move_rest(model: nn.Module, inventory: Inventory, device: torch.device, fill: Fill | None = None) -> None:
    """Move what is in no chunk to the device, in place; parameters on the meta device get the values of ``fill``.

    Raises ``ValueError`` for a buffer on the meta device, since no checkpoint has all buffers.
    """
    for name, parameter in inventory.resident.items():
        _move(parameter, materialize(name, parameter.data, fill).to(device))
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ValueError(f"the buffer {name} is on the meta device: compute it before the model is offloaded")
        buffer.data = buffer.data.to(device)
    for _, state in _quant_states(model):
        state.to(device)


def find_rest(model: nn.Module, inventory: Inventory) -> dict[str, torch.device]:
    """Return the devices of what ``move_rest`` moves, by name, with the CPU in place of the meta device."""
    tensors = {**inventory.resident, **dict(model.named_buffers())}
    tensors |= {f"{name}.quant_state": state.code for name, state in _quant_states(model)}
    return {name: torch.device("cpu") if tensor.is_meta else tensor.device for name, tensor in tensors.items()}


def return_rest(model: nn.Module, inventory: Inventory, devices: Mapping[str, torch.device]) -> None:
    """Move what is in no chunk back to its devices; may be called again, also after it has raised."""
    for name, parameter in inventory.resident.items():
        if not parameter.is_meta:
            _move(parameter, parameter.data.to(devices[name]))
    for name, buffer in model.named_buffers():
        if name in devices and not buffer.is_meta:
            buffer.data = buffer.data.to(devices[name])
    for name, state in _quant_states(model):
        if device := devices.get(f"{name}.quant_state"):
            state.to(device)


def _move(parameter: nn.Parameter, values: Tensor) -> None:
    set_values(parameter, values)
    if parameter.grad is not None:
        parameter.grad = parameter.grad.to(values.device)


def _quant_states(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the quantization states that bitsandbytes keeps for 4-bit weights, with the weights' names."""
    for name, parameter in model.named_parameters():
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            yield name, state


def set_values(parameter: torch.nn.Parameter, values: Tensor) -> None:
    """Make a parameter use the memory of ``values``; it stays the same object."""
    if parameter.is_meta and not values.is_meta:  # .data refuses this
        real = torch.nn.Parameter(values, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, real)
    else:
        parameter.data = values


def materialize(name: str, tensor: Tensor, fill: Fill | None) -> Tensor:
    """Return the tensor itself, or if it is on the meta device, a host tensor with the values from ``fill``."""
    if not tensor.is_meta:
        return tensor
    if fill is None:
        raise ValueError(f"{name} is on the meta device and has no values: pass fill")
    values = torch.empty(tensor.shape, dtype=tensor.dtype)
    fill(name, values)
    return values

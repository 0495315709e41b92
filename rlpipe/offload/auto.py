"""Offloads a model in one call: traces it, searches for the best way that fits, says which, and takes it over."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields

import psutil
import torch
from torch import Tensor, nn

from rlpipe.configs.schema_learner import OptimizerConfig
from rlpipe.hardware.device import Device
from rlpipe.hardware.limits import host_memory_bytes
from rlpipe.hardware.own import own_device
from rlpipe.imports import describe_error
from rlpipe.offload.batches import representative_batch
from rlpipe.offload.cost import Knobs
from rlpipe.offload.decide import Decision, decide, given_decision
from rlpipe.offload.fakes import trace_model, traceable_experts
from rlpipe.offload.layout import CHUNK_SIZES, make_layout
from rlpipe.offload.profile import Capacity
from rlpipe.offload.profiler import make_profile
from rlpipe.offload.rates import rates_of, roofline
from rlpipe.offload.runtime import OffloadedModel, Precision
from rlpipe.offload.trace import Trace
from rlpipe.offload.units import find_units, take_inventory

logger = logging.getLogger(__name__)
SHARE_USED = 0.9
"""Of the memory that is free: the rest is for what no profile sees."""


def offload(
    model: nn.Module,
    *,
    device: torch.device,
    optimizer: OptimizerConfig | None = None,
    batch: Mapping[str, Tensor] | None = None,
    num_tokens: int = 2048,
    loss_of: Callable[[nn.Module, Mapping[str, Tensor]], Tensor] | None = None,
    knobs: Mapping[str, int] | None = None,
    capacity: Capacity | None = None,
    precision: Precision | None = None,
    num_micro_batches: int = 1,
    sizes: Sequence[int] = CHUNK_SIZES,
) -> OffloadedModel:
    """Any model of transformers or PEFT, on the CPU, to be trained on one device.

    ``batch`` is a micro batch of the largest size; without one, it is made of the model's kind, of one row of
    ``num_tokens``. ``loss_of`` is how the model is called for a loss, if not with the batch as arguments. ``knobs``
    fixes some of ``cost.Knobs``, the others are searched. Raises ``DoesNotFit``, and ``ValueError`` for a model that
    no batch is known for, or knobs that can't be.
    """
    precision = precision or Precision()
    given = dict(batch) if batch is not None else representative_batch(model, num_tokens)
    decision = plan(
        model,
        lambda _: loss_of(model, given) if loss_of is not None else model(**given).loss,
        own_device(device),
        knobs=knobs or {},
        capacity=capacity or free_memory(device),
        precision=precision,
        num_micro_batches=num_micro_batches,
        sizes=sizes,
        is_trained=optimizer is not None,
    )
    logger.info("offload: %s", decision.describe())
    return OffloadedModel(
        model, decision.arrangement, device=device, optimizer=optimizer, precision=precision, sizes=sizes
    )


def plan(
    model: nn.Module,
    loss_of: Callable[[Trace], Tensor],
    hardware: Device,
    *,
    knobs: Mapping[str, int],
    capacity: Capacity,
    precision: Precision,
    sizes: Sequence[int],
    num_micro_batches: int = 1,
    num_ranks: int = 1,
    parts: Sequence[int] = (1,),
    is_trained: bool = True,
) -> Decision:
    """The best way; where all ``knobs`` are given, that is it, and nothing is traced.

    ``parts`` are the numbers of shares that are tried into which ranks may cut the chunks. Raises as ``offload`` does,
    also where the model can't be traced.
    """
    if negative := {name: value for name, value in knobs.items() if value < 0}:
        raise ValueError(f"{', '.join(f'{name}={value}' for name, value in negative.items())}: give 0 or more")
    units = find_units(model)
    inventory = take_inventory(model, units, trained=is_trained, compute_dtype=precision.compute)
    layout = make_layout(inventory.tensors, sizes=sizes)
    if knobs.keys() == {entry.name for entry in fields(Knobs)}:
        return given_decision(units, layout, Knobs(**knobs), num_parts=parts[-1])
    try:
        with traceable_experts(model):
            trace = trace_model(model, units, loss_of, roofline(hardware), compute_dtype=precision.compute)
    except RuntimeError as error:
        raise ValueError(
            f"{type(model).__name__} can't be traced without its values ({describe_error(error)}): "
            f"set all of {', '.join(entry.name for entry in fields(Knobs))}"
        ) from error
    profiles = {
        num_parts: make_profile(
            model,
            inventory,
            layout,
            trace,
            precision=precision,
            num_ranks=num_ranks,
            num_parts=num_parts,
            num_micro_batches=num_micro_batches,
        )
        for num_parts in parts
    }
    rates = rates_of(hardware, num_ranks=num_ranks)
    return decide(trace, profiles, num_units=len(units), rates=rates, capacity=capacity, fixed=knobs)


def free_memory(device: torch.device, *, num_neighbours: int = 1) -> Capacity:
    """Nine tenths of what is free, of the host for each of some ranks; on a CPU half of it counts as the device's."""
    available = min(psutil.virtual_memory().available, host_memory_bytes())
    host = int(SHARE_USED * available / num_neighbours)
    if device.type == "cpu":
        return Capacity(device_bytes=host // 2, host_bytes=host // 2)
    return Capacity(device_bytes=int(SHARE_USED * torch.cuda.mem_get_info(device)[0]), host_bytes=host)

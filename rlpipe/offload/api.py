"""Chunked offload for any training loop: planning, wrapping a model, and its optimizer."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.errors import ConfigError
from rlpipe.hardware.calibration import measured_device, num_ranks
from rlpipe.hardware.cgroup import free_host_bytes
from rlpipe.hardware.device import Device
from rlpipe.offload.decision import Capacity, Decision, Knobs
from rlpipe.offload.layout import CHUNK_SIZES, make_layout
from rlpipe.offload.planner.fake_trace import traceable_experts
from rlpipe.offload.planner.planner import (
    AMORTISING_SEQUENCES,
    agree,
    decide,
    describe_small_update,
    given_decision,
    ranks_of,
)
from rlpipe.offload.planner.profiler import make_profile, rates_of, trace_on
from rlpipe.offload.planner.trace import Trace
from rlpipe.offload.representative_batch import representative_batch
from rlpipe.offload.runtime.runtime import OffloadedModel, Precision, check_free
from rlpipe.offload.units import find_units, take_inventory
from rlpipe.offload.updates import ChunkedUpdates
from rlpipe.weights.dcp import StoredTensors, weight_key, write_tensors


class CannotBeTraced(ValueError):
    """Error if a pass can't be run on tensors without values."""


logger = logging.getLogger(__name__)
SHARE_USED = 0.9
"""Share of the free memory to plan with; the rest is for what no profile sees."""


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
    sharing: str = "auto",
) -> OffloadedModel:
    """Offload a model of transformers or PEFT, which lies on the CPU, to be trained on the ``device`` of each rank.

    ``batch`` is a micro batch of the largest size; by default it is one row of ``num_tokens`` that suits the model.
    ``loss_of`` calls the model for a loss, if that does not take the batch as arguments. ``knobs`` fixes some of
    ``decision.Knobs``; the others are searched. If torch has a process group, the search also chooses whether its ranks
    share the chunks, unless ``sharing`` (``replicated``, ``sharded``) does. All ranks must call it with the same model.

    Raises ``DoesNotFit``, and ``ValueError`` if no batch is known for the model, it returns no loss, or options are
    impossible; the model is then as it was.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device={device}: torch finds no GPU here")
    check_free(model, optimizer)
    tensors = dict(batch) if batch is not None else representative_batch(model, num_tokens)
    precision, knobs, part_counts = precision or Precision(), knobs or {}, choices_of(sharing, num_ranks())
    hardware = None if is_given(knobs) else measured_device(device)
    decision = agree(
        capacity or free_memory(device, replaced=model),
        lambda free: plan(
            model,
            lambda _: _loss(model, tensors, loss_of),
            hardware,
            knobs=knobs,
            capacity=free,
            precision=precision,
            num_micro_batches=num_micro_batches,
            sizes=sizes,
            num_ranks=num_ranks(),
            parts=part_counts,
            is_trained=optimizer is not None,
        ),
    )
    offloaded = OffloadedModel(
        model,
        decision.arrangement,
        device=device,
        optimizer=optimizer,
        precision=precision,
        ranks=ranks_of(decision.num_parts),
        sizes=sizes,
    )
    offloaded.decision = decision
    num_sequences = next(iter(tensors.values())).shape[0] * num_micro_batches * num_ranks()
    _log(decision, None if optimizer is None else num_sequences)
    return offloaded


def _log(decision: Decision, num_sequences: int | None) -> None:
    logger.info("offload: %s", decision.describe())
    if num_sequences is not None and num_sequences < AMORTISING_SEQUENCES:
        logger.info("offload: %s", describe_small_update(num_sequences))


def _loss(
    model: nn.Module, batch: Mapping[str, Tensor], loss_of: Callable[[nn.Module, Mapping[str, Tensor]], Tensor] | None
) -> Tensor:
    """Return the loss of a batch from ``loss_of`` or the model; raise ``ValueError`` if there is none."""
    loss = model(**batch).loss if loss_of is None else loss_of(model, batch)
    if not isinstance(loss, Tensor):
        raise ValueError(f"{type(model).__name__} returns no loss for the batch: add labels to it, or pass loss_of")
    return loss


def choices_of(sharing: str, num_ranks: int) -> tuple[int, ...]:
    """Return the numbers of parts per chunk to try for ``sharing``: ``auto``, ``replicated`` or ``sharded``."""
    choices = {"auto": (1, num_ranks), "replicated": (1,), "sharded": (num_ranks,)}
    if sharing not in choices:
        raise ValueError(f"sharing={sharing}: give one of {', '.join(choices)}")
    return choices[sharing] if num_ranks > 1 else (1,)


def is_given(knobs: Mapping[str, int]) -> bool:
    """Return whether all knobs are given, so that nothing is measured, traced or searched."""
    return knobs.keys() == {entry.name for entry in fields(Knobs)}


def plan(
    model: nn.Module,
    loss_of: Callable[[Trace], Tensor],
    hardware: Device | None,
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
    """Return the fastest plan on ``hardware``, or the given one if all ``knobs`` are (``hardware`` may then be None).

    ``parts`` are the numbers of parts per chunk to try. Raises the errors of ``offload``, and
    ``CannotBeTraced``.
    """
    if negative := {name: value for name, value in knobs.items() if value < 0}:
        raise ValueError(f"{', '.join(f'{name}={value}' for name, value in negative.items())}: give 0 or more")
    units = find_units(model)
    inventory = take_inventory(model, units, trained=is_trained, compute_dtype=precision.compute)
    layout = make_layout(inventory.tensors, sizes=sizes)
    if is_given(knobs):
        return given_decision(units, layout, Knobs(**knobs), num_parts=parts[-1])
    assert hardware is not None, "what is searched needs rates"
    try:
        with traceable_experts(model):
            trace = trace_on(hardware, model, units, loss_of, compute_dtype=precision.compute)
    except RuntimeError as error:
        raise CannotBeTraced(
            f"{type(model).__name__} can't be traced without real tensors ({describe_error(error)}): "
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


def free_memory(device: torch.device, *, replaced: nn.Module) -> Capacity:
    """Return ``SHARE_USED`` of the memory that a rank has free once chunks have replaced the model's weights.

    The ranks of a machine share its host's memory; on a CPU, half of that counts as the device's.
    """
    num_neighbours = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    host = int(SHARE_USED * (free_host_bytes() / num_neighbours + _weight_bytes(replaced)))
    if device.type == "cpu":
        return Capacity(device_bytes=host // 2, host_bytes=host // 2)
    return Capacity(device_bytes=int(SHARE_USED * torch.cuda.mem_get_info(device)[0]), host_bytes=host)


def _weight_bytes(model: nn.Module) -> int:
    """Return the host bytes of the model's weights, without memory-mapped files, which count as free."""
    sizes = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters() if p.is_cpu}
    process = psutil.Process().memory_info()
    return min(sum(sizes.values()), process.rss - getattr(process, "shared", 0))


class OffloadedAdamW:
    """AdamW for an offloaded model, to use after one or several calls of ``loss.backward()``.

    Gradients are summed over the ranks, so each loss must be a share of the whole batch's. Only matrices have weight
    decay.
    """

    def __init__(self, offloaded: OffloadedModel, config: OptimizerConfig) -> None:
        self._offloaded, self._peak_lr = offloaded, config.peak_lr
        named = dict(offloaded.model.named_parameters()).items()
        trained = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._updates = ChunkedUpdates(
            offloaded, trained, config, show_message=lambda message: logger.info("offload: %s", message)
        )

    def step(self, *, max_norm: float | None = None, learning_rate: float | None = None) -> float:
        """Update the weights, and return the gradients' global norm; if that is not finite, only drop the gradients.

        All ranks must call it.
        """
        self._offloaded.check_open()
        norm = math.sqrt(float(self._offloaded.ranks.sum(self._updates.squared_norm())))
        if not math.isfinite(norm):
            self._updates.drop()
            return norm
        self._updates.set_learning_rate(self._peak_lr if learning_rate is None else learning_rate)
        self._updates.apply(1.0 if max_norm is None else min(1.0, max_norm / (norm + 1e-6)))
        return norm

    def zero_grad(self) -> None:
        self._offloaded.check_open()
        self._updates.drop()

    def save(self, folder: Path) -> None:
        """Write the trained weights and their moments as a torch distributed checkpoint; all ranks must call it.

        Any number of ranks can load it, however their chunks are arranged. Gradients that were not applied are not part
        of it. Raises ``OSError`` if it can't be written.
        """
        self._offloaded.check_open()
        write_tensors(folder, self._updates.state(), num_ranks=self._offloaded.ranks.num_ranks)

    def load(self, folder: Path) -> None:
        """Load what ``save`` wrote of the same model, and drop gradients; all ranks must call it.

        Raises ``ConfigError`` if other parameters were trained.
        """
        self.zero_grad()
        tensors = StoredTensors(folder)
        stored, weights = tensors.shapes, {weight_key(name) for name in self._updates.names}
        if different := sorted(weights ^ {name for name in stored if name.startswith(weight_key(""))}):
            raise ConfigError(
                f"{folder} has other trained parameters than this model ({len(different)} differ, such as "
                f"{different[0]})"
            )
        self._updates.load_state(stored, tensors.read)

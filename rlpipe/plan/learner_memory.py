"""What a rank of the learner holds: on the device for a model that is there as a whole or in parts, and on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import nn

from rlpipe.configs.schema.learner_config import OptimizerConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.learner.strategies.fsdp_wrap import find_units
from rlpipe.learner.strategies.optimizer_state import BLOCK as MOMENT_BLOCK
from rlpipe.offload.planner.cost import activation_peak
from rlpipe.offload.planner.profile import Mode, StageProfile
from rlpipe.plan.learner_outline import Outline
from rlpipe.plan.learner_room import HOST_BYTES

FLOAT32_BYTES = 4
NUM_MOMENTS = 2
SMALLEST_IN_8_BIT = 4096
"""Elements; of smaller parameters bitsandbytes keeps moments in float32."""
UNITS_GATHERED = 3
"""By FSDP2 at one time: the unit that runs, the next one, and the buffer that this is gathered in."""
ZERO3_LIVE = 1_000_000_000
"""DeepSpeed's ``stage3_max_live_parameters``: elements that stay gathered."""
ZERO3_BUCKETS = 50_000_000 + 500_000_000
"""Elements of its buffers for parameters that are fetched ahead, and for gradients that are reduced."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DeviceBytes:
    """Of a rank, at the peak."""

    weights: int
    gathered: int = 0
    """Weights of other ranks, or of the host, while they are used."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    slots: int = 0
    """Of chunks."""
    reference: int = 0
    """The frozen copy of the initial model."""

    @property
    def total(self) -> int:
        return sum(getattr(self, entry.name) for entry in fields(self))


@dataclass(kw_only=True, slots=True, frozen=True)
class HostBytes:
    """Of a rank."""

    process: int = HOST_BYTES
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    reference: int = 0
    loading: int = 0
    """The model as it is loaded, in another type than its files have, before it goes to where it stays."""

    @property
    def total(self) -> int:
        """At the peak: while the model is loaded, or later."""
        held = self.weights + self.gradients + self.optimizer + self.activations + self.reference
        return self.process + max(self.loading, held)


@dataclass(kw_only=True, slots=True, frozen=True)
class LearnerMemory:
    device: DeviceBytes
    host: HostBytes


def checkpoint_modes(stages: Sequence[StageProfile], config: Config) -> list[Mode]:
    """What becomes of activations without offload."""
    again = Mode.CHECKPOINT if config.model.gradient_checkpointing else Mode.KEEP
    return [again if stage.is_block else Mode.KEEP for stage in stages]


def activation_bytes(stages: Sequence[StageProfile], shared_bytes: int, config: Config) -> int:
    shared = shared_bytes if config.model.gradient_checkpointing else 0
    return activation_peak(stages, checkpoint_modes(stages, config)) + shared


def moment_bytes(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> int:
    """Both of AdamW's; in 8 bit with a float32 scale for each block (arXiv:2110.02861)."""
    in_8_bit = config.name != "adamw"
    return NUM_MOMENTS * sum(
        size + FLOAT32_BYTES * -(-size // MOMENT_BLOCK)
        if in_8_bit and size >= SMALLEST_IN_8_BIT
        else FLOAT32_BYTES * size
        for size in (parameter.numel() for parameter in parameters)
    )


def plain_memory(
    outline: Outline, stages: Sequence[StageProfile], shared_bytes: int, config: Config, *, has_reference: bool
) -> LearnerMemory:
    """Of any strategy, without chunks."""
    activations = activation_bytes(stages, shared_bytes, config)
    spread = {"single": _single, "fsdp2": _fsdp2, "zero3": _zero3}[config.learner.strategy]
    memory = spread(outline, config, has_reference)
    loading = 0 if outline.is_mapped else outline.stored_bytes()
    return LearnerMemory(
        device=replace(memory.device, activations=activations),
        host=replace(memory.host, loading=loading * (1 + has_reference)),
    )


def _single(outline: Outline, config: Config, has_reference: bool) -> LearnerMemory:
    weights, moments = outline.stored_bytes(), moment_bytes(outline.trained, config.learner.optimizer)
    is_paged = config.learner.optimizer.name == "paged_adamw_8bit"
    return LearnerMemory(
        device=DeviceBytes(
            weights=weights,
            gradients=outline.num_trained * FLOAT32_BYTES,
            optimizer=0 if is_paged else moments,
            reference=weights * has_reference,
        ),
        host=HostBytes(optimizer=moments * is_paged),
    )


def _fsdp2(outline: Outline, config: Config, has_reference: bool) -> LearnerMemory:
    """Gradients of a whole model are reduced after each backward pass; those of an adapter once an update, and are
    whole until then."""
    num_ranks, on_host = config.learner.num_ranks, config.learner.offload == "policy"
    is_paged = config.learner.optimizer.name == "paged_adamw_8bit"
    weights = _part(outline.stored_bytes(), num_ranks)
    whole = outline.num_trained * FLOAT32_BYTES
    gradients = _part(whole, num_ranks)
    moments = _part(moment_bytes(outline.trained, config.learner.optimizer), num_ranks)
    gathered = gathered_units(outline, config)
    on_the_way = gathered.gradient_bytes if config.model.adapter.kind == "none" else whole
    reference = weights * has_reference
    return LearnerMemory(
        device=DeviceBytes(
            weights=0 if on_host else weights,
            gathered=gathered.num_bytes,
            gradients=on_the_way + (0 if on_host else gradients),
            optimizer=0 if on_host or is_paged else moments,
            reference=(0 if on_host else reference) + gathered.root_bytes * has_reference,
        ),
        host=HostBytes(
            weights=weights * on_host,
            gradients=gradients * on_host,
            optimizer=moments * (on_host or is_paged),
            reference=reference * on_host,
        ),
    )


def _zero3(outline: Outline, config: Config, has_reference: bool) -> LearnerMemory:
    """Trained weights are held as they are computed with and, for the optimizer, in float32."""
    num_ranks, own = config.learner.num_ranks, config.learner.zero3
    dtype = torch.bfloat16 if outline.scorer.compute_dtype is torch.bfloat16 else torch.float32
    weights = _part(outline.stored_bytes(trained_dtype=dtype), num_ranks)
    gradients = _part(outline.num_trained * FLOAT32_BYTES, num_ranks)
    states = gradients + _part(moment_bytes(outline.trained, config.learner.optimizer), num_ranks)
    elements = outline.num_parameters
    buffers = min(elements, ZERO3_LIVE) + min(elements, ZERO3_BUCKETS)
    reference = weights * has_reference
    return LearnerMemory(
        device=DeviceBytes(
            weights=0 if own.offload_parameters else weights,
            gathered=dtype.itemsize * buffers,
            gradients=0 if own.offload_optimizer else gradients,
            optimizer=0 if own.offload_optimizer else states,
            reference=0 if own.offload_parameters else reference,
        ),
        host=HostBytes(
            weights=weights * own.offload_parameters,
            gradients=gradients * own.offload_optimizer,
            optimizer=states * own.offload_optimizer,
            reference=reference * own.offload_parameters,
        ),
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Gathered:
    """By FSDP2, in the type that is computed with."""

    root_bytes: int
    """What is in no unit; stays from the forward to the end of the backward pass."""
    num_units: int
    num_bytes: int
    """At one time."""
    gradient_bytes: int
    """Of a whole model: those of the output layer, and of the unit that is reduced, also in float32."""


def gathered_units(outline: Outline, config: Config) -> Gathered:
    scorer = outline.scorer
    dtype = scorer.compute_dtype
    found = find_units(scorer, scorer.causal_model, config.learner.fsdp)
    sizes = [outline.stored_bytes(unit, trained_dtype=dtype) for unit in found]
    total, largest = outline.stored_bytes(trained_dtype=dtype), max(sizes, default=0)
    root = max(0, total - sum(sizes))
    reshards = config.learner.fsdp.reshard_after_forward
    head = sum(parameter.numel() for parameter in scorer.causal_model.get_output_embeddings().parameters())
    reduced = largest + largest // dtype.itemsize * FLOAT32_BYTES
    return Gathered(
        root_bytes=root,
        num_units=len(found),
        num_bytes=min(total, root + UNITS_GATHERED * largest) if reshards else total + largest,
        gradient_bytes=head * dtype.itemsize + reduced,
    )


def _part(num_bytes: int, num_ranks: int) -> int:
    return -(-num_bytes // num_ranks)

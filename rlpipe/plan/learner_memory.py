"""The memory of a learner rank: on the device, for a whole or a sharded model, and on the host."""

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
"""Elements; bitsandbytes keeps the moments of smaller parameters in float32."""
UNITS_GATHERED = 3
"""Units that FSDP2 holds gathered at one time: the running one, the next one, and the next one's gather buffer."""
ZERO3_LIVE = 1_000_000_000
"""DeepSpeed's ``stage3_max_live_parameters``: elements that stay gathered."""
ZERO3_BUCKETS = 50_000_000 + 500_000_000
"""Elements of DeepSpeed's buffers for prefetched parameters, and for gradients that are reduced."""


@dataclass(kw_only=True, slots=True, frozen=True)
class DeviceBytes:
    """Device bytes of a rank, at the peak."""

    weights: int
    gathered: int = 0
    """Weights of other ranks, or of the host, while they are used."""
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    slots: int = 0
    """Slots for chunks."""
    reference: int = 0
    """The frozen copy of the initial model."""

    @property
    def total(self) -> int:
        return sum(getattr(self, entry.name) for entry in fields(self))


@dataclass(kw_only=True, slots=True, frozen=True)
class HostBytes:
    """Host bytes of a rank."""

    process: int = HOST_BYTES
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    reference: int = 0
    loading: int = 0
    """The model while it is loaded, if its files have another dtype."""

    @property
    def total(self) -> int:
        """Bytes at the peak: while the model is loaded, or later."""
        held = self.weights + self.gradients + self.optimizer + self.activations + self.reference
        return self.process + max(self.loading, held)


@dataclass(kw_only=True, slots=True, frozen=True)
class LearnerMemory:
    device: DeviceBytes
    host: HostBytes


def checkpoint_modes(stages: Sequence[StageProfile], config: Config) -> list[Mode]:
    """Return the mode of each stage's activations without offload: kept, or checkpointed."""
    again = Mode.CHECKPOINT if config.model.gradient_checkpointing else Mode.KEEP
    return [again if stage.is_block else Mode.KEEP for stage in stages]


def activation_bytes(stages: Sequence[StageProfile], shared_bytes: int, config: Config) -> int:
    shared = shared_bytes if config.model.gradient_checkpointing else 0
    return activation_peak(stages, checkpoint_modes(stages, config)) + shared


def moment_bytes(parameters: Sequence[nn.Parameter], config: OptimizerConfig) -> int:
    """Return the bytes of both AdamW moments; in 8 bit with a float32 scale per block (arXiv:2110.02861)."""
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
    """Return the memory of a rank without chunked offload, for any strategy."""
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
    """Return the memory with FSDP2.

    Gradients of a whole model are reduced after each backward pass; those of an adapter once per update, and are
    unsharded until then.
    """
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
    """Return the memory with ZeRO-3; trained weights are in the compute dtype and, for the optimizer, in float32."""
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
    """Weights that FSDP2 gathers, in the compute dtype."""

    root_bytes: int
    """Weights in no unit, which stay gathered from the forward to the end of the backward pass."""
    num_units: int
    num_bytes: int
    """Most bytes that are gathered at one time."""
    gradient_bytes: int
    """Unsharded gradients of a whole model: of the output layer, and of the unit being reduced, also in float32."""


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

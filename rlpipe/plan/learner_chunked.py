"""The learner with chunked offload: its decision, and the memory and time of that decision."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device import Device
from rlpipe.learner.strategies.chunk_options import chunk_sizes, fixed_knobs, precision_of
from rlpipe.offload.api import choices_of
from rlpipe.offload.layout import ChunkLayout, make_layout
from rlpipe.offload.planner.cost import Knobs, arrange, predict, staging_bytes, update_bytes, working_bytes
from rlpipe.offload.planner.planner import Decision, decide
from rlpipe.offload.planner.profile import Capacity, ChunkProfile, Mode, Profile, Rates
from rlpipe.offload.planner.profiler import make_profile, resident_bytes
from rlpipe.offload.planner.rates import rates_of
from rlpipe.offload.planner.trace import Trace
from rlpipe.offload.units import Inventory, take_inventory
from rlpipe.plan.learner_memory import DeviceBytes, HostBytes, LearnerMemory
from rlpipe.plan.learner_outline import Outline, nf4_bytes
from rlpipe.plan.learner_time import PassTime, StepTime
from rlpipe.plan.learner_work import Work

FREE = Rates(
    host_to_device=math.inf,
    device_to_host=math.inf,
    both=math.inf,
    device_adam={"float32": math.inf},
    host_adam={"float32": math.inf},
    host_adding={"float32 to float32": math.inf},
    device_bandwidth=math.inf,
    host_bandwidth=math.inf,
)
"""Rates at which no transfer, update or sum takes time."""


MOST_WAYS = 1_800_000
"""Most candidates that a plan searches: divisions of the layers among modes, times numbers of persistent chunks."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Chunks:
    """A model divided into chunks."""

    outline: Outline
    inventory: Inventory
    layout: ChunkLayout
    config: Config

    def profile(self, trace: Trace, *, num_parts: int, num_micro_batches: int) -> Profile:
        return make_profile(
            self.outline.scorer,
            self.inventory,
            self.layout,
            trace,
            precision=precision_of(self.config.learner.chunked, self.outline.scorer.compute_dtype),
            num_ranks=self.config.learner.num_ranks,
            num_parts=num_parts,
            num_micro_batches=num_micro_batches,
        )


def make_chunks(outline: Outline, config: Config) -> Chunks:
    """Divide the model into chunks as the learner does; 4-bit weights count with their scales."""
    inventory = take_inventory(outline.scorer, outline.units, compute_dtype=outline.scorer.compute_dtype)
    inventory.tensors = [
        replace(tensor, num_bytes=nf4_bytes(outline.nf4[tensor.name])) if tensor.name in outline.nf4 else tensor
        for tensor in inventory.tensors
    ]
    layout = make_layout(inventory.tensors, sizes=chunk_sizes(config.learner.chunked))
    return Chunks(outline=outline, inventory=inventory, layout=layout, config=config)


def decide_chunks(
    chunks: Chunks, trace: Trace, device: Device, capacity: Capacity, num_micro_batches: int
) -> tuple[Decision, Profile]:
    """Decide as the learner does when it starts, for full micro batches; return the decision with its profile.

    Raises ``DoesNotFit``, and ``ValueError`` if no schedule has the fixed knobs.
    """
    learner = chunks.config.learner
    profiles = {
        num_parts: chunks.profile(trace, num_parts=num_parts, num_micro_batches=num_micro_batches)
        for num_parts in choices_of(learner.chunked.sharing, learner.num_ranks)
    }
    decision = decide(
        trace,
        profiles,
        num_units=len(chunks.outline.units),
        rates=rates_of(device, num_ranks=learner.num_ranks),
        capacity=capacity,
        fixed=searched_knobs(chunks, profiles[max(profiles)]),
    )
    return decision, profiles[decision.num_parts]


def searched_knobs(chunks: Chunks, profile: Profile) -> dict[str, int]:
    """Return the knobs that are not searched, with their values.

    These are the config's; if there are too many candidates, swapped and then offloaded layers are fixed at 0, too,
    because they are rarely chosen.
    """
    fixed = fixed_knobs(chunks.config.learner.chunked)
    for name in ("num_swapped", "num_offloaded"):
        free = sum(knob not in fixed for knob in ("num_swapped", "num_checkpointed", "num_offloaded"))
        if math.comb(len(profile.blocks) + free, free) * (len(profile.chunks) + 1) <= MOST_WAYS:
            break
        fixed.setdefault(name, 0)
    return fixed


def chunked_memory(
    chunks: Chunks, profile: Profile, decision: Decision, rates: Rates, reference: Capacity | None
) -> LearnerMemory:
    """Return the predicted memory by part, including the frozen copy of the initial model."""
    learner, knobs = chunks.config.learner, decision.knobs
    modes = arrange(profile, knobs, rates)
    persistent, others = profile.chunks[: knobs.num_persistent], profile.chunks[knobs.num_persistent :]
    gradient = precision_of(learner.chunked, chunks.outline.scorer.compute_dtype).gradient.itemsize
    model = chunks.outline.scorer
    resident = resident_bytes(model, chunks.inventory)
    small = sum(entry.nbytes for entry in chunks.inventory.resident.values() if entry.requires_grad)
    device_gradients, device_states = _states(persistent, gradient)
    host_gradients, host_states = _states(others, gradient)
    return LearnerMemory(
        device=DeviceBytes(
            weights=sum(chunk.gathered_bytes for chunk in persistent) + resident - 3 * small,
            gradients=device_gradients + small + profile.resident_bytes - resident,
            optimizer=device_states + 2 * small,
            activations=working_bytes(profile, knobs, modes),
            slots=knobs.num_slots * profile.slot_bytes,
            reference=reference.device_bytes if reference is not None else 0,
        ),
        host=HostBytes(
            weights=sum(chunk.num_bytes for chunk in others),
            gradients=host_gradients + staging_bytes(others),
            optimizer=host_states + update_bytes(others),
            activations=sum(
                stage.swapped_bytes for stage, mode in zip(profile.stages, modes, strict=True) if mode is Mode.SWAP
            ),
            reference=reference.host_bytes // decision.num_parts if reference is not None else 0,
            loading=0 if chunks.outline.is_mapped else chunks.outline.stored_bytes(),
        ),
    )


def _states(chunks: Sequence[ChunkProfile], gradient_itemsize: int) -> tuple[int, int]:
    """Return the bytes of summed gradients, and those of the optimizer's weights and moments."""
    gradients = sum(chunk.num_trained for chunk in chunks) * gradient_itemsize
    return gradients, sum(chunk.state_bytes for chunk in chunks) - gradients


def chunked_time(profile: Profile, knobs: Knobs, rates: Rates, work: Work, reference: Capacity | None) -> StepTime:
    """Return the time of a step; ``profile`` is that of ``work``'s row and micro batches."""
    whole = predict(profile, knobs, rates)
    still = replace(profile, stages=[replace(stage, forward_s=0.0, backward_s=0.0) for stage in profile.stages])
    compute = predict(profile, knobs, FREE)
    one_way = {name: getattr(rates, name) for name in ("host_to_device", "device_to_host", "both")}
    transfer = predict(still, knobs, replace(FREE, **one_way))
    exchange = predict(still, knobs, replace(FREE, link=rates.link))
    adding = predict(still, knobs, replace(FREE, host_adding=rates.host_adding, host_bandwidth=rates.host_bandwidth))
    updates, policy = work.num_updates, work.num_logprob_passes
    passes = updates * work.num_micro_batches * work.num_reference_passes
    frozen = _reference_pass(profile, reference, rates)
    if reference is None:  # the policy without its adapter
        policy, passes = policy + work.num_reference_passes, 0
    return StepTime(
        logprob_s=updates * policy * whole.forward_s + passes * frozen.seconds,
        forward_s=updates * whole.forward_s,
        backward_s=updates * whole.backward_s,
        optimizer_s=updates * (whole.device_adam_s + whole.exposed_adam_s),
        compute_s=updates * ((1 + policy) * compute.forward_s + compute.backward_s) + passes * frozen.compute_s,
        transfer_s=float(updates * ((1 + policy) * transfer.forward_s + transfer.backward_s))
        + passes * frozen.transfer_s,
        exchange_s=updates * ((1 + policy) * exchange.forward_s + exchange.backward_s) + passes * frozen.exchange_s,
        adding_s=updates * adding.backward_s,
        device_adam_s=updates * whole.device_adam_s,
        host_adam_s=updates * whole.host_adam_s,
    )


def _reference_pass(profile: Profile, reference: Capacity | None, rates: Rates) -> PassTime:
    moved = 0 if reference is None else reference.host_bytes
    return PassTime(compute_s=sum(stage.forward_s for stage in profile.stages), transfer_s=moved / rates.host_to_device)

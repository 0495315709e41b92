"""Time of a training step: what it computes, moves and exchanges; with chunks, too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.device import Curve, Device
from rlpipe.learner.row_plan import AttentionLayout, Row, plan_row
from rlpipe.learner.strategies.chunked import chunk_sizes, fixed_knobs, precision_of
from rlpipe.learner.workload import num_sequences, pack_full, reads_features, sequence_tokens
from rlpipe.offload.api import choices_of
from rlpipe.offload.decision import Capacity, Decision, Knobs, Mode
from rlpipe.offload.layout import ChunkLayout, make_layout
from rlpipe.offload.planner.cost import (
    ChunkProfile,
    Profile,
    Rates,
    StageProfile,
    arrange,
    predict,
    staging_bytes,
    update_bytes,
    working_bytes,
)
from rlpipe.offload.planner.planner import decide
from rlpipe.offload.planner.profiler import make_profile, rates_of, resident_bytes
from rlpipe.offload.planner.trace import Trace
from rlpipe.offload.units import Inventory, take_inventory
from rlpipe.plan.learner_memory import (
    DeviceBytes,
    HostBytes,
    LearnerMemory,
    MetaPolicy,
    checkpoint_modes,
    gathered_units,
    nf4_bytes,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Work:
    """Work of a rank, with all sequences at full length."""

    num_sequences: int
    """Sequences of a step, on all ranks."""
    sequence_tokens: int
    num_updates: int
    """Optimizer updates per step."""
    updates_per_pass: int
    """Updates per epoch over the step's sequences."""
    num_micro_batches: int
    """Micro batches of an update."""
    num_logprob_passes: float
    """Forward passes without gradient per micro batch, for the policy's log-probs at the step's start."""
    num_reference_passes: float
    """Forward passes of the reference per micro batch."""
    row: Row
    """Row of the micro batch with the most work."""

    @property
    def update_sequences(self) -> float:
        """Sequences of an update, on all ranks."""
        return self.num_sequences / self.updates_per_pass

    @property
    def step_tokens(self) -> int:
        """Tokens of a step, on all ranks; each counts once, however often it is trained on."""
        return self.num_sequences * self.sequence_tokens


def read_work(config: Config, layout: AttentionLayout) -> Work:
    """Pack a step as the run does; raise ``ConfigError`` for sequences that fit into no micro batch."""
    algorithm, sequences = config.algorithm, num_sequences(config.algorithm)
    num_micro_batches, fullest = pack_full(config)
    updates_per_pass = min(algorithm.num_minibatches, sequences)
    num_updates = updates_per_pass * algorithm.num_epochs_per_step
    return Work(
        num_sequences=sequences,
        sequence_tokens=sequence_tokens(config),
        num_updates=num_updates,
        updates_per_pass=updates_per_pass,
        num_micro_batches=num_micro_batches,
        num_logprob_passes=_logprob_passes(algorithm, num_updates),
        num_reference_passes=_reference_passes(algorithm),
        row=plan_row(fullest, layout=layout, device=torch.device("cpu")),
    )


def _logprob_passes(algorithm: AlgorithmConfig, num_updates: int) -> float:
    """Return the policy's passes without gradient: of later updates at the step's start, and of KTO's mismatches.

    Advantages that depend on log-probs need those of the first update, too. A critic has a pass over the first epoch
    for its values, and one over each for its training.
    """
    if algorithm.kind == "preference":
        return 0 if algorithm.preference.takes_pairs else 1
    if algorithm.samples_pairs:
        return 0
    if algorithm.learner_computes_advantages:
        return 1 + algorithm.has_critic * (1 + 1 / algorithm.num_epochs_per_step)
    return (num_updates - 1) / num_updates if algorithm.kind == "rl" else 0


def _reference_passes(algorithm: AlgorithmConfig) -> float:
    """Return the reference passes: one for the KL, and one for features that the learner computes for EBFT.

    A KL that is only in the reward has one in the first epoch.

    Preferences have one for their rows, and KTO another one for its mismatches.
    """
    if algorithm.kind == "preference":
        runs = algorithm.preference.runs_reference
        return int(runs) + int(runs and not algorithm.preference.takes_pairs)
    if algorithm.samples_pairs:
        return int(algorithm.preference.needs_reference)
    if algorithm.kind != "rl":
        return 0
    in_reward = algorithm.learner_computes_advantages and algorithm.reward_kl.coef > 0
    kl_passes = 1 if algorithm.loss.beta > 0 else in_reward / algorithm.num_epochs_per_step
    return kl_passes + int(reads_features(algorithm))


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTime:
    """Seconds of a step.

    The first four follow each other. The others are the kinds of work in them, some of which overlap.
    """

    logprob_s: float
    """Passes without gradient: of the policy at the step's start, and of the reference."""
    forward_s: float
    backward_s: float
    """Backward passes, including recomputation."""
    optimizer_s: float
    """Optimizer time that no pass hides."""
    compute_s: float
    """Computing in all passes."""
    transfer_s: float
    """Transfers between host and device."""
    exchange_s: float
    """Exchange between ranks."""
    adding_s: float = 0.0
    """Adding gradients of chunks, on the host."""
    device_adam_s: float
    host_adam_s: float

    @property
    def seconds(self) -> float:
        return self.logprob_s + self.forward_s + self.backward_s + self.optimizer_s

    @property
    def bottleneck(self) -> str:
        passes = {
            "arithmetic and device memory": self.compute_s,
            "transfers between host and device": self.transfer_s,
            "exchange between ranks": self.exchange_s,
            "adding gradients on the host": self.adding_s,
        }
        if self.optimizer_s > self.seconds - self.optimizer_s:
            return "optimizer on the host" if self.host_adam_s > self.device_adam_s else "optimizer on the device"
        return max(passes, key=lambda name: passes[name])


@dataclass(kw_only=True, slots=True, frozen=True)
class PassTime:
    """Seconds of one pass of a micro batch, for each kind of work alone."""

    compute_s: float
    transfer_s: float = 0.0
    exchange_s: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the pass: transfers from the host, then exchange between ranks, both overlapped with computing."""
        return max(self.compute_s, self.transfer_s + self.exchange_s)


@dataclass(kw_only=True, slots=True, frozen=True)
class Update:
    """Seconds of an update in addition to its passes."""

    reduce_s: float = 0.0
    """Summing gradients over ranks, or sending them to the host, if done once per update."""
    device_adam_s: float = 0.0
    host_adam_s: float = 0.0


def plain_time(
    policy: MetaPolicy, stages: Sequence[StageProfile], config: Config, work: Work, device: Device
) -> StepTime:
    """Return the time without chunked offload, for any strategy; ``stages`` are those of ``work``'s row."""
    rates = rates_of(device, num_ranks=config.learner.num_ranks)
    modes = checkpoint_modes(stages, config)
    forward_s = sum(stage.forward_s for stage in stages)
    recompute_s = sum(stage.forward_s for stage, mode in zip(stages, modes, strict=True) if mode is Mode.CHECKPOINT)
    backward_s = recompute_s + sum(stage.backward_s for stage in stages)
    if config.learner.strategy == "single":
        forward, backward = PassTime(compute_s=forward_s), PassTime(compute_s=backward_s)
        return add_up(forward, backward, Update(device_adam_s=policy.num_trained / rates.device_adam["float32"]), work)
    moved = _moved(policy, config, rates)
    forward = PassTime(compute_s=forward_s, transfer_s=moved.forward_in_s, exchange_s=moved.forward_gather_s)
    backward = PassTime(
        compute_s=backward_s,
        transfer_s=moved.backward_in_s + moved.out_s * moved.sends_each_time,
        exchange_s=moved.backward_gather_s + moved.reduce_s * moved.sends_each_time,
    )
    num_updated = policy.num_trained / config.learner.num_ranks
    on_host = moved.updates_on_host
    update = Update(
        reduce_s=0.0 if moved.sends_each_time else moved.reduce_s + moved.out_s,
        device_adam_s=0.0 if on_host else num_updated / rates.device_adam["float32"],
        host_adam_s=num_updated / rates.host_adam["float32"] if on_host else 0.0,
    )
    return add_up(forward, backward, update, work)


def add_up(forward: PassTime, backward: PassTime, update: Update, work: Work) -> StepTime:
    """Return the time of all micro batches and updates, if no pass hides the optimizer."""
    count = work.num_updates * work.num_micro_batches
    passes = count * (work.num_logprob_passes + work.num_reference_passes)
    return StepTime(
        logprob_s=passes * forward.seconds,
        forward_s=count * forward.seconds,
        backward_s=count * backward.seconds + work.num_updates * update.reduce_s,
        optimizer_s=work.num_updates * (update.device_adam_s + update.host_adam_s),
        compute_s=(passes + count) * forward.compute_s + count * backward.compute_s,
        transfer_s=(passes + count) * forward.transfer_s + count * backward.transfer_s,
        exchange_s=(passes + count) * forward.exchange_s
        + count * backward.exchange_s
        + work.num_updates * update.reduce_s,
        device_adam_s=work.num_updates * update.device_adam_s,
        host_adam_s=work.num_updates * update.host_adam_s,
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class _Moved:
    """Seconds of communication in one pass, if ranks share the model."""

    forward_gather_s: float
    backward_gather_s: float
    forward_in_s: float
    backward_in_s: float
    reduce_s: float
    out_s: float
    sends_each_time: bool
    """Whether gradients go to other ranks, and to the host, after every backward pass rather than once per update."""
    updates_on_host: bool


def _moved(policy: MetaPolicy, config: Config, rates: Rates) -> _Moved:
    learner, num_ranks = config.learner, config.learner.num_ranks
    is_fsdp, dtype = learner.strategy == "fsdp2", policy.module.compute_dtype
    total_bytes = policy.stored_bytes(trained_dtype=dtype)
    gathered = gathered_units(policy, config) if is_fsdp else None
    in_units = 1.0 if gathered is None else 1 - gathered.root_bytes / total_bytes
    num_units = 1 if gathered is None else max(1, gathered.num_units)
    is_gathered_again = gathered is None or learner.fsdp.reshard_after_forward

    def exchange_s(curve: Curve, num_bytes: float) -> tuple[float, float]:
        """Return the seconds of weights in no unit, and of all units one by one."""
        received = num_bytes * (1 - 1 / num_ranks)
        return curve.time(received * (1 - in_units)), num_units * curve.time(received * in_units / num_units)

    root_s, units_s = exchange_s(rates.link.all_gather, total_bytes)
    weights_on_host = learner.offload == "policy" or (not is_fsdp and learner.zero3.offload_parameters)
    updates_on_host = learner.offload == "policy" or (not is_fsdp and learner.zero3.offload_optimizer)
    stored_dtype = torch.float32 if is_fsdp else dtype  # torch casts on the device, DeepSpeed holds both
    in_s = (
        policy.stored_bytes(trained_dtype=stored_dtype) / num_ranks / rates.host_to_device if weights_on_host else 0.0
    )
    gradient_bytes = policy.num_trained * torch.float32.itemsize
    return _Moved(
        forward_gather_s=root_s + units_s,
        backward_gather_s=units_s * is_gathered_again,
        forward_in_s=in_s,
        backward_in_s=in_units * in_s * is_gathered_again,
        reduce_s=sum(exchange_s(rates.link.reduce_scatter, gradient_bytes)),
        out_s=gradient_bytes / num_ranks / rates.device_to_host if updates_on_host else 0.0,
        sends_each_time=not is_fsdp or config.model.adapter.kind == "none",
        updates_on_host=updates_on_host,
    )


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


MAX_CANDIDATES = 1_800_000
"""Most candidates that a plan searches: divisions of the layers among modes, times numbers of persistent chunks."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Chunks:
    """A model divided into chunks."""

    policy: MetaPolicy
    inventory: Inventory
    layout: ChunkLayout
    config: Config

    def profile(self, trace: Trace, *, num_parts: int, num_micro_batches: int) -> Profile:
        return make_profile(
            self.policy.module,
            self.inventory,
            self.layout,
            trace,
            precision=precision_of(self.config.learner.chunked, self.policy.module.compute_dtype),
            num_ranks=self.config.learner.num_ranks,
            num_parts=num_parts,
            num_micro_batches=num_micro_batches,
        )


def make_chunks(policy: MetaPolicy, config: Config) -> Chunks:
    """Divide the model into chunks as the learner does; 4-bit weights count with their scales."""
    inventory = take_inventory(policy.module, policy.units, compute_dtype=policy.module.compute_dtype)
    inventory.tensors = [
        replace(tensor, num_bytes=nf4_bytes(policy.nf4[tensor.name])) if tensor.name in policy.nf4 else tensor
        for tensor in inventory.tensors
    ]
    layout = make_layout(inventory.tensors, sizes=chunk_sizes(config.learner.chunked))
    return Chunks(policy=policy, inventory=inventory, layout=layout, config=config)


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
        num_units=len(chunks.policy.units),
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
        if math.comb(len(profile.blocks) + free, free) * (len(profile.chunks) + 1) <= MAX_CANDIDATES:
            break
        fixed.setdefault(name, 0)
    return fixed


def chunked_memory(
    chunks: Chunks, profile: Profile, decision: Decision, rates: Rates, reference: Capacity | None
) -> LearnerMemory:
    """Return the predicted memory by part, including the frozen copy of the initial model."""
    learner, knobs = chunks.config.learner, decision.knobs
    modes = arrange(profile, knobs, rates)
    persistent, host_chunks = profile.chunks[: knobs.num_persistent], profile.chunks[knobs.num_persistent :]
    gradient = precision_of(learner.chunked, chunks.policy.module.compute_dtype).gradient.itemsize
    model = chunks.policy.module
    resident = resident_bytes(model, chunks.inventory)
    trained_resident = sum(entry.nbytes for entry in chunks.inventory.resident.values() if entry.requires_grad)
    device_gradients, device_states = _states(persistent, gradient)
    host_gradients, host_states = _states(host_chunks, gradient)
    return LearnerMemory(
        device=DeviceBytes(
            weights=sum(chunk.gathered_bytes for chunk in persistent) + resident - 3 * trained_resident,
            gradients=device_gradients + trained_resident + profile.resident_bytes - resident,
            optimizer=device_states + 2 * trained_resident,
            activations=working_bytes(profile, knobs, modes),
            slots=knobs.num_slots * profile.slot_bytes,
            reference=reference.device_bytes if reference is not None else 0,
        ),
        host=HostBytes(
            weights=sum(chunk.num_bytes for chunk in host_chunks),
            gradients=host_gradients + staging_bytes(host_chunks),
            optimizer=host_states + update_bytes(host_chunks),
            activations=sum(
                stage.swapped_bytes for stage, mode in zip(profile.stages, modes, strict=True) if mode is Mode.SWAP
            ),
            reference=reference.host_bytes // decision.num_parts if reference is not None else 0,
            loading=0 if chunks.policy.is_mapped else chunks.policy.stored_bytes(),
        ),
    )


def _states(chunks: Sequence[ChunkProfile], gradient_itemsize: int) -> tuple[int, int]:
    """Return the bytes of summed gradients, and those of the optimizer's weights and moments."""
    gradients = sum(chunk.num_trained for chunk in chunks) * gradient_itemsize
    return gradients, sum(chunk.state_bytes for chunk in chunks) - gradients


def chunked_time(profile: Profile, knobs: Knobs, rates: Rates, work: Work, reference: Capacity | None) -> StepTime:
    """Return the time of a step; ``profile`` is that of ``work``'s row and micro batches."""
    prediction = predict(profile, knobs, rates)
    without_compute = replace(
        profile, stages=[replace(stage, forward_s=0.0, backward_s=0.0) for stage in profile.stages]
    )
    compute = predict(profile, knobs, FREE)
    bandwidths = {name: getattr(rates, name) for name in ("host_to_device", "device_to_host", "both")}
    transfer = predict(without_compute, knobs, replace(FREE, **bandwidths))
    exchange = predict(without_compute, knobs, replace(FREE, link=rates.link))
    adding = predict(
        without_compute, knobs, replace(FREE, host_adding=rates.host_adding, host_bandwidth=rates.host_bandwidth)
    )
    updates, policy = work.num_updates, work.num_logprob_passes
    passes = updates * work.num_micro_batches * work.num_reference_passes
    frozen = _reference_pass(profile, reference, rates)
    if reference is None:  # the policy without its adapter
        policy, passes = policy + work.num_reference_passes, 0
    return StepTime(
        logprob_s=updates * policy * prediction.forward_s + passes * frozen.seconds,
        forward_s=updates * prediction.forward_s,
        backward_s=updates * prediction.backward_s,
        optimizer_s=updates * (prediction.device_adam_s + prediction.exposed_adam_s),
        compute_s=updates * ((1 + policy) * compute.forward_s + compute.backward_s) + passes * frozen.compute_s,
        transfer_s=float(updates * ((1 + policy) * transfer.forward_s + transfer.backward_s))
        + passes * frozen.transfer_s,
        exchange_s=updates * ((1 + policy) * exchange.forward_s + exchange.backward_s) + passes * frozen.exchange_s,
        adding_s=updates * adding.backward_s,
        device_adam_s=updates * prediction.device_adam_s,
        host_adam_s=updates * prediction.host_adam_s,
    )


def _reference_pass(profile: Profile, reference: Capacity | None, rates: Rates) -> PassTime:
    moved = 0 if reference is None else reference.host_bytes
    return PassTime(compute_s=sum(stage.forward_s for stage in profile.stages), transfer_s=moved / rates.host_to_device)

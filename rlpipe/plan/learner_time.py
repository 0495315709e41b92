"""The learner's time for a step: computing, transfers and exchange, and which of these it waits for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rlpipe.configs.schema.root_config import Config
from rlpipe.hardware.curve import Curve
from rlpipe.hardware.device import Device
from rlpipe.offload.planner.profile import Mode, Rates, StageProfile
from rlpipe.offload.planner.rates import rates_of
from rlpipe.plan.learner_memory import FLOAT32_BYTES, checkpoint_modes, gathered_units
from rlpipe.plan.learner_outline import Outline
from rlpipe.plan.learner_work import Work


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
    """Seconds of an update, beside its passes."""

    reduce_s: float = 0.0
    """Summing gradients over ranks, or sending them to the host, if done once per update."""
    device_adam_s: float = 0.0
    host_adam_s: float = 0.0


def plain_time(
    outline: Outline, stages: Sequence[StageProfile], config: Config, work: Work, device: Device
) -> StepTime:
    """Return the time without chunked offload, for any strategy; ``stages`` are those of ``work``'s row."""
    rates = rates_of(device, num_ranks=config.learner.num_ranks)
    modes = checkpoint_modes(stages, config)
    forward_s = sum(stage.forward_s for stage in stages)
    again_s = sum(stage.forward_s for stage, mode in zip(stages, modes, strict=True) if mode is Mode.CHECKPOINT)
    backward_s = again_s + sum(stage.backward_s for stage in stages)
    if config.learner.strategy == "single":
        forward, backward = PassTime(compute_s=forward_s), PassTime(compute_s=backward_s)
        return add_up(forward, backward, Update(device_adam_s=outline.num_trained / rates.device_adam["float32"]), work)
    moved = _moved(outline, config, rates)
    forward = PassTime(compute_s=forward_s, transfer_s=moved.forward_in_s, exchange_s=moved.forward_gather_s)
    backward = PassTime(
        compute_s=backward_s,
        transfer_s=moved.backward_in_s + moved.out_s * moved.sends_each_time,
        exchange_s=moved.backward_gather_s + moved.reduce_s * moved.sends_each_time,
    )
    own = outline.num_trained / config.learner.num_ranks
    on_host = moved.updates_on_host
    update = Update(
        reduce_s=0.0 if moved.sends_each_time else moved.reduce_s + moved.out_s,
        device_adam_s=0.0 if on_host else own / rates.device_adam["float32"],
        host_adam_s=own / rates.host_adam["float32"] if on_host else 0.0,
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


def _moved(outline: Outline, config: Config, rates: Rates) -> _Moved:
    learner, num_ranks = config.learner, config.learner.num_ranks
    is_fsdp, dtype = learner.strategy == "fsdp2", outline.scorer.compute_dtype
    whole_bytes = outline.stored_bytes(trained_dtype=dtype)
    gathered = gathered_units(outline, config) if is_fsdp else None
    in_units = 1.0 if gathered is None else 1 - gathered.root_bytes / whole_bytes
    num_units = 1 if gathered is None else max(1, gathered.num_units)
    is_gathered_again = gathered is None or learner.fsdp.reshard_after_forward

    def exchange_s(curve: Curve, num_bytes: float) -> tuple[float, float]:
        """Return the seconds of weights in no unit, and of all units one by one."""
        received = num_bytes * (1 - 1 / num_ranks)
        return curve.time(received * (1 - in_units)), num_units * curve.time(received * in_units / num_units)

    root_s, units_s = exchange_s(rates.link.all_gather, whole_bytes)
    weights_on_host = learner.offload == "policy" or (not is_fsdp and learner.zero3.offload_parameters)
    updates_on_host = learner.offload == "policy" or (not is_fsdp and learner.zero3.offload_optimizer)
    kept_as = torch.float32 if is_fsdp else dtype  # torch casts on the device, DeepSpeed holds both
    in_s = outline.stored_bytes(trained_dtype=kept_as) / num_ranks / rates.host_to_device if weights_on_host else 0.0
    gradient_bytes = outline.num_trained * FLOAT32_BYTES
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

"""A config's learner on a device: memory, speed, and why it may not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from rlpipe.common.formatting import gib
from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ConfigError, ModelError
from rlpipe.hardware.device import Device
from rlpipe.learner.forward import LogprobModel, find_layers
from rlpipe.learner.policy import meta_copy
from rlpipe.learner.row_plan import Row
from rlpipe.learner.strategies.chunked import chunk_sizes, full_rows, misses_tower
from rlpipe.learner.workload import head_of, needs_copy, read_workload
from rlpipe.offload.decision import Capacity, Decision
from rlpipe.offload.planner.cost import Profile
from rlpipe.offload.planner.fake_trace import traceable_experts
from rlpipe.offload.planner.profiler import rates_of, trace_on
from rlpipe.offload.planner.search import DoesNotFit
from rlpipe.offload.planner.trace import Stage, Trace, choose_blocks, unfold
from rlpipe.offload.runtime.runtime import least_memory
from rlpipe.plan.engine_memory import EngineSetup
from rlpipe.plan.learner_memory import (
    CPU_HOST_BYTES,
    LearnerMemory,
    MemoryBudget,
    MetaPolicy,
    meta_policy,
    nf4_bytes,
    plain_memory,
    read_memory_budget,
)
from rlpipe.plan.learner_time import (
    Chunks,
    StepTime,
    Work,
    chunked_memory,
    chunked_time,
    decide_chunks,
    make_chunks,
    plain_time,
    read_work,
)


class Untraceable(ModelError):
    """A model that can't be traced without real tensors, and may still be trained."""


def trace_policy(
    policy: MetaPolicy, row: Row, config: Config, device: Device, *, compute_dtype: torch.dtype | None
) -> Trace:
    """Trace a micro batch that is run as ``row``, with the device's seconds.

    Trained weights count in ``compute_dtype``, as if gathered in it; None: in their own dtype, cast during the pass.
    Raises ``Untraceable`` for models whose shapes depend on values, or that can't be traced for another reason.
    """
    module, workload = policy.module, read_workload(config)

    def loss_of(trace: Trace) -> Tensor:
        module.announce = trace.read
        return workload.loss_of(module, row, config.learner.logprob_chunk_tokens)

    representative = _placeholders(policy)
    traced = sorted({*representative.values()})
    indices = {unit: index for index, unit in enumerate(representative)}
    try:
        with _only_layers(module.causal_model, [indices[unit] for unit in traced]), traceable_experts(module):
            trace = trace_on(device, module, policy.units, loss_of, compute_dtype=compute_dtype)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError) as error:
        raise Untraceable(
            f"model.path={config.model.path}: a plan can't trace {type(module.causal_model).__name__} without "
            f"real tensors, so the learner is not planned ({describe_error(error)})"
        ) from None
    trace.stages = unfold(trace.stages, representative)
    if policy.nf4:
        sizes = policy.nf4_sizes
        trace.stages = [
            stage if stage.unit is None else _with_nf4(stage, sizes[stage.unit], module.compute_dtype, device)
            for stage in trace.stages
        ]
    return trace


def _placeholders(policy: MetaPolicy) -> dict[int, int]:
    """Map each layer's unit to the unit that is traced in its place."""
    units = {id(unit.module): index for index, unit in enumerate(policy.units)}
    layers = [units[id(layer)] for layer in find_layers(policy.module.causal_model)]
    if _depends_on_depth(policy.module.causal_model):
        return {unit: unit for unit in layers}
    chosen = choose_blocks([policy.kinds.get(unit) for unit in layers])
    return {unit: layers[chosen[index]] for index, unit in enumerate(layers)}


def _depends_on_depth(causal: PreTrainedModel) -> bool:
    """Return whether layers take their part of all layers' embeddings, or the keys and values of earlier layers."""
    text = causal.config.get_text_config()
    return any(getattr(text, name, None) for name in ("hidden_size_per_layer_input", "num_kv_shared_layers"))


@contextmanager
def _only_layers(causal: PreTrainedModel, indices: Sequence[int]) -> Iterator[None]:
    """Reduce the model and its config to the layers at ``indices`` within the context."""
    layers, text = find_layers(causal), causal.config.get_text_config()
    all_layers, original = [*layers], {"num_hidden_layers": text.num_hidden_layers}
    reduced: dict[str, Any] = {"num_hidden_layers": len(indices)}
    if len(getattr(text, "layer_types", None) or ()) == len(all_layers):
        original["layer_types"] = text.layer_types
        reduced["layer_types"] = [text.layer_types[index] for index in indices]

    def set_layers(entries: Sequence[Any], options: dict[str, Any]) -> None:
        del layers[:]
        layers.extend(entries)
        for name, value in options.items():
            setattr(text, name, value)

    set_layers([all_layers[index] for index in indices], reduced)
    try:
        yield
    finally:
        set_layers(all_layers, original)


def _with_nf4(stage: Stage, sizes: Sequence[int], dtype: torch.dtype, device: Device) -> Stage:
    """Add to a stage the dequantization of its 4-bit weights before their use, in both passes."""
    moved_s = sum(nf4_bytes(size) + size * dtype.itemsize for size in sizes) / device.memory_bandwidth
    largest = max(sizes, default=0) * dtype.itemsize
    return replace(
        stage,
        forward_s=stage.forward_s + moved_s,
        backward_s=stage.backward_s + moved_s,
        forward_peak=stage.forward_peak + largest,
        backward_peak=stage.backward_peak + largest,
    )


@dataclass(slots=True)
class TraceCache:
    """Policies without weights, and traces, that several cases share."""

    described: PreTrainedConfig
    device: Device
    policies: dict[str, MetaPolicy] = field(default_factory=dict)
    traces: dict[tuple[object, ...], Trace] = field(default_factory=dict)

    def policy(self, config: Config) -> MetaPolicy:
        head = head_of(config.algorithm)
        key = f"{head} of {config.model!r}"
        if key not in self.policies:
            self.policies[key] = meta_policy(self.described, config.model, head=head)
        return self.policies[key]

    def trace(self, config: Config, row: Row, *, is_timed: bool = True) -> Trace:
        """Return the trace of a row; its seconds may be another device's unless ``is_timed``.

        Sharded weights, and those of chunks, count in the compute dtype.
        """
        policy, learner = self.policy(config), config.learner
        is_plain = learner.strategy == "single" and learner.offload == "none"
        dtype: torch.dtype | None = None if is_plain else policy.module.compute_dtype
        shape = (
            len(row.token_ids),
            len(row.predictors),
            len(row.images),
            tuple(map(_shape, row.attention.blocks if row.attention else ())),
        )
        key = (
            repr(config.model),
            head_of(config.algorithm),
            repr(config.algorithm.loss),
            learner.logprob_chunk_tokens,
            dtype,
            shape,
            self.device.name * is_timed,
        )
        if key not in self.traces:
            self.traces[key] = trace_policy(policy, row, config, self.device, compute_dtype=dtype)
        return self.traces[key]


def _shape(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.shape)


@dataclass(kw_only=True, frozen=True)
class LearnerEstimate:
    """A config on a device; changes are tried on modified copies. Properties raise as ``plan_learner`` does."""

    config: Config
    drafts: TraceCache
    engines: EngineSetup | None

    @property
    def device(self) -> Device:
        return self.drafts.device

    @cached_property
    def budget(self) -> MemoryBudget:
        return read_memory_budget(self.config, self.device, self.engines)

    @cached_property
    def policy(self) -> MetaPolicy:
        return self.drafts.policy(self.config)

    @cached_property
    def work(self) -> Work:
        return read_work(self.config, self.policy.module.layout)

    @cached_property
    def copy(self) -> LogprobModel | None:
        """A frozen copy without weights; None with an adapter, whose base model is the reference."""
        if not needs_copy(self.config.model, self.config.algorithm):
            return None
        return meta_copy(self.drafts.described, self.config.model, self.config.algorithm)

    @property
    def longest(self) -> Trace:
        """Trace of a full micro batch without common prompts, which takes the most memory."""
        return self._longest[1]

    @property
    def misses_tower(self) -> bool:
        """Whether a trained vision tower is in no trace."""
        return misses_tower(self.policy.module, self._longest[0])

    @cached_property
    def _longest(self) -> tuple[Row, Trace]:
        *rows_with_images, last = full_rows(self.policy.module, self.config.learner.max_tokens_per_microbatch)
        is_timed = self.config.learner.offload == "chunked"
        for row in rows_with_images:
            with suppress(Untraceable):
                return row, self.drafts.trace(self.config, row, is_timed=is_timed)
        return last, self.drafts.trace(self.config, last, is_timed=is_timed)

    @cached_property
    def chunks(self) -> Chunks:
        return make_chunks(self.policy, self.config)

    @cached_property
    def reference(self) -> Capacity | None:
        """Memory of the frozen copy, which is also in chunks; None if there is no copy."""
        sizes = chunk_sizes(self.config.learner.chunked)
        return None if self.copy is None else least_memory(self.copy, sizes=sizes)

    @cached_property
    def decision(self) -> tuple[Decision, Profile] | DoesNotFit | None:
        """The decision with chunked offload, or why none is possible; None with another kind of offload."""
        if self.config.learner.offload != "chunked":
            return None
        try:
            budget = self.budget.capacity if self.reference is None else self.budget.capacity.less(self.reference)
            return decide_chunks(self.chunks, self.longest, self.device, budget, self.work.num_micro_batches)
        except DoesNotFit as failure:
            return failure
        except ValueError as error:
            raise ConfigError(f"learner.offload=chunked: {error}") from None

    @property
    def description(self) -> str | None:
        """The decision, as the learner logs it."""
        return self.decision[0].describe() if isinstance(self.decision, tuple) else None

    @cached_property
    def memory(self) -> LearnerMemory | None:
        """Memory of a rank; None if no offload schedule fits."""
        memory = self._memory
        if memory is None or self.device.kind == "cuda":
            return memory
        return replace(memory, host=replace(memory.host, process=CPU_HOST_BYTES))

    @property
    def _memory(self) -> LearnerMemory | None:
        """Memory of a rank whose process uses CUDA."""
        decision = self.decision
        if isinstance(decision, DoesNotFit):
            return None
        if decision is None:
            profiles, shared = self.longest.profiles(), self.longest.shared_bytes
            return plain_memory(self.policy, profiles, shared, self.config, self.copy)
        rates = rates_of(self.device, num_ranks=self.config.learner.num_ranks)
        return chunked_memory(self.chunks, decision[1], decision[0], rates, self.reference)

    @cached_property
    def problem(self) -> str | None:
        """Why a rank does not fit; None if it does."""
        if isinstance(self.decision, DoesNotFit):
            return str(self.decision)
        assert self.memory is not None
        device, host, budget = self.memory.device.total, self.memory.host.total, self.budget
        if device > budget.device_bytes:
            engines_use = f", where engines use {gib(budget.engine_bytes)}" if budget.engines else ""
            return (
                f"a rank needs {gib(device)}, and may use {gib(budget.device_bytes)} of the "
                f"{gib(self.device.memory_bytes)} of its device{engines_use}"
            )
        if self.device.kind == "cuda" and host > budget.host_bytes:
            limit = f"{gib(budget.host_bytes)} of {gib(self.device.host_memory_bytes)}"
            if self.device.measured_at is None:
                limit += " (an assumption; set --host-memory-gib)"
            return f"a rank needs {gib(host)} of the host's memory, and its share is {limit}"
        return None

    @cached_property
    def time(self) -> StepTime:
        """Time of a step, for a learner that fits."""
        trace = self.drafts.trace(self.config, self.work.row)
        decision = self.decision
        assert not isinstance(decision, DoesNotFit), "what does not fit has no time"
        if decision is None:
            return plain_time(self.policy, trace.profiles(), self.config, self.work, self.device)
        profile = self.chunks.profile(
            trace, num_parts=decision[0].num_parts, num_micro_batches=self.work.num_micro_batches
        )
        rates = rates_of(self.device, num_ranks=self.config.learner.num_ranks)
        return chunked_time(profile, decision[0].knobs, rates, self.work, self.reference)

"""Traces of the policy's forward and backward pass over a row, through a few layers that represent the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.root_config import Config
from rlpipe.errors import ModelError
from rlpipe.hardware.device import Device
from rlpipe.learner.forward import find_layers
from rlpipe.learner.row_plan import Row
from rlpipe.learner.workload import read_workload
from rlpipe.offload.planner.fake_trace import trace_model, traceable_experts
from rlpipe.offload.planner.fold import choose_blocks, unfold
from rlpipe.offload.planner.rates import roofline
from rlpipe.offload.planner.trace import Stage, Trace
from rlpipe.plan.learner_outline import Outline, nf4_bytes


def trace_policy(
    outline: Outline, row: Row, config: Config, device: Device, *, compute_dtype: torch.dtype | None
) -> Trace:
    """Trace a micro batch that is run as ``row``, with the device's seconds.

    Trained weights count in ``compute_dtype``, as if gathered in it; None: in their own dtype, cast during the pass.
    Raises ``ModelError`` for models whose shapes depend on values, or that can't be traced for another reason.
    """
    scorer, workload = outline.scorer, read_workload(config)

    def loss_of(trace: Trace) -> Tensor:
        scorer.announce = trace.read
        return workload.loss_of(scorer, row, config.learner.logprob_chunk_tokens)

    stands_for = _stand_ins(outline)
    kept = sorted({*stands_for.values()})
    places = {unit: place for place, unit in enumerate(stands_for)}
    try:
        with _only_layers(scorer.causal_model, [places[unit] for unit in kept]), traceable_experts(scorer):
            trace = trace_model(scorer, outline.units, loss_of, roofline(device), compute_dtype=compute_dtype)
    except (RuntimeError, ValueError, TypeError, LookupError, AttributeError, NotImplementedError) as error:
        raise ModelError(
            f"model.path={config.model.path}: a plan can't trace {type(scorer.causal_model).__name__} without its "
            f"values, and says nothing of its learner ({describe_error(error)})"
        ) from None
    trace.stages = unfold(trace.stages, stands_for)
    if outline.nf4:
        sizes = outline.nf4_sizes
        trace.stages = [
            stage if stage.unit is None else _with_nf4(stage, sizes[stage.unit], scorer.compute_dtype, device)
            for stage in trace.stages
        ]
    return trace


def _stand_ins(outline: Outline) -> dict[int, int]:
    """Map each layer's unit to the unit that is traced in its place."""
    units = {id(unit.module): index for index, unit in enumerate(outline.units)}
    layers = [units[id(layer)] for layer in find_layers(outline.scorer.causal_model)]
    chosen = choose_blocks([outline.kinds.get(unit) for unit in layers])
    return {unit: layers[chosen[place]] for place, unit in enumerate(layers)}


@contextmanager
def _only_layers(causal: PreTrainedModel, kept: Sequence[int]) -> Iterator[None]:
    """Reduce the model and its config to the layers ``kept`` within the context."""
    layers, text = find_layers(causal), causal.config.get_text_config()
    whole, own = [*layers], {"num_hidden_layers": text.num_hidden_layers}
    fewer: dict[str, Any] = {"num_hidden_layers": len(kept)}
    if len(getattr(text, "layer_types", None) or ()) == len(whole):
        own["layer_types"] = text.layer_types
        fewer["layer_types"] = [text.layer_types[place] for place in kept]

    def take(entries: Sequence[Any], options: dict[str, Any]) -> None:
        del layers[:]
        layers.extend(entries)
        for name, value in options.items():
            setattr(text, name, value)

    take([whole[place] for place in kept], fewer)
    try:
        yield
    finally:
        take(whole, own)


def _with_nf4(stage: Stage, sizes: Sequence[int], dtype: torch.dtype, device: Device) -> Stage:
    """Add to a stage the dequantisation of its 4-bit weights before their use, in both passes."""
    moved_s = sum(nf4_bytes(size) + size * dtype.itemsize for size in sizes) / device.memory_bandwidth
    largest = max(sizes, default=0) * dtype.itemsize
    return replace(
        stage,
        forward_s=stage.forward_s + moved_s,
        backward_s=stage.backward_s + moved_s,
        forward_peak=stage.forward_peak + largest,
        backward_peak=stage.backward_peak + largest,
    )

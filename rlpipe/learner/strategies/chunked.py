"""Strategy ``single`` and its ranks with chunked CPU offload."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor, nn

from rlpipe.common.formatting import GIB, MIB
from rlpipe.common.imports import describe_error
from rlpipe.configs.schema.learner_config import ChunkedConfig, LearnerConfig, OptimizerConfig
from rlpipe.data.render.processor import feature_token_id
from rlpipe.errors import ModelError
from rlpipe.hardware.calibration import measured_device
from rlpipe.hardware.device import Device
from rlpipe.learner.forward import LogprobModel
from rlpipe.learner.row_plan import Row, plan_row
from rlpipe.learner.strategies.sharding import RankGroup, Reduce, SingleRank, Updates
from rlpipe.learner.vision import Vision
from rlpipe.learner.workload import Workload
from rlpipe.models.loading import has_vision
from rlpipe.offload.api import CannotBeTraced, choices_of, free_memory, is_given, plan
from rlpipe.offload.decision import Capacity, Decision, Knobs
from rlpipe.offload.layout import CHUNK_SIZES
from rlpipe.offload.planner.planner import agree, ranks_of
from rlpipe.offload.planner.trace import Trace
from rlpipe.offload.representative_batch import BlankImages, blank_images
from rlpipe.offload.runtime.chunk_adam import FlatPart
from rlpipe.offload.runtime.runtime import OffloadedModel, Precision, least_arrangement, least_memory
from rlpipe.offload.updates import ChunkedUpdates
from rlpipe.types import MicroBatch, PlacedImage
from rlpipe.weights.dcp import Read

UNPLANNED_TOWER = (
    "the memory of the vision tower is not planned, because it takes images in a form that rlpipe does not know; leave "
    "room for it"
)
CPU = torch.device("cpu")


def full_rows(module: LogprobModel, num_tokens: int) -> list[Row]:
    """Return rows of one sequence that fills a micro batch; all tokens but the first are loss tokens.

    They are to be tried in order until one can be traced: of a model with a vision tower the first is full of images,
    and the last one has none.
    """
    micro_batch = MicroBatch(
        token_ids=np.zeros(num_tokens, np.int64),
        position_ids=np.arange(num_tokens),
        sequence_starts=np.array([0, num_tokens], np.int32),
        loss_mask=np.arange(num_tokens) > 0,
        logprobs=np.zeros(num_tokens, np.float32),
        advantages=np.zeros(num_tokens, np.float32),
        policy_versions=np.zeros(num_tokens, np.int32),
        group_ids=np.zeros(1, np.int32),
        first_indices=np.zeros(1, np.int64),
    )
    text = plan_row(micro_batch, layout=module.layout, device=CPU)
    return [*_with_images(module, micro_batch), text]


def _with_images(module: LogprobModel, micro_batch: MicroBatch) -> list[Row]:
    """Return the row with as many images as fit into it, each after a token of text; none if none fits."""
    model, num_tokens = module.causal_model, len(micro_batch.token_ids)
    image_token = feature_token_id(model.config) if has_vision(model) else None
    if image_token is None:
        return []
    try:
        image_tokens = blank_images(model.config, 1, most_tokens=num_tokens - 1).tokens_per_image
        images = blank_images(model.config, num_tokens // (image_tokens + 1), most_tokens=num_tokens - 1)
        starts = [1 + index * (image_tokens + 1) for index in range(images.num_images)]
        token_ids = np.full(num_tokens, 0 if image_token else 1)
        for start in starts:
            token_ids[start : start + image_tokens] = image_token
        placed = tuple(PlacedImage(start=start, num_tokens=image_tokens, content=b"") for start in starts)
        filled = replace(micro_batch, token_ids=token_ids, images=placed)
        return [Vision(model, _Blank(images)).plan(filled, module.layout, CPU)] if starts else []
    except (LookupError, AttributeError, TypeError, ValueError):  # a tower that takes its images in another form
        return []


def misses_tower(module: LogprobModel, row: Row) -> bool:
    """Return whether the model has a trained vision tower that does not run in the row's pass."""
    model = module.causal_model
    if row.images or not has_vision(model):
        return False
    language = [*model.get_decoder().parameters(), *model.get_output_embeddings().parameters()]
    inside = {id(parameter) for parameter in language}
    return any(parameter.requires_grad and id(parameter) not in inside for parameter in model.parameters())


@dataclass(frozen=True, slots=True)
class _Blank:
    images: BlankImages

    def pixels(self, _: Sequence[Sequence[bytes]]) -> dict[str, Tensor]:
        return self.images.inputs


def precision_of(config: ChunkedConfig, compute_dtype: torch.dtype) -> Precision:
    return Precision(
        compute=compute_dtype, state=getattr(torch, config.state_dtype), gradient=getattr(torch, config.gradient_dtype)
    )


def chunk_sizes(config: ChunkedConfig) -> tuple[int, ...]:
    """Return the chunk sizes to choose from, in bytes."""
    return CHUNK_SIZES if config.chunk_mib is None else (int(config.chunk_mib * MIB),)


def fixed_knobs(config: ChunkedConfig) -> dict[str, int]:
    """Return the knobs that the config sets, which are not searched."""
    knobs = {entry.name: getattr(config, entry.name) for entry in fields(Knobs)}
    return {name: value for name, value in knobs.items() if value is not None}


def capacity(config: ChunkedConfig, device: torch.device, *, replaced: nn.Module) -> Capacity:
    """Return a rank's memory limits: as configured, or a share of what is free once chunks replace the model."""
    free = free_memory(device, replaced=replaced)
    device_gib, host_gib = config.device_memory_gib, config.host_memory_gib
    return Capacity(
        device_bytes=free.device_bytes if device_gib is None else int(device_gib * GIB),
        host_bytes=free.host_bytes if host_gib is None else int(host_gib * GIB),
    )


class Chunked:
    """The sharding of a policy in chunks, on one rank or, with torch's default process group, on several."""

    loads_on_cpu = True

    def __init__(
        self, learner: LearnerConfig, device: torch.device, workload: Workload, copy: LogprobModel | None = None
    ) -> None:
        """Prepare to spread models; ``copy`` is on the meta device what will be spread after the policy."""
        self._group = RankGroup(device) if learner.strategy == "fsdp2" else SingleRank()
        self.rank, self.num_ranks = self._group.rank, self._group.num_ranks
        self.device = device
        self._learner, self._config, self._workload, self._copy = learner, learner.chunked, workload, copy
        self._offloaded: list[OffloadedModel] = []
        self.decision: Decision | None = None
        self.notes: list[str] = []

    def shard(self, module: LogprobModel, *, trained: bool) -> None:
        precision = precision_of(self._config, module.compute_dtype)
        if trained:
            decision = self.decision = self._decide(module, precision)
            self.notes.append(f"learner.offload=chunked: {decision.describe()}")
            arrangement, num_parts = decision.arrangement, decision.num_parts
        else:
            assert self._offloaded, "the trained model is spread first, its copies after it"
            num_parts = self._offloaded[0].ranks.num_parts
            arrangement = least_arrangement(module, sizes=chunk_sizes(self._config))
        offloaded = OffloadedModel(
            module,
            arrangement,
            device=self.device,
            optimizer=self._learner.optimizer if trained else None,
            precision=precision,
            ranks=ranks_of(num_parts),
            sizes=chunk_sizes(self._config),
        )
        offloaded.decision = self.decision if trained else None
        module.announce = offloaded.read
        self._offloaded.append(offloaded)

    def _decide(self, module: LogprobModel, precision: Precision) -> Decision:
        hardware = None if is_given(fixed_knobs(self._config)) else measured_device(self.device)
        free = capacity(self._config, self.device, replaced=module)
        if self._copy is not None:
            free = free.less(least_memory(self._copy, sizes=chunk_sizes(self._config)))

        def decide(limits: Capacity) -> Decision:
            try:
                return self._search(module, precision, hardware, limits)
            except ValueError as error:
                raise ModelError(f"learner.offload=chunked: {error}") from error

        return agree(free, decide)

    def _search(self, module: LogprobModel, precision: Precision, hardware: Device | None, free: Capacity) -> Decision:
        *rows_with_images, last = full_rows(module, self._learner.max_tokens_per_microbatch)
        for row in rows_with_images:
            with suppress(CannotBeTraced):
                return self._plan(module, row, precision, hardware, free)
        if misses_tower(module, last):
            self.notes.append(f"learner.offload=chunked: {UNPLANNED_TOWER}")
        return self._plan(module, last, precision, hardware, free)

    def _plan(
        self, module: LogprobModel, row: Row, precision: Precision, hardware: Device | None, free: Capacity
    ) -> Decision:
        def loss_of(trace: Trace) -> Tensor:
            module.announce = trace.read
            try:
                return self._workload.loss_of(module, row, self._learner.logprob_chunk_tokens)
            except (ValueError, TypeError, LookupError, AttributeError) as error:  # images in a form that it can't take
                raise RuntimeError(describe_error(error)) from error

        return plan(
            module,
            loss_of,
            hardware,
            knobs=fixed_knobs(self._config),
            capacity=free,
            precision=precision,
            sizes=chunk_sizes(self._config),
            num_micro_batches=self._workload.num_micro_batches,
            num_ranks=self.num_ranks,
            parts=choices_of(self._config.sharing, self.num_ranks),
        )

    def make_updates(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> Updates:
        def show_message(message: str) -> None:
            self.notes.append(f"learner.offload=chunked: {message}")

        return ChunkedUpdates(self._offloaded[0], parameters, config, show_message=show_message, resets_peak=True)

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            values, begin = self._owner(parameter).part(parameter)
            tensors[name] = FlatPart(values, begin=begin, shape=parameter.shape)
        return tensors

    def load_state(self, parameters: Mapping[str, nn.Parameter], read: Read) -> None:
        for name, parameter in parameters.items():
            values = torch.empty(parameter.shape, dtype=parameter.dtype)
            read({name: values})
            self._owner(parameter).assign(parameter, values)

    def end_inference(self, module: LogprobModel) -> None:
        pass

    def move(self, parameter: nn.Parameter, towards: nn.Parameter, by: float) -> None:
        owner, goal = self._owner(parameter), self._owner(towards).values(towards)
        current = owner.values(parameter)
        owner.assign(parameter, current.lerp(goal.to(current.device, current.dtype), by))

    def shape(self, tensor: Tensor) -> torch.Size:
        return tensor.shape

    def local(self, tensor: Tensor) -> Tensor:
        return self._owner(tensor).values(tensor) if self._offloaded[0].ranks.num_parts == 1 else tensor

    def full(self, tensor: Tensor) -> Tensor:
        return self._owner(tensor).values(tensor).to(self.device)

    def reduce(self, tensor: Tensor, operation: Reduce) -> Tensor:
        return self._group.reduce(tensor, operation)

    def barrier(self) -> None:
        self._group.barrier()

    def _owner(self, tensor: Tensor) -> OffloadedModel:
        return next((model for model in self._offloaded if model.chunk_of(tensor)), self._offloaded[0])

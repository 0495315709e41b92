"""Chunked offload of the policy (rlpipe/offload), in chunks that move between host and device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.errors import ModelError
from rlpipe.hardware.calibration import own_device
from rlpipe.hardware.device import Device
from rlpipe.learner.forward import TokenScorer
from rlpipe.learner.strategies.chunk_options import (
    capacity,
    chunk_sizes,
    fixed_knobs,
    longest_row,
    precision_of,
)
from rlpipe.learner.strategies.chunked_updates import ChunkedUpdates
from rlpipe.learner.strategies.rank_group import RankGroup
from rlpipe.learner.strategies.sharding import Reduce, Updates
from rlpipe.learner.strategies.single import SingleRank
from rlpipe.learner.workload import Workload
from rlpipe.offload.api import choices_of, is_given, plan
from rlpipe.offload.comparison import Comparison
from rlpipe.offload.planner.consensus import agree, ranks_of
from rlpipe.offload.planner.planner import Decision
from rlpipe.offload.planner.profile import Capacity
from rlpipe.offload.planner.trace import Trace
from rlpipe.offload.runtime.flat_part import FlatPart
from rlpipe.offload.runtime.runtime import OffloadedModel, Precision, least_arrangement, least_memory
from rlpipe.weights.dcp import Read


class Chunked:
    """The sharding of a policy in chunks, on one rank or, with torch's default process group, on several."""

    loads_on_cpu = True

    def __init__(self, learner: LearnerConfig, device: torch.device, workload: Workload) -> None:
        self._group = RankGroup(device) if learner.strategy == "fsdp2" else SingleRank()
        self.rank, self.num_ranks = self._group.rank, self._group.num_ranks
        self.device = device
        self._learner, self._config, self._workload = learner, learner.chunked, workload
        self._offloaded: list[OffloadedModel] = []
        self.decision: Decision | None = None
        self.notes: list[str] = []

    def shard(self, scorer: TokenScorer, *, trained: bool) -> None:
        precision = precision_of(self._config, scorer.compute_dtype)
        if trained:
            decision = self.decision = self._decide(scorer, precision)
            self.notes.append(f"learner.offload=chunked: {decision.describe()}")
            arrangement, num_parts = decision.arrangement, decision.num_parts
        else:
            assert self._offloaded, "the trained model is spread first, its copies after it"
            num_parts = self._offloaded[0].ranks.num_parts
            arrangement = least_arrangement(scorer, sizes=chunk_sizes(self._config))
        offloaded = OffloadedModel(
            scorer,
            arrangement,
            device=self.device,
            optimizer=self._learner.optimizer if trained else None,
            precision=precision,
            ranks=ranks_of(num_parts),
            sizes=chunk_sizes(self._config),
        )
        scorer.announce = offloaded.read
        self._offloaded.append(offloaded)

    def _decide(self, scorer: TokenScorer, precision: Precision) -> Decision:
        hardware = None if is_given(fixed_knobs(self._config)) else own_device(self.device)
        free = capacity(self._config, self.device, replaced=scorer)
        if self._workload.has_copy:  # the copy is sharded after the policy
            free = free.less(least_memory(scorer, sizes=chunk_sizes(self._config)))

        def decide(least: Capacity) -> Decision:
            try:
                return self._search(scorer, precision, hardware, least)
            except ValueError as error:
                raise ModelError(f"learner.offload=chunked: {error}") from error

        return agree(free, decide)

    def _search(self, scorer: TokenScorer, precision: Precision, hardware: Device | None, free: Capacity) -> Decision:
        row = longest_row(scorer, self._learner.max_tokens_per_microbatch)

        def loss_of(trace: Trace) -> Tensor:
            scorer.announce = trace.read
            return self._workload.loss_of(scorer, row, self._learner.logprob_chunk_tokens)

        return plan(
            scorer,
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
        assert self.decision is not None, "the policy is spread before it is trained"
        comparison = Comparison(self.decision, self.device, resets_peak=True)

        def compare(seconds: float, num_micro_batches: int) -> None:
            if found := comparison.updated(seconds, num_micro_batches, self._offloaded[0].host_bytes):
                self.notes.append(f"learner.offload=chunked: {found}")

        return ChunkedUpdates(self._offloaded[0], parameters, config, measured=compare)

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        held: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            values, begin = self._owner(parameter).part(parameter)
            held[name] = FlatPart(values, begin=begin, shape=parameter.shape)
        return held

    def load_state(self, parameters: Mapping[str, nn.Parameter], read: Read) -> None:
        for name, parameter in parameters.items():
            whole = torch.empty(parameter.shape, dtype=parameter.dtype)
            read({name: whole})
            self._owner(parameter).assign(parameter, whole)

    def end_inference(self, scorer: TokenScorer) -> None:
        pass

    def move(self, parameter: nn.Parameter, towards: nn.Parameter, by: float) -> None:
        owner, goal = self._owner(parameter), self._owner(towards).values(towards)
        own = owner.values(parameter)
        owner.assign(parameter, own.lerp(goal.to(own.device, own.dtype), by))

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
        return next((model for model in self._offloaded if model.place_of(tensor)), self._offloaded[0])

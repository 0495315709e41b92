"""Trains the policy in chunks that come from the host and go back (rlpipe/offload), on one rank or several."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlpipe.configs.schema_learner import ChunkedConfig, LearnerConfig, OptimizerConfig
from rlpipe.errors import ModelError
from rlpipe.hardware.device import Device
from rlpipe.hardware.own import own_device
from rlpipe.learner.moments import MOMENTS, STEPS
from rlpipe.learner.ranks import Ranks
from rlpipe.learner.rows import Row, plan_row
from rlpipe.learner.scorer import TokenScorer
from rlpipe.learner.sharding import Read, Reduce, Updates
from rlpipe.learner.single import SingleRank
from rlpipe.learner.updates import TorchUpdates
from rlpipe.offload import ranks as chunk_ranks
from rlpipe.offload.auto import free_memory, plan
from rlpipe.offload.cost import Knobs
from rlpipe.offload.decide import Decision
from rlpipe.offload.layout import CHUNK_SIZES, MIB
from rlpipe.offload.profile import Capacity
from rlpipe.offload.runtime import OffloadedModel, Precision, least_arrangement
from rlpipe.offload.trace import Trace
from rlpipe.types import MicroBatch

GIB = 2**30
COMPARED_UPDATE = 3
"""The update that is compared with its prediction: buffers have grown, and kernels are compiled."""


class Chunked:
    """One rank; with several, torch's default process group must be there."""

    loads_on_cpu = True

    def __init__(self, learner: LearnerConfig, device: torch.device) -> None:
        self._group = Ranks(device) if learner.strategy == "fsdp2" else SingleRank()
        self.rank, self.num_ranks = self._group.rank, self._group.num_ranks
        self.device = device
        self._learner, self._config = learner, learner.chunked
        self._offloaded: list[OffloadedModel] = []
        self._decision: Decision | None = None
        self.notes: list[str] = []

    def shard(self, scorer: TokenScorer, *, trained: bool) -> None:
        precision = precision_of(self._config, scorer.compute_dtype)
        if trained:
            decision = self._decision = self._decide(scorer, precision)
            self.notes.append(f"learner.offload=chunked: {decision.describe()}")
            arrangement, num_parts = decision.arrangement, decision.num_parts
        else:
            num_parts = self._offloaded[0].ranks.num_parts
            arrangement = least_arrangement(scorer, sizes=chunk_sizes(self._config))
        offloaded = OffloadedModel(
            scorer,
            arrangement,
            device=self.device,
            optimizer=self._learner.optimizer if trained else None,
            precision=precision,
            ranks=self._ranks(num_parts),
            sizes=chunk_sizes(self._config),
        )
        scorer.announce = offloaded.read
        self._offloaded.append(offloaded)

    def _ranks(self, num_parts: int) -> chunk_ranks.Ranks:
        if self.num_ranks == 1:
            return chunk_ranks.Alone()
        return chunk_ranks.Replicated() if num_parts == 1 else chunk_ranks.Sharded()

    def _decide(self, scorer: TokenScorer, precision: Precision) -> Decision:
        """That of the first rank, which all follow."""
        hardware = own_device(self.device)
        found: list[Decision | str | None] = [None]
        if self.rank == 0:
            try:
                found = [self._search(scorer, precision, hardware)]
            except ValueError as error:
                found = [f"learner.offload=chunked: {error}"]
        if self.num_ranks > 1:
            dist.broadcast_object_list(found)
        if not isinstance(found[0], Decision):
            raise ModelError(str(found[0]))
        return found[0]

    def _search(self, scorer: TokenScorer, precision: Precision, hardware: Device) -> Decision:
        row = longest_row(scorer, self._learner.max_tokens_per_microbatch)

        def loss_of(trace: Trace) -> Tensor:
            scorer.announce = trace.read
            return scorer.logprobs(row, 1.0, self._learner.logprob_chunk_tokens)[0].sum()

        return plan(
            scorer,
            loss_of,
            hardware,
            knobs=fixed_knobs(self._config),
            capacity=capacity(self._config, self.device),
            precision=precision,
            sizes=chunk_sizes(self._config),
            num_ranks=self.num_ranks,
            parts=sharing_choices(self._config, self.num_ranks),
        )

    def make_updates(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig) -> Updates:
        return ChunkedUpdates(self._offloaded[0], parameters, config, measured=self._compare)

    def _compare(self, seconds: float, num_micro_batches: int) -> None:
        if self._decision is None or self._decision.prediction is None:
            return
        device_bytes = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None
        self.notes.append(
            f"learner.offload=chunked: {self._decision.compare(seconds, num_micro_batches, device_bytes)}"
        )

    def state(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        held = {}
        for index, (name, parameter) in enumerate(parameters.items()):
            values = self._owner(parameter).values(parameter)
            if index % self.num_ranks == self.rank:
                held[name] = values.cpu()
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


class ChunkedUpdates:
    """Of what is resident by torch's optimizers, of the rest by the chunks' own."""

    def __init__(
        self,
        offloaded: OffloadedModel,
        parameters: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        *,
        measured: Callable[[float, int], None],
    ) -> None:
        """``measured`` is told, once, of an update's seconds and micro batches."""
        self._measured, self._num_updates = measured, 0
        self._offloaded, self._chunks = offloaded, offloaded.optimizer
        places = {name: offloaded.place_of(parameter) for name, parameter in parameters.items()}
        self._names = {place: name for name, place in places.items() if place is not None}
        """Of the parameters in chunks, by chunk and name there."""
        resident = {name: parameters[name] for name, place in places.items() if place is None}
        self._resident = TorchUpdates(resident, config, local=lambda tensor: tensor) if resident else None
        self._learning_rate = config.lr

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        if self._resident is not None:
            self._resident.set_learning_rate(learning_rate)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        loss.backward()

    def squared_norm(self) -> Tensor:
        return self._chunks.squared_norm() + self._offloaded.resident_squared_norm()

    def apply(self, scale: float) -> None:
        seconds, num_micro_batches = self._offloaded.end_update()
        self._num_updates += 1
        if self._num_updates == COMPARED_UPDATE:
            self._measured(seconds, num_micro_batches)
        if self._resident is not None:
            self._resident.apply(scale)
        self._chunks.apply(self._learning_rate, scale)

    def drop(self) -> None:
        self._offloaded.end_update()
        if self._resident is not None:
            self._resident.drop()
        self._chunks.drop()

    def state(self) -> dict[str, Tensor]:
        """Of chunks that ranks share, each tensor whole, on the rank whose turn it is."""
        held = {} if self._resident is None else self._resident.state()
        ranks = self._offloaded.ranks
        for index, adam in self._chunks.adams.items():
            self._chunks.await_update(index)
            weights, states = adam.memory.values(), adam.state()
            for turn, local in enumerate(weights):
                if turn % ranks.num_ranks != ranks.rank:
                    continue
                name = self._names[index, local]
                held[f"policy.{name}"] = weights[local].cpu().float()
                for key, moment in states.get(local, {}).items():
                    held[f"optimizer.{name}.{key}"] = moment.cpu().float()
        return held

    def load_state(self, stored: Mapping[str, torch.Size], read: Read) -> None:
        if self._resident is not None:
            self._resident.load_state(stored, read)
        self._chunks.flush()
        for index, adam in self._chunks.adams.items():
            self._offloaded.drop_chunk(index)
            tensors: dict[str, Tensor] = {}
            for local in adam.pieces:
                name = self._names[index, local]
                keys = [f"policy.{name}", *(f"optimizer.{name}.{key}" for key in (*MOMENTS, STEPS))]
                tensors |= {key: torch.zeros(stored[key]) for key in keys if key in stored}
            read(tensors)
            names = {local: self._names[index, local] for local in adam.pieces}
            adam.load(
                {local: tensors[f"policy.{name}"] for local, name in names.items()},
                {
                    local: {key: tensors[f"optimizer.{name}.{key}"] for key in (*MOMENTS, STEPS)}
                    for local, name in names.items()
                    if f"optimizer.{name}.{STEPS}" in tensors
                },
            )


def longest_row(scorer: TokenScorer, num_tokens: int) -> Row:
    """One sequence that fills a micro batch, of which all but the first token count."""
    micro_batch = MicroBatch(
        token_ids=np.zeros(num_tokens, np.int64),
        position_ids=np.arange(num_tokens),
        sequence_starts=np.array([0, num_tokens], np.int32),
        loss_mask=np.arange(num_tokens) > 0,
        logprobs=np.zeros(num_tokens, np.float32),
        advantages=np.zeros(num_tokens, np.float32),
        policy_versions=np.zeros(num_tokens, np.int32),
        group_ids=np.zeros(1, np.int32),
    )
    return plan_row(micro_batch, layout=scorer.layout, device=torch.device("cpu"))


def precision_of(config: ChunkedConfig, compute_dtype: torch.dtype) -> Precision:
    return Precision(
        compute=compute_dtype,
        state=getattr(torch, config.state_dtype),
        gradient=getattr(torch, config.gradient_dtype),
    )


def chunk_sizes(config: ChunkedConfig) -> tuple[int, ...]:
    """Those to choose from, in bytes."""
    return CHUNK_SIZES if config.chunk_mib is None else (int(config.chunk_mib * MIB),)


def sharing_choices(config: ChunkedConfig, num_ranks: int) -> tuple[int, ...]:
    """Into how many parts ranks may cut every chunk."""
    return {"auto": (1, num_ranks), "replicated": (1,), "sharded": (num_ranks,)}[config.sharing]


def fixed_knobs(config: ChunkedConfig) -> dict[str, int]:
    """Those that are not left to the search."""
    given = {entry.name: getattr(config, entry.name) for entry in fields(Knobs)}
    return {name: value for name, value in given.items() if value is not None}


def capacity(config: ChunkedConfig, device: torch.device) -> Capacity:
    """What a rank may take: as the config says, or of what is free."""
    free = free_memory(device, num_neighbours=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    on_device, on_host = config.device_memory_gib, config.host_memory_gib
    return Capacity(
        device_bytes=free.device_bytes if on_device is None else int(on_device * GIB),
        host_bytes=free.host_bytes if on_host is None else int(on_host * GIB),
    )

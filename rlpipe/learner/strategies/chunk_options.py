"""The options under ``learner.chunked``, translated for chunked offload, in a run and in its plan."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from torch import nn

from rlpipe.configs.schema.learner_config import ChunkedConfig
from rlpipe.learner.forward import TokenScorer
from rlpipe.learner.row_plan import Row, plan_row
from rlpipe.offload.api import free_memory
from rlpipe.offload.layout import CHUNK_SIZES, MIB
from rlpipe.offload.planner.cost import Knobs
from rlpipe.offload.planner.profile import Capacity
from rlpipe.offload.runtime.runtime import Precision
from rlpipe.types import MicroBatch

GIB = 2**30


def longest_row(scorer: TokenScorer, num_tokens: int) -> Row:
    """Return a row of one sequence that fills a micro batch; all tokens but the first are loss tokens."""
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
    """Return the chunk sizes to choose from, in bytes."""
    return CHUNK_SIZES if config.chunk_mib is None else (int(config.chunk_mib * MIB),)


def fixed_knobs(config: ChunkedConfig) -> dict[str, int]:
    """Return the knobs that the config sets, which are not searched."""
    given = {entry.name: getattr(config, entry.name) for entry in fields(Knobs)}
    return {name: value for name, value in given.items() if value is not None}


def capacity(config: ChunkedConfig, device: torch.device, *, replaced: nn.Module) -> Capacity:
    """Return a rank's memory limits: as configured, or a share of what is free once chunks replace the model."""
    free = free_memory(device, replaced=replaced)
    on_device, on_host = config.device_memory_gib, config.host_memory_gib
    return Capacity(
        device_bytes=free.device_bytes if on_device is None else int(on_device * GIB),
        host_bytes=free.host_bytes if on_host is None else int(on_host * GIB),
    )

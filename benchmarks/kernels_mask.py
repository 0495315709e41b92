"""The block mask of strided EBFT against torch's from the same mask function: seconds, memory, and compilations."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from transformers.integrations.flex_attention import flex_attention_forward

from benchmarks.peak_memory import peak_memory
from rlpipe.algorithms.strided import document_budget, plan_strided_row
from rlpipe.configs.schema.algorithm_config import StridedConfig
from rlpipe.hardware.calibration import time_calls
from rlpipe.kernels.strided_mask import StridedMask
from rlpipe.learner.strided_objective import make_mask

TOKENS = {"cuda": (8192, 32768), "cpu": (2048, 8192)}
"""Tokens of a row, documents and blocks together."""
OTHER_TOKENS = (1200, 1500, 2100, 2500, 3200)
"""Row lengths over which compilations are counted."""
SAMPLES, DOCUMENTS, TURNS = 4, 3, 5
Build = Callable[[StridedMask], BlockMask]


def measure_mask(device: torch.device) -> list[dict[str, Any]]:
    """Return a row of figures for each builder and length; compilations are counted over several lengths."""
    rows = []
    for name, build in make_builders(device).items():
        compilations = count_compilations(build, device)
        for tokens in TOKENS[device.type]:
            mask = make_row(tokens, device)
            work = partial(build, mask)
            work()
            seconds = median(time_calls(work, 1, device) for _ in range(TURNS))
            with peak_memory(device) as peak:
                work()
            rows.append(
                {"builder": name, "tokens": len(mask.columns), "seconds": seconds, "peak_mb": peak.mb, **compilations}
            )
    return rows


def make_builders(device: torch.device) -> dict[str, Build]:
    """Return the builders of the mask; torch's get a mask function that is made once per row, as ours is."""

    def ours(mask: StridedMask) -> BlockMask:
        mask.forget()
        return mask.blocks()

    def of_torch(create: Callable[..., BlockMask], mask: StridedMask) -> BlockMask:
        count = len(mask.columns)
        return create(mask.blocks().mask_mod, None, None, count, count, device)

    return {
        "rlpipe": ours,
        "create_block_mask": partial(of_torch, create_block_mask),
        "create_block_mask, compiled": partial(of_torch, torch.compile(create_block_mask)),
    }


def make_row(tokens: int, device: torch.device) -> StridedMask:
    """Make a row of about ``tokens`` tokens: documents with all their blocks."""
    config = StridedConfig()
    length = document_budget(tokens, config, SAMPLES) // DOCUMENTS
    return make_mask(plan_strided_row([length] * DOCUMENTS, config, num_samples=SAMPLES), device)


@torch.no_grad()
def count_compilations(build: Build, device: torch.device) -> dict[str, int]:
    """Count the compilations of the builder over several lengths, and of attention as transformers compiles it."""
    torch._dynamo.reset()
    found = {"compilations": 0, "attention_compilations": 0}
    for tokens in OTHER_TOKENS:
        mask = make_row(tokens, device)
        counters.clear()
        block_mask = build(mask)
        found["compilations"] += counters["stats"]["unique_graphs"]
        counters.clear()
        q, k, v = (torch.randn(1, 2, len(mask.columns), 64, device=device) for _ in range(3))
        flex_attention_forward(nn.Module().eval(), q, k, v, block_mask, scaling=0.125)
        found["attention_compilations"] += counters["stats"]["unique_graphs"]
    return found

"""Sampling on CPUs whose noise depends on a request's seed and a token's position alone.

vLLM's CPU sampler draws a seed for each row of the batch from the request's own generator, in a Python loop that takes
as long as a small model's step. vLLM's runner for GPUs has such draws by counter itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p


def draw_by_counter(runner: Any) -> None:
    """Replace the draws of a model runner on a CPU, unless its sampler is not the one with a seed for each row."""
    sampler: TopKTopPSampler = runner.sampler.topk_topp_sampler
    if sampler.forward != sampler.forward_cpu or sampler.use_fp64_gumbel:
        return

    def draw(
        logits: Tensor, generators: Mapping[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Sample a token for every row of ``logits`` [B, V]; also return the log-probabilities [B, V]."""
        logits = apply_top_k_top_p(logits, k, p)
        seeds = torch.randint(2**63 - 1, (len(logits),))
        rows = np.fromiter(generators, np.int64, len(generators))
        of_requests = np.fromiter(map(torch.Generator.initial_seed, generators.values()), np.uint64, len(rows))
        seeds[rows] = draw_seeds(of_requests, runner.input_batch.num_tokens_no_spec[rows])
        logits = logits.float()
        return torch.ops._C.fused_gumbel_argmax(logits, seeds), logits.log_softmax(-1)

    sampler.forward = draw


def draw_seeds(seeds: NDArray[np.uint64], positions: NDArray[np.integer[Any]]) -> Tensor:
    """Return the seeds of the rows' next draws [B], in [0, 2^63), from their requests' seeds and numbers of tokens.

    The rows' values are mixed as in SplitMix64 (Steele et al., 2014), so that neighbouring ones share nothing.
    """
    values = seeds + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy(((values ^ (values >> np.uint64(31))) >> np.uint64(1)).astype(np.int64))

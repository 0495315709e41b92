"""Operators of vLLM on CPUs that are replaced by faster ones: those of LoRA, and the sampler's draws."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p

from rlpipe.rollout.engine import GOLDEN, mix


class GroupedLora(PunicaWrapperCPU):
    """LoRA on the CPU with one pair of matrix products for each adapter in the batch.

    vLLM's own wrapper gathers A and B for every token, which takes several times as long as the model itself.
    """

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        super().update_metadata(mapping, lora_index_to_id, max_loras, vocab_size, **kwargs)
        ids = set(mapping.index_mapping)
        slots = self.token_lora_indices
        self._groups: list[tuple[int, Tensor | None]] = [
            (slot, None if len(ids) == 1 else (slots == slot).nonzero().squeeze(1))
            for slot in (lora_index_to_id.index(adapter_id) for adapter_id in ids if adapter_id > 0)
        ]

    def add_lora_linear(
        self,
        y: Tensor,  # [T, sum of output_slices]
        x: Tensor,  # [T, in]
        lora_a_stacked: tuple[Tensor, ...],  # each [slots, 1, r, in]
        lora_b_stacked: tuple[Tensor, ...],  # each [slots, 1, out, r]
        scale: float,
        output_slices: tuple[int, ...],
        *,
        buffer: tuple[Tensor, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for slot, rows in self._groups:
            inputs = x if rows is None else x[rows]
            outputs = y if rows is None else y[rows]
            offset = 0
            for lora_a, lora_b, size in zip(lora_a_stacked, lora_b_stacked, output_slices, strict=True):
                hidden = inputs @ lora_a[slot, 0].T
                outputs[:, offset : offset + size].addmm_(hidden, lora_b[slot, 0].T, alpha=scale)
                offset += size
            if rows is not None:
                y[rows] = outputs


def use_grouped_lora(manager: LoRAModelManager, scheduler_config: Any) -> None:
    """Have all modules with adapters use ``GroupedLora``."""
    for prefix, wrapper in list(manager.punica_wrapper_mapping.items()):
        grouped = GroupedLora(manager.max_num_batched_tokens, scheduler_config.max_num_seqs, wrapper.device)
        manager.punica_wrapper_mapping[prefix] = grouped
        for module in manager.modules.values():
            if module.punica_wrapper is wrapper:
                module.set_mapping(grouped)


def draw_by_counter(runner: Any) -> None:
    """Have a model runner's noise depend on a request's seed and a token's position alone, in one draw for the batch.

    vLLM's CPU sampler draws a seed for each row from the request's own generator, in a Python loop; its runner for GPUs
    draws by counter itself. A sampler of another kind is left as it is.
    """
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
    """Return seeds in [0, 2^63) of the rows' next draws [B], from their requests' seeds and numbers of tokens."""
    return torch.from_numpy((mix(seeds + positions.astype(np.uint64) * GOLDEN) >> 1).astype(np.int64))

"""Tests that a vocabulary that is sharded over ranks gives each of them the results of the whole one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kernel_cases import assert_near, make_head_inputs, objective, randn
from rank_cases import Ranks

from rlpipe.kernels.logprob import VocabularyShard, linear_logprob

CUTS = [0, 30, 31, 101]
"""The boundaries of the vocabulary's shards, whose sizes differ between ranks."""
FROZEN = ("weight", "bias", "up")
HEAD = ("weight", "bias", "up")
CASES: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "trained": ((), {}),
    "frozen": (FROZEN, {"entropy_gradient": False}),
    "frozen with the entropy's gradient": (FROZEN, {}),
    "under lora": (("weight", "bias"), {"softcap": 2.0, "scale": 1.5}),
    "without entropy": ((), {"with_entropy": False}),
    "temperatures": (FROZEN, {"entropy_gradient": False, "temperature": randn(11, seed=7).abs() + 0.3}),
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(len(CUTS) - 1)
    yield started
    started.end()


def compute(
    case: str, shard: VocabularyShard | None, rows: slice
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the results, and the gradients by name."""
    frozen, options = CASES[case]
    inputs = make_head_inputs(vocabulary=CUTS[-1]).freeze(*frozen)
    own = {
        name: (tensor[rows] if name in HEAD else tensor).detach().clone().requires_grad_(tensor.requires_grad)
        for name, tensor in inputs.tensors.items()
    }
    logprobs, entropy = linear_logprob(targets=inputs.targets, chunk_tokens=4, shard=shard, **own, **options)
    trained = {name: tensor for name, tensor in own.items() if tensor.requires_grad}
    gradients = torch.autograd.grad(objective(logprobs, entropy), list(trained.values()))
    results = [one.detach() for one in (logprobs, entropy) if one is not None]
    return results, dict(zip(trained, gradients, strict=True))


def run_rank(case: str, folder: Path) -> None:
    rank = dist.get_rank()
    shard = VocabularyShard(group=dist.group.WORLD, first_row=CUTS[rank])
    torch.save(compute(case, shard, slice(CUTS[rank], CUTS[rank + 1])), folder / f"{rank}.pt")


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_what_the_whole_vocabulary_gives(ranks: Ranks, tmp_path: Path, case: str) -> None:
    ranks.run(run_rank, case, tmp_path)
    expected, whole = compute(case, None, slice(None))
    for rank in range(len(CUTS) - 1):
        results, gradients = torch.load(tmp_path / f"{rank}.pt")
        assert_near(results, expected, 1e-12)
        rows = slice(CUTS[rank], CUTS[rank + 1])
        for name, gradient in gradients.items():
            assert_near([gradient], [whole[name][rows] if name in HEAD else whole[name]], 1e-12)

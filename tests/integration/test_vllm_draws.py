"""Draws of the vLLM engine on the CPU: right frequencies, and keyed by a request's seed and a token's position."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from engine_cases import OpenVllm, adapted, load, publish_adapter, request, sample, tokens
from torch import Tensor

from rlpipe.rollout.engine import Engine, sample_seed

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

PROBABILITIES = (0.5, 0.25, 0.125, 0.1, 0.025)
NUM_DRAWS = 100_000


@pytest.fixture(scope="module")
def engine(open_vllm: OpenVllm) -> Engine:
    return open_vllm(engine_args={"block_size": 32})


def draws(logits: Tensor, seeds: list[int], positions: list[int]) -> Tensor:
    from vllm.platforms import current_platform

    from rlpipe.rollout.vllm.vllm_cpu import draw_seeds

    current_platform.import_kernels()
    return torch.ops._C.fused_gumbel_argmax(logits, draw_seeds(np.array(seeds, np.uint64), np.array(positions)))


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    expected = probabilities.double() * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("kind", ["neighbouring seeds", "neighbouring positions", "seeds of requests"])
def test_draws_have_the_distributions_frequencies(kind: str) -> None:
    seeds, positions = [2**61] * NUM_DRAWS, [40] * NUM_DRAWS
    if kind == "neighbouring positions":
        positions = list(range(NUM_DRAWS))
    elif kind == "neighbouring seeds":
        seeds = [2**61 + i for i in range(NUM_DRAWS)]
    else:
        seeds = [sample_seed(i) for i in range(NUM_DRAWS)]
    expected = torch.tensor(PROBABILITIES)
    drawn = draws(expected.log().repeat(NUM_DRAWS, 1), seeds, positions)
    assert chi_square(drawn.bincount(minlength=5), expected) < 23.5  # exceeded once in 10,000 times by chance
    pairs = drawn[::2] * 5 + drawn[1::2]
    assert chi_square(pairs.bincount(minlength=25), torch.outer(expected, expected).flatten()) < 59.0  # the same


def test_every_token_is_the_draw_of_its_seed_and_position(engine: Engine, tiny_policy: Path) -> None:
    policy = adapted(tiny_policy)
    load(engine, publish_adapter(policy, 1))
    for group in sample(engine, [request(i, group_size=3, max_tokens=6 + i) for i in range(6)]):
        for index, rollout in enumerate(group.rollouts):
            prompt, completion = group.prompt.token_ids.tolist(), rollout.completion_ids.tolist()
            logits = policy(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].float()
            positions = [len(prompt) + i for i in range(len(completion))]
            seeds = [sample_seed(group.group_id) + index] * len(completion)
            assert draws(logits.detach(), seeds, positions).tolist() == completion


def test_tokens_do_not_depend_on_the_batch(engine: Engine) -> None:
    requests = [request(i, max_tokens=4 + 5 * (i % 4), group_size=1 + i % 3) for i in range(12)]
    alone = [ids for asked in requests for ids in tokens(sample(engine, [asked]))]
    random = np.random.default_rng(0)
    for _ in range(5):
        waiting, groups = [requests[i] for i in random.permutation(len(requests))], []
        while waiting or engine.has_work:
            engine.submit([waiting.pop() for _ in range(min(len(waiting), random.integers(4)))])
            groups += engine.step()
        assert tokens(sorted(groups, key=lambda group: group.group_id)) == alone

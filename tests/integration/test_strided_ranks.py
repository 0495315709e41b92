"""Tests that strided EBFT trains alike on one gloo rank and on two, however documents are split into micro batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_cases import assert_close, make_document, make_learner, parameters_of
from rank_cases import Ranks

from rlpipe.configs.schema.algorithm_config import (
    AdvantageConfig,
    AlgorithmConfig,
    EbftConfig,
    LossConfig,
    StridedConfig,
)
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.data.packing import pack_step
from rlpipe.learner.step import Learner
from rlpipe.types import TrainBatch

pytestmark = pytest.mark.covering(1)
NUM_RANKS, NUM_STEPS = 2, 3
LENGTHS = (30, 6, 22, 17, 26)
"""The lengths of the documents, one of which is too short for a block."""
CASES = [(strategy, adapter) for strategy in ("fsdp2", "zero3") for adapter in ("lora", "none")]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(NUM_RANKS)
    yield started
    started.end()


def make(tiny: Path, strategy: str, adapter: str, num_ranks: int) -> Learner:
    algorithm = AlgorithmConfig(
        kind="ebft_strided",
        num_steps=8,
        group_size=3,
        advantage=AdvantageConfig(name="rloo"),
        loss=LossConfig(name="reinforce", beta=0.01),
        ebft=EbftConfig(strided=StridedConfig(stride=4, context_length=5, generate_tokens=3), ce_coef=0.1),
    )
    config = LearnerConfig(strategy=strategy, num_ranks=num_ranks, optimizer=OptimizerConfig(lr=1e-4))
    return make_learner(tiny, adapter=adapter, learner=config, algorithm=algorithm)


def make_documents(step: int, num_ranks: int, max_tokens: int) -> list[TrainBatch]:
    rng = np.random.default_rng(step)
    documents = [make_document(10 * step + index, rng.integers(7, 100, length)) for index, length in enumerate(LENGTHS)]
    return pack_step(documents, step=step, num_ranks=num_ranks, max_tokens=max_tokens)


def train(learner: Learner, max_tokens: int) -> list[dict[str, float]]:
    sharding = learner.policy.sharding
    batches = (make_documents(step, sharding.num_ranks, max_tokens)[sharding.rank] for step in range(NUM_STEPS))
    return [learner.train_step(batch) for batch in batches]


def train_on_ranks(tiny: Path, folder: Path, strategy: str, adapter: str) -> None:
    learner = make(tiny, strategy, adapter, NUM_RANKS)
    torch.save((train(learner, 32), parameters_of(learner)), folder / f"rank{dist.get_rank()}.pt")


@pytest.mark.parametrize(("strategy", "adapter"), CASES)
def test_two_ranks_train_as_one(ranks: Ranks, tiny: Path, tmp_path: Path, strategy: str, adapter: str) -> None:
    ranks.run(train_on_ranks, tiny, tmp_path, strategy, adapter)
    single = make(tiny, "single", adapter, 1)
    expected = train(single, 200)
    for rank in range(NUM_RANKS):
        metrics, parameters = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert_close(parameters_of(single), parameters, 1e-5)
        for mine, theirs in zip(expected, metrics, strict=True):
            for name in mine.keys() - {"time/train"}:
                assert theirs[name] == pytest.approx(mine[name], abs=1e-5), name
    assert expected[0]["ebft/documents_skipped"] == 1
    assert expected[0]["grad_norm"] > 0


def be_idle(tiny: Path) -> None:
    """Train a step in which one rank only has a document that is too short for a block."""
    for strategy, adapter in CASES:
        learner = make(tiny, strategy, adapter, NUM_RANKS)
        (batch, _) = make_documents(0, NUM_RANKS, 200)
        if dist.get_rank() == 1:
            short = batch.mini_batches[0].micro_batches[0]
            short.token_ids, short.loss_mask = short.token_ids[:6], short.loss_mask[:6]
            short.sequence_starts, short.group_ids = np.array([0, 6], np.int32), short.group_ids[:1]
        metrics = learner.train_step(batch)
        assert np.isfinite(metrics["grad_norm"])
        assert metrics["ebft/num_blocks"] > 0


def test_a_rank_may_have_no_blocks(ranks: Ranks, tiny: Path) -> None:
    ranks.run(be_idle, tiny)

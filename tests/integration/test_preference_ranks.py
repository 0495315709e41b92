"""Tests that preferences train on every strategy as on one rank that holds the whole policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from learner_cases import assert_close, make_learner, parameters_of
from preference_cases import algorithm_of, make_pairs
from rank_cases import Ranks
from torch import Tensor

from rlpipe.configs.schema.learner_config import ChunkedConfig, LearnerConfig, OptimizerConfig
from rlpipe.data.packing import pack_labelled, pack_step
from rlpipe.learner.step import Learner
from rlpipe.models.tiny import make_tiny_policy

pytestmark = pytest.mark.covering(1)
NUM_RANKS, NUM_STEPS = 2, 3
CHUNKS = ChunkedConfig(chunk_mib=0.06, num_persistent=0, num_checkpointed=1, num_offloaded=1)
CHUNKED: dict[str, Any] = {"offload": "chunked", "max_tokens_per_microbatch": 256}
STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "zero3": {"strategy": "zero3"},
    "replicated": CHUNKED | {"strategy": "fsdp2", "chunked": replace(CHUNKS, sharing="replicated")},
    "sharded": CHUNKED | {"strategy": "fsdp2", "chunked": replace(CHUNKS, sharing="sharded")},
    "chunked": CHUNKED | {"chunked": CHUNKS},
}
LOSSES = ["dpo", "kto", "orpo", "simpo"]
LEARNING_RATES = {"none": 1e-4, "lora": 1e-3, "qlora": 1e-3}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("tiny"), hidden_size=64, num_layers=2, intermediate_size=128)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(NUM_RANKS)
    yield started
    started.end()


def make(tiny: Path, loss: str, adapter: str, options: dict[str, Any], num_ranks: int) -> Learner:
    optimizer = OptimizerConfig(lr=LEARNING_RATES[adapter], weight_decay=0.01)
    learner = LearnerConfig(num_ranks=num_ranks, max_grad_norm=0.05, optimizer=optimizer, **options)
    return make_learner(tiny, adapter=adapter, learner=learner, algorithm=algorithm_of(loss))


def train(learner: Learner, loss: str) -> list[dict[str, float]]:
    pack = pack_labelled if loss == "kto" else pack_step
    sharding = learner.policy.sharding
    return [
        learner.train_step(
            pack(make_pairs(seed=step), step=step, num_ranks=sharding.num_ranks, max_tokens=40)[sharding.rank]
        )
        for step in range(NUM_STEPS)
    ]


def train_on_ranks(tiny: Path, folder: Path, loss: str, adapter: str, strategy: str) -> None:
    learner = make(tiny, loss, adapter, STRATEGIES[strategy], NUM_RANKS)
    torch.save((train(learner, loss), parameters_of(learner)), folder / f"rank{dist.get_rank()}.pt")


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("adapter", LEARNING_RATES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_preferences_train_as_on_one_rank(
    ranks: Ranks, tiny: Path, tmp_path: Path, loss: str, adapter: str, strategy: str
) -> None:
    single = make(tiny, loss, adapter, {}, 1)
    before = {name: value.clone() for name, value in parameters_of(single).items()}
    expected_metrics, expected = train(single, loss), parameters_of(single)
    assert any((expected[name] - value).abs().max() > 1e-4 for name, value in before.items()), "they have moved"
    if strategy == "chunked":
        learner = make(tiny, loss, adapter, STRATEGIES[strategy], 1)
        found = [(train(learner, loss), parameters_of(learner))]
    else:
        ranks.run(train_on_ranks, tiny, tmp_path, loss, adapter, strategy)
        found = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
    for metrics, parameters in found:
        assert_close(expected, parameters, 1e-5)
        for mine, theirs in zip(expected_metrics, metrics, strict=True):
            for name in mine.keys() - {"time/train", "tokens/run", "tokens/shared_ratio"}:  # other micro batches
                assert theirs[name] == pytest.approx(mine[name], abs=1e-5), name


def save_reference(tiny: Path, folder: Path, loss: str, adapter: str, strategy: str) -> None:
    learner = make(tiny, loss, adapter, STRATEGIES[strategy], NUM_RANKS)
    torch.save(reference_of(learner, loss), folder / f"rank{dist.get_rank()}.pt")


def reference_of(learner: Learner, loss: str) -> dict[bytes, Tensor]:
    """Return the reference's log-probs of a rank's sequences by the policy itself, and train on them."""
    sharding, pack = learner.policy.sharding, pack_labelled if loss == "kto" else pack_step
    batch = pack(make_pairs(), step=0, num_ranks=sharding.num_ranks, max_tokens=40)[sharding.rank]
    found = learner.reference_logprobs(batch.mini_batches)
    learner.train_step(batch)
    return {key: torch.from_numpy(values) for key, values in found.items()}


@pytest.mark.parametrize("loss", ["dpo", "kto"])
@pytest.mark.parametrize("adapter", LEARNING_RATES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_reference_log_probs_are_computed_as_on_one_rank(
    ranks: Ranks, tiny: Path, tmp_path: Path, loss: str, adapter: str, strategy: str
) -> None:
    expected = reference_of(make(tiny, loss, adapter, {}, 1), loss)
    if strategy == "chunked":
        found = reference_of(make(tiny, loss, adapter, STRATEGIES[strategy], 1), loss)
    else:
        ranks.run(save_reference, tiny, tmp_path, loss, adapter, strategy)
        parts = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
        found = {key: values for part in parts for key, values in part.items()}
    assert_close({str(key): values for key, values in expected.items()}, {str(k): v for k, v in found.items()}, 1e-5)

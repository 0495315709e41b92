"""Tests that every strategy trains as plain PyTorch does on any number of ranks, and resumes any other's checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from learner_cases import assert_close, make_adapter_config, make_batches, make_learner, parameters_of, train_steps
from plain_training import train_plain
from rank_cases import Ranks

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig
from rlpipe.configs.schema.learner_config import ChunkedConfig, LearnerConfig, OptimizerConfig
from rlpipe.learner.checkpoints import CheckpointStore
from rlpipe.learner.step import Learner
from rlpipe.models.adapter import WEIGHTS_FILE
from rlpipe.offload.runtime.chunk_adam import FlatPart

pytestmark = pytest.mark.covering(1)
NUM_STEPS, HALF, MAX_NORM = 5, 3, 0.05
LEARNING_RATE = 1e-4
"""A small learning rate, because AdamW turns rounding errors of gradients near 0 into parts of it."""
MAX_TOKENS = {1: 4096, 3: 70}
"""The tokens of a micro batch, by the number of micro batches in a step of a single rank."""
STRATEGIES = [
    *[("single", 1), ("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 4), ("zero3", 2)],
    *[("chunked", 1), ("replicated", 2), ("sharded", 2)],
]
CHUNKS = ChunkedConfig(
    chunk_mib=0.06, num_persistent=1, num_slots=4, num_swapped=1, num_checkpointed=0, num_offloaded=1
)
CHUNKED = {
    "chunked": {"strategy": "single", "chunked": CHUNKS},
    "replicated": {"strategy": "fsdp2", "chunked": replace(CHUNKS, sharing="replicated")},
    "sharded": {"strategy": "fsdp2", "chunked": replace(CHUNKS, sharing="sharded")},
}
ADAPTERS = ["none", "lora"]
ROOT = Path(__file__).parents[2]
TORCHRUN_RANK = ROOT / "tests" / "helpers" / "torchrun_rank.py"


@pytest.fixture(scope="module")
def groups() -> Iterator[dict[int, Ranks]]:
    started = {num_ranks: Ranks(num_ranks) for num_ranks in (1, 2, 4)}
    yield started
    for ranks in started.values():
        ranks.end()


def make(tiny: Path, strategy: str, adapter: str) -> Learner:
    options = {"strategy": strategy}
    if strategy in CHUNKED:
        options = CHUNKED[strategy] | {"offload": "chunked", "max_tokens_per_microbatch": 128}
    num_ranks = 1 if options["strategy"] == "single" else dist.get_world_size()
    optimizer = OptimizerConfig(lr=LEARNING_RATE)
    learner = LearnerConfig(**options, num_ranks=num_ranks, max_grad_norm=MAX_NORM, optimizer=optimizer)
    return make_learner(tiny, adapter=adapter, learner=learner, algorithm=AlgorithmConfig(num_steps=10))


def train_whole(tiny: Path, strategy: str, adapter: str, max_tokens: int, folder: Path) -> None:
    """Train all steps, with a checkpoint after ``HALF`` of them."""
    learner = make(tiny, strategy, adapter)
    metrics = train_steps(learner, 0, HALF, max_tokens=max_tokens)
    CheckpointStore(folder, keep=5).save(learner, step=HALF, extra={})
    metrics += train_steps(learner, HALF, NUM_STEPS, max_tokens=max_tokens)
    torch.save((metrics, parameters_of(learner)), folder / f"rank{learner.policy.sharding.rank}.pt")


def resume(tiny: Path, strategy: str, adapter: str, checkpoint: Path, folder: Path) -> None:
    learner = make(tiny, strategy, adapter)
    CheckpointStore(folder, keep=5).load(checkpoint, learner)
    metrics = train_steps(learner, HALF, NUM_STEPS)
    torch.save((metrics, parameters_of(learner)), folder / f"rank{learner.policy.sharding.rank}.pt")


@pytest.fixture(scope="module")
def plain(tiny: Path) -> dict[str, tuple[list[float], list[float], dict[str, torch.Tensor]]]:
    return {
        kind: train_plain(
            tiny, make_adapter_config(kind), num_steps=NUM_STEPS, learning_rate=LEARNING_RATE, max_norm=MAX_NORM
        )
        for kind in ADAPTERS
    }


@pytest.mark.parametrize("num_micro_batches", MAX_TOKENS)
@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(("strategy", "num_ranks"), STRATEGIES)
def test_every_strategy_trains_as_plain_pytorch(
    tiny: Path, groups: dict, plain: dict, tmp_path: Path, strategy: str, num_ranks: int, adapter: str,
    num_micro_batches: int,
) -> None:  # fmt: skip
    max_tokens = MAX_TOKENS[num_micro_batches]
    assert all(
        len(make_batches(step=step, max_tokens=max_tokens)[0].mini_batches[0].micro_batches) == num_micro_batches
        for step in range(NUM_STEPS)
    )
    groups[num_ranks].run(train_whole, tiny, strategy, adapter, max_tokens, tmp_path)
    losses, norms, expected = plain[adapter]
    assert min(norms) > MAX_NORM, "clipping has something to do"
    for rank in range(num_ranks):
        metrics, parameters = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert [step["loss"] for step in metrics] == pytest.approx(losses, abs=1e-5)
        assert [step["grad_norm"] for step in metrics] == pytest.approx(norms, abs=1e-5)
        assert_close(expected, parameters, 1e-5)


@pytest.fixture(scope="module")
def checkpoints(tiny: Path, groups: dict, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple, Path]:
    """Return the folders of every strategy's whole run, each with a checkpoint after half of the steps."""
    folders = {}
    for adapter in ADAPTERS:
        for strategy, num_ranks in STRATEGIES:
            folder = tmp_path_factory.mktemp("checkpoints")
            groups[num_ranks].run(train_whole, tiny, strategy, adapter, MAX_TOKENS[1], folder)
            folders[strategy, num_ranks, adapter] = folder
    return folders


PAIRS = [
    (*mine, *theirs)
    for mine, theirs in product(STRATEGIES, STRATEGIES)
    if not ({mine[0], theirs[0]} & CHUNKED.keys()) or {mine, theirs} <= {("single", 1), ("fsdp2", 2), *STRATEGIES[5:]}
]
"""Pairs of strategies; chunked ones are paired only with each other, with one rank, and with FSDP2 on two."""


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize(("strategy", "num_ranks", "other", "other_ranks"), PAIRS)
def test_every_strategy_continues_where_any_other_stopped(
    tiny: Path, groups: dict, checkpoints: dict, tmp_path: Path, strategy: str, num_ranks: int, other: str,
    other_ranks: int, adapter: str,
) -> None:  # fmt: skip
    source = checkpoints[other, other_ranks, adapter]
    groups[num_ranks].run(resume, tiny, strategy, adapter, source / f"step_{HALF:06d}", tmp_path)
    expected_metrics, expected = torch.load(source / "rank0.pt", weights_only=False)
    for rank in range(num_ranks):
        metrics, parameters = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        losses = [step["loss"] for step in expected_metrics[HALF:]]
        assert [step["loss"] for step in metrics] == pytest.approx(losses, abs=1e-5)
        assert_close(expected, parameters, 1e-5)


def look_at_state(tiny: Path) -> None:
    learner = make(tiny, "sharded", "none")
    train_steps(learner, 0, 1)
    state, again = learner.updates.state(), learner.updates.state()
    assert all(tensor.data_ptr() == again[name].data_ptr() for name, tensor in state.items()), "nothing is copied"
    parts = [tensor for tensor in state.values() if isinstance(tensor, FlatPart)]
    num_held, num_whole = sum(part.numel() for part in parts), sum(part.size().numel() for part in parts)
    total = torch.tensor(num_held)
    dist.all_reduce(total)
    assert num_held < total == num_whole


def test_a_rank_that_holds_a_shard_writes_no_more_than_that(tiny: Path, groups: dict) -> None:
    groups[2].run(look_at_state, tiny)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_ranks_that_torchrun_starts_train_as_plain_pytorch(tiny: Path, tmp_path: Path, strategy: str) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [
        str(folder) for folder in (ROOT, ROOT / "tests" / "helpers", *filter(None, [os.environ.get("PYTHONPATH")]))
    ]
    subprocess.run(
        [*command, str(TORCHRUN_RANK), str(tiny), strategy, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=True,
        timeout=300,
    )
    losses, _, expected = train_plain(
        tiny, make_adapter_config(), num_steps=3, learning_rate=LEARNING_RATE, max_norm=MAX_NORM
    )
    for rank in range(2):
        found, parameters = torch.load(tmp_path / f"rank{rank}.pt", weights_only=False)
        assert found == pytest.approx(losses, abs=1e-5)
        assert_close(expected, parameters, 1e-5)
    assert (tmp_path / "policy" / WEIGHTS_FILE).exists()

"""Tests that preferences and reward models train on every strategy as on one rank that holds the whole policy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from learner_cases import assert_close, make_learner, make_model_config, parameters_of
from preference_cases import HEADS, algorithm_of, make_pairs, make_rows
from rank_cases import Ranks
from safetensors.torch import load_file
from torch import Tensor

from rlpipe.configs.schema.algorithm_config import ReferenceConfig
from rlpipe.configs.schema.learner_config import ChunkedConfig, LearnerConfig, OptimizerConfig
from rlpipe.configs.schema.preference_config import PAIR_LOSSES
from rlpipe.data.packing import pack_labelled, pack_step
from rlpipe.learner.checkpoints import CheckpointStore, export_policy
from rlpipe.learner.step import Learner

pytestmark = pytest.mark.covering(0)
NUM_RANKS, NUM_STEPS = 2, 3
CHUNKS = ChunkedConfig(
    chunk_mib=0.06, num_persistent=0, num_slots=4, num_swapped=0, num_checkpointed=1, num_offloaded=1
)
CHUNKED: dict[str, Any] = {"offload": "chunked", "max_tokens_per_microbatch": 256}
STRATEGIES: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "zero3": {"strategy": "zero3"},
    "replicated": CHUNKED | {"strategy": "fsdp2", "chunked": replace(CHUNKS, sharing="replicated")},
    "sharded": CHUNKED | {"strategy": "fsdp2", "chunked": replace(CHUNKS, sharing="sharded")},
    "chunked": CHUNKED | {"chunked": CHUNKS},
}
SHARDED: dict[str, dict[str, Any]] = {
    "fsdp2": {"strategy": "fsdp2"},
    "fsdp2 on the CPU": {"strategy": "fsdp2", "offload": "policy"},
    "zero3": {"strategy": "zero3"},
}
LOSSES = ["dpo", "kto", "orpo", "simpo"]
OTHER_LOSSES = [name for name in PAIR_LOSSES if name not in LOSSES]
LEARNING_RATES = {"none": 1e-4, "lora": 1e-3, "qlora": 1e-3}
KEEPS_SCALE: dict[str, Any] = {"max_grad_norm": None, "optimizer": OptimizerConfig(lr=1.0, eps=1.0)}
"""Options with which the first step is g / (1 + |g|) for the gradient g, so that a wrong scale of gradients shows."""
CASES = [*product(STRATEGIES, LEARNING_RATES, LOSSES), *product(["fsdp2", "zero3", "chunked"], ["lora"], OTHER_LOSSES)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(NUM_RANKS)
    yield started
    started.end()


def make(
    tiny: Path, loss: str, adapter: str, options: dict[str, Any], num_ranks: int, *, moves_reference: bool = False
) -> Learner:
    optimizer = OptimizerConfig(lr=LEARNING_RATES[adapter], weight_decay=0.01)
    learner = LearnerConfig(num_ranks=num_ranks, **{"max_grad_norm": 0.05, "optimizer": optimizer} | options)
    algorithm = algorithm_of(loss)
    if moves_reference:
        algorithm = replace(algorithm, reference=ReferenceConfig(sync_steps=1, mixup=0.5))
    return make_learner(tiny, adapter=adapter, learner=learner, algorithm=algorithm)


def train(learner: Learner, loss: str, steps: range = range(NUM_STEPS)) -> list[dict[str, float]]:
    """Train this rank's part of some steps, the second of which has a single row, so that a rank has none."""
    pack = pack_labelled if loss == "kto" else pack_step
    sharding, found = learner.policy.sharding, []
    for step in steps:
        rows = make_rows(loss, seed=step)[: 1 if step == 1 else None]
        batches = pack(rows, step=step, num_ranks=sharding.num_ranks, max_tokens=40)
        found.append(learner.train_step(batches[sharding.rank]))
    return found


@cache
def trained_on_one_rank(tiny: Path, loss: str, adapter: str) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the metrics and the parameters that every strategy is compared with."""
    learner = make(tiny, loss, adapter, {}, 1)
    before = parameters_of(learner)
    metrics, after = train(learner, loss), parameters_of(learner)
    assert any((after[name] - value).abs().max() > 1e-4 for name, value in before.items()), "they have moved"
    return metrics, after


def train_on_ranks(tiny: Path, folder: Path, loss: str, adapter: str, options: dict[str, Any]) -> None:
    learner = make(tiny, loss, adapter, options, NUM_RANKS)
    torch.save((train(learner, loss), parameters_of(learner)), folder / f"rank{dist.get_rank()}.pt")
    if loss in HEADS:
        export_policy(learner.policy, folder / "policy")


@pytest.mark.parametrize(("strategy", "adapter", "loss"), CASES)
def test_preferences_train_as_on_one_rank(
    ranks: Ranks, tiny_wide_mlp: Path, tmp_path: Path, loss: str, adapter: str, strategy: str
) -> None:
    expected_metrics, expected = trained_on_one_rank(tiny_wide_mlp, loss, adapter)
    if strategy == "chunked":
        learner = make(tiny_wide_mlp, loss, adapter, STRATEGIES[strategy], 1)
        found = [(train(learner, loss), parameters_of(learner))]
    else:
        ranks.run(train_on_ranks, tiny_wide_mlp, tmp_path, loss, adapter, STRATEGIES[strategy])
        found = results_of(tmp_path)
    for metrics, parameters in found:
        assert_close(expected, parameters, 1e-5)
        assert_equal_metrics(metrics, expected_metrics)


def changes_of(tiny: Path, loss: str, adapter: str, options: dict[str, Any], num_ranks: int) -> list[dict[str, Tensor]]:
    """Return how each of two steps without clipping changes the parameters; an adapter's A stays in the first."""
    learner = make(tiny, loss, adapter, options | KEEPS_SCALE, num_ranks)
    states = [parameters_of(learner)]
    for step in range(2):
        train(learner, loss, range(step, step + 1))
        states.append(parameters_of(learner))
    return [{name: after[name] - before[name] for name in after} for before, after in pairwise(states)]


@cache
def changes_on_one_rank(tiny: Path, loss: str, adapter: str) -> list[dict[str, Tensor]]:
    return changes_of(tiny, loss, adapter, {}, 1)


def save_changes(tiny: Path, folder: Path, loss: str, adapter: str, options: dict[str, Any]) -> None:
    torch.save(changes_of(tiny, loss, adapter, options, NUM_RANKS), folder / f"rank{dist.get_rank()}.pt")


@pytest.mark.parametrize(("strategy", "adapter", "loss"), CASES)
def test_gradients_have_the_scale_that_they_have_on_one_rank(
    ranks: Ranks, tiny_wide_mlp: Path, tmp_path: Path, loss: str, adapter: str, strategy: str
) -> None:
    expected = changes_on_one_rank(tiny_wide_mlp, loss, adapter)
    if strategy == "chunked":
        found = [changes_of(tiny_wide_mlp, loss, adapter, STRATEGIES[strategy], 1)]
    else:
        ranks.run(save_changes, tiny_wide_mlp, tmp_path, loss, adapter, STRATEGIES[strategy])
        found = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(NUM_RANKS)]
    for changes in found:
        for mine, theirs in zip(expected, changes, strict=True):
            largest = max(float(change.abs().max()) for change in mine.values())
            assert_close(mine, theirs, 1e-5 * max(1.0, largest))


def results_of(folder: Path) -> list[tuple[list[dict[str, float]], dict[str, Tensor]]]:
    return [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]


def assert_equal_metrics(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    for mine, theirs in zip(expected, found, strict=True):
        for name in mine.keys() - {"time/train", "tokens/run", "tokens/shared_ratio"}:  # other micro batches
            # A norm of 100 in float32 has steps of 8e-6.
            assert theirs[name] == pytest.approx(mine[name], abs=1e-5, rel=1e-6), name


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("adapter", ["none", "lora"])
@pytest.mark.parametrize("strategy", SHARDED)
def test_reward_models_train_and_are_exported_as_on_one_rank(
    ranks: Ranks, tiny_wide_mlp: Path, tmp_path: Path, head: str, adapter: str, strategy: str
) -> None:
    single = make(tiny_wide_mlp, head, adapter, {}, 1)
    before = parameters_of(single)
    expected_metrics, expected = train(single, head), parameters_of(single)
    assert any("score" in name and (expected[name] - value).abs().max() > 1e-4 for name, value in before.items())
    export_policy(single.policy, tmp_path / "expected")
    ranks.run(train_on_ranks, tiny_wide_mlp, tmp_path, head, adapter, SHARDED[strategy])
    for metrics, parameters in results_of(tmp_path):
        assert_close(expected, parameters, 1e-5)
        assert_equal_metrics(metrics, expected_metrics)
    exports = [load_file(tmp_path / name / "model.safetensors") for name in ("expected", "policy")]
    assert "score.weight" in exports[0]
    assert_close(*exports, 1e-5)


def train_in_bfloat16(tiny: Path, folder: Path, head: str, options: dict[str, Any]) -> None:
    num_ranks = dist.get_world_size() if options else 1
    learner = LearnerConfig(num_ranks=num_ranks, **options)
    model = make_model_config(tiny, dtype="bfloat16")
    made = make_learner(tiny, learner=learner, algorithm=algorithm_of(head), model=model)
    torch.save(train(made, head), folder / f"{made.policy.sharding.rank}.pt")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("strategy", ["fsdp2", "zero3"])
def test_the_head_of_a_reward_model_is_read_in_any_dtype(
    ranks: Ranks, tiny_wide_mlp: Path, tmp_path: Path, head: str, strategy: str
) -> None:
    train_in_bfloat16(tiny_wide_mlp, tmp_path, head, {})
    expected = torch.load(tmp_path / "0.pt", weights_only=False)
    ranks.run(train_in_bfloat16, tiny_wide_mlp, tmp_path, head, SHARDED[strategy])
    for mine, theirs in zip(expected, torch.load(tmp_path / "1.pt", weights_only=False), strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=0.02)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], rel=0.1)


def resume_in_8_bit(tiny: Path, folder: Path, head: str) -> None:
    def load() -> Learner:
        optimizer = OptimizerConfig(name="adamw_8bit", lr=1e-3)
        learner = LearnerConfig(strategy="fsdp2", num_ranks=NUM_RANKS, optimizer=optimizer)
        return make_learner(tiny, adapter="none", learner=learner, algorithm=algorithm_of(head))

    whole, resumed, store = load(), load(), CheckpointStore(folder, keep=5)
    train(whole, head, range(2))
    checkpoint = store.save(whole, step=2, extra={})
    train(whole, head, range(2, 3))
    store.load(checkpoint, resumed)
    train(resumed, head, range(2, 3))
    assert_close(parameters_of(whole), parameters_of(resumed), 1e-6)


@pytest.mark.parametrize("head", HEADS)
def test_moments_in_eight_bit_skip_a_rank_without_a_row_of_the_head(
    ranks: Ranks, tiny_wide_mlp: Path, tmp_path: Path, head: str
) -> None:
    ranks.run(resume_in_8_bit, tiny_wide_mlp, tmp_path, head)


CHAINS = [("single", "fsdp2", "zero3"), ("zero3", "single", "fsdp2"), ("fsdp2", "zero3", "single")]
"""Strategies of the steps of a run, each of which goes on where the one before stopped."""


def go_on(tiny: Path, folder: Path, loss: str, adapter: str, strategy: str, step: int) -> None:
    """Load the checkpoint before a step, train the step, and write the checkpoint after it."""
    options, num_ranks = ({}, 1) if strategy == "single" else (STRATEGIES[strategy], NUM_RANKS)
    learner = make(tiny, loss, adapter, options, num_ranks, moves_reference=loss == "dpo" and adapter == "none")
    store = CheckpointStore(folder, keep=5)
    if step:
        store.load(folder / f"step_{step:06d}", learner)
    metrics = train(learner, loss, range(step, step + 1))
    store.save(learner, step=step + 1, extra={})
    torch.save((metrics, parameters_of(learner)), folder / f"rank{learner.policy.sharding.rank}.pt")


@pytest.mark.parametrize(
    ("loss", "adapter"), [*product(["dpo", "kto", "orpo"], LEARNING_RATES), *product(HEADS, ["none", "lora"])]
)
@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_continues_under_one_strategy_after_the_other(
    ranks: Ranks, tiny_wide_mlp: Path, tmp_path: Path, loss: str, adapter: str, chain: tuple[str, ...]
) -> None:
    whole = make(tiny_wide_mlp, loss, adapter, {}, 1, moves_reference=loss == "dpo" and adapter == "none")
    expected = train(whole, loss)
    for step, strategy in enumerate(chain):
        if strategy == "single":
            go_on(tiny_wide_mlp, tmp_path, loss, adapter, strategy, step)
        else:
            ranks.run(go_on, tiny_wide_mlp, tmp_path, loss, adapter, strategy, step)
        metrics, parameters = torch.load(tmp_path / "rank0.pt", weights_only=False)
        assert_equal_metrics(metrics, expected[step : step + 1])
    assert_close(parameters_of(whole), parameters, 1e-5)


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
    ranks: Ranks, tiny_wide_mlp: Path, tmp_path: Path, loss: str, adapter: str, strategy: str
) -> None:
    expected = reference_of(make(tiny_wide_mlp, loss, adapter, {}, 1), loss)
    if strategy == "chunked":
        found = reference_of(make(tiny_wide_mlp, loss, adapter, STRATEGIES[strategy], 1), loss)
    else:
        ranks.run(save_reference, tiny_wide_mlp, tmp_path, loss, adapter, strategy)
        parts = [torch.load(tmp_path / f"rank{rank}.pt", weights_only=False) for rank in range(NUM_RANKS)]
        found = {key: values for part in parts for key, values in part.items()}
    assert_close({str(key): values for key, values in expected.items()}, {str(k): v for k, v in found.items()}, 1e-5)

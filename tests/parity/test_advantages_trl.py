"""Tests that the advantages equal those that TRL's trainers compute from the same rewards, some of them missing.

The trainers are TRL's own, with the tiny policy: their rewards are looked up instead of computed, and they draw two
tokens per completion because they can't be asked for advantages alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from rlpipe.algorithms.advantages import combine_rewards, compute_advantages
from rlpipe.configs.schema.algorithm_config import AdvantageConfig
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.types import FloatArray

NUM_GROUPS, GROUP_SIZE = 5, 4
WEIGHTS = [1.0, 0.5]
EPS = 1e-4
ROWS = [{"prompt": f"{group}+1="} for group in range(NUM_GROUPS) for _ in range(GROUP_SIZE)]
Rewards = list[list[float | None]]


class RewardTable:
    """The rewards ``[G times groups, R]`` that the trainer's reward functions return."""

    def __init__(self) -> None:
        self.rows: Rewards = []

    def column(self, index: int) -> Callable[..., list[float | None]]:
        def reward(completions: list[str], **columns: object) -> list[float | None]:
            return [row[index] for row in self.rows]

        reward.__name__ = f"reward_{index}"
        return reward


@pytest.fixture(scope="module")
def table() -> RewardTable:
    return RewardTable()


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden_size=16, num_layers=1, intermediate_size=16)


def trainer_arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": len(ROWS),
        "num_generations": GROUP_SIZE,
        "max_completion_length": 2,
        "reward_weights": WEIGHTS,
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "beta": 0.0,
    }


@pytest.fixture(scope="module")
def grpo_trainer(policy: Path, table: RewardTable, tmp_path_factory: pytest.TempPathFactory) -> GRPOTrainer:
    return GRPOTrainer(
        model=str(policy),
        reward_funcs=[table.column(0), table.column(1)],
        args=GRPOConfig(**trainer_arguments(tmp_path_factory.mktemp("grpo"))),
        train_dataset=Dataset.from_list(ROWS),
    )


@pytest.fixture(scope="module")
def rloo_trainer(policy: Path, table: RewardTable, tmp_path_factory: pytest.TempPathFactory) -> RLOOTrainer:
    return RLOOTrainer(
        model=str(policy),
        reward_funcs=[table.column(0), table.column(1)],
        args=RLOOConfig(**trainer_arguments(tmp_path_factory.mktemp("rloo"))),
        train_dataset=Dataset.from_list(ROWS),
    )


def make_rewards(*, with_gaps: bool) -> Rewards:
    """Return groups with signal, with equal rewards, and (``with_gaps``) with one, several or all rewards missing."""
    random = np.random.default_rng(3)
    rows: Rewards = random.choice([0.0, 0.3, 1.0], size=(len(ROWS), len(WEIGHTS))).tolist()
    for row in rows[GROUP_SIZE : 2 * GROUP_SIZE]:
        row[:] = [0.1, 0.7]
    if with_gaps:
        rows[0] = [None, 1.0]
        rows[2 * GROUP_SIZE] = [None, None]
        for row in rows[3 * GROUP_SIZE + 1 : 4 * GROUP_SIZE]:
            row[:] = [None, None]
        for row in rows[4 * GROUP_SIZE : 4 * GROUP_SIZE + 3]:
            row[0] = None
    return rows


def our_advantages(rows: Rewards, config: AdvantageConfig, combine: str) -> FloatArray:
    groups = np.array(rows, np.float32).reshape(NUM_GROUPS, GROUP_SIZE, len(WEIGHTS))
    combined = [combine_rewards(group, WEIGHTS, combine, config.eps) for group in groups]
    return np.concatenate(compute_advantages(combined, config))


def assert_equal(ours: FloatArray, trainer: GRPOTrainer | RLOOTrainer) -> None:
    theirs = trainer._generate_and_score_completions(ROWS)["advantages"].numpy()
    assert np.abs(theirs).max() > 0.1, "nothing to compare"
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("with_gaps", [False, True])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_grpo_equals_trl(grpo_trainer: GRPOTrainer, table: RewardTable, scale: str, with_gaps: bool) -> None:
    table.rows = make_rewards(with_gaps=with_gaps)
    grpo_trainer.multi_objective_aggregation = "sum_then_normalize"
    grpo_trainer.scale_rewards = scale
    ours = our_advantages(table.rows, AdvantageConfig(name="grpo", scale=scale, eps=EPS), "sum_then_normalize")
    assert_equal(ours, grpo_trainer)


@pytest.mark.parametrize("with_gaps", [False, True])
@pytest.mark.parametrize(
    "config",
    [AdvantageConfig(name="grpo", scale="batch", eps=EPS), AdvantageConfig(name="reinforce_baseline", eps=EPS)],
)
def test_normalize_then_sum_over_the_batch_equals_trl(
    grpo_trainer: GRPOTrainer, table: RewardTable, config: AdvantageConfig, with_gaps: bool
) -> None:
    table.rows = make_rewards(with_gaps=with_gaps)
    grpo_trainer.multi_objective_aggregation = "normalize_then_sum"
    assert_equal(our_advantages(table.rows, config, "normalize_then_sum"), grpo_trainer)


@pytest.mark.parametrize("with_gaps", [False, True])
def test_rloo_equals_trl(rloo_trainer: RLOOTrainer, table: RewardTable, with_gaps: bool) -> None:
    table.rows = make_rewards(with_gaps=with_gaps)
    assert_equal(our_advantages(table.rows, AdvantageConfig(name="rloo"), "sum_then_normalize"), rloo_trainer)

"""Tests that the learner's ranks score groups like a frozen copy of the initial model, without changing their base."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from learner_cases import make_learner, make_model_config, make_rollouts, train_steps
from rank_cases import Ranks

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, EbftConfig, FeatureConfig
from rlpipe.configs.schema.learner_config import LearnerConfig, OptimizerConfig
from rlpipe.learner.step import Learner
from rlpipe.models.tiny_model import make_tiny_policy
from rlpipe.scoring.feature_scorer import learner_feature_scorer, make_feature_scorer
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import ALIGNMENT, DIVERSITY, GroundTruth, Prompt, RolloutGroup

pytestmark = pytest.mark.covering(0)
NUM_RANKS = 2
FEATURES = FeatureConfig(weights="learner", micro_batch_tokens=48)
CASES = [(strategy, adapter) for strategy in ("fsdp2", "zero3") for adapter in ("lora", "none")]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_policy(tmp_path_factory.mktemp("tiny"), hidden_size=64, num_layers=4, intermediate_size=96)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(NUM_RANKS)
    yield started
    started.end()


def make_groups() -> list[RolloutGroup]:
    """Return five groups, so that the ranks have unequal work."""
    rollouts = make_rollouts(num_groups=5, group_size=3, seed=7)
    rng = np.random.default_rng(7)
    groups = []
    for group_id in range(5):
        members = [rollout for rollout in rollouts if rollout.group_id == group_id]
        first = int(np.argmax(members[0].loss_mask))
        length = int(rng.integers(3, 12))
        truth = GroundTruth(
            token_ids=rng.integers(7, 100, length).astype(np.int32), is_assistant=np.ones(length, np.bool_)
        )
        prompt = Prompt(
            prompt_id=group_id, epoch=0, token_ids=members[0].token_ids[:first], prompt="", task={}, truth=truth
        )
        groups.append(RolloutGroup(group_id=group_id, prompt=prompt, rollouts=members))
    return groups


def make(tiny: Path, strategy: str, adapter: str, num_ranks: int) -> Learner:
    algorithm = AlgorithmConfig(num_steps=10, ebft=EbftConfig(reward=True, features=FEATURES))
    config = LearnerConfig(strategy=strategy, num_ranks=num_ranks, optimizer=OptimizerConfig(lr=1e-2))
    return make_learner(tiny, adapter=adapter, learner=config, algorithm=algorithm)


def frozen_bits(learner: Learner) -> dict[str, bytes]:
    """Return this rank's part of all parameters that are not trained."""
    local, model = learner.policy.sharding.local, learner.policy.model
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return {name: local(parameter).detach().clone().numpy().tobytes() for name, parameter in frozen.items()}


def score_between_steps(learner: Learner, groups: list[RolloutGroup]) -> list[list[GroupScores]]:
    assert learner.reference is not None
    scorer = learner_feature_scorer(learner.policy, learner.reference, FEATURES)
    found = [scorer.score(groups)]
    before = frozen_bits(learner)
    for step in range(2):
        train_steps(learner, step, step + 1)
        found.append(scorer.score(groups))
    assert frozen_bits(learner) == before
    return found


def assert_same(found: list[GroupScores], expected: list[GroupScores]) -> None:
    assert [entry.group_id for entry in found] == [entry.group_id for entry in expected]
    for mine, theirs in zip(found, expected, strict=True):
        for name in (ALIGNMENT, DIVERSITY):
            assert mine.scores[name] == pytest.approx(theirs.scores[name], abs=1e-5)


@pytest.mark.parametrize("adapter", ["lora", "none"])
def test_a_learner_scores_as_a_frozen_copy(tiny: Path, adapter: str) -> None:
    groups = make_groups()
    expected = make_feature_scorer(make_model_config(tiny, adapter=adapter), FEATURES).score(groups)
    learner = make(tiny, "single", adapter, 1)
    for found in score_between_steps(learner, groups):
        assert_same(found, expected)
    assert (frozen_bits(learner) != {}) == (adapter == "lora")
    spread = np.std([value for entry in expected for value in entry.scores[ALIGNMENT] if value is not None])
    assert spread > 1e-3, "rewards that are all alike would show nothing"


def score_on_ranks(tiny: Path, folder: Path, strategy: str, adapter: str) -> None:
    learner = make(tiny, strategy, adapter, NUM_RANKS)
    rank = dist.get_rank()
    shares = score_between_steps(learner, make_groups()[rank::NUM_RANKS])
    assert learner.reference is not None
    alone = learner_feature_scorer(learner.policy, learner.reference, FEATURES)
    assert len(alone.score(make_groups()[:1] if rank else [])) == rank, "a rank may have nothing to score"
    torch.save(shares, folder / f"rank{rank}.pt")


@pytest.mark.parametrize(("strategy", "adapter"), CASES)
def test_ranks_that_share_the_model_score_as_a_frozen_copy(
    ranks: Ranks, tiny: Path, tmp_path: Path, strategy: str, adapter: str
) -> None:
    groups = make_groups()
    expected = make_feature_scorer(make_model_config(tiny, adapter=adapter), FEATURES).score(groups)
    ranks.run(score_on_ranks, tiny, tmp_path, strategy, adapter)
    for rank in range(NUM_RANKS):
        for found in torch.load(tmp_path / f"rank{rank}.pt", weights_only=False):
            assert_same(found, expected[rank::NUM_RANKS])

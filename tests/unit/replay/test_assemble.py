"""Tests that the groups of a step become packed batches with advantages and metrics."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from replay_cases import group

from rlpipe.configs.schema.algorithm_config import AdvantageConfig, AlgorithmConfig, LossConfig, RewardKlConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.replay.assemble import assemble_step, has_signal, set_advantages, step_metrics
from rlpipe.types import NO_TURN, EpisodeTrace, Rollout, RolloutGroup, RolloutStatus, TrainBatch


def assemble(groups: list[RolloutGroup], algorithm: AlgorithmConfig, num_ranks: int = 1) -> list[TrainBatch]:
    return assemble_step(
        groups,
        step=3,
        algorithm=algorithm,
        learner=LearnerConfig(num_ranks=num_ranks, max_tokens_per_microbatch=64),
        reward_weights={"right": 1.0},
        seed=0,
    )


def loss_advantages(batches: list[TrainBatch]) -> list[float]:
    micros = [micro for batch in batches for mini in batch.mini_batches for micro in mini.micro_batches]
    return sorted(float(a) for micro in micros for a in micro.advantages[micro.loss_mask])


def test_advantages_reach_every_loss_token() -> None:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(scale="none"))
    batches = assemble([group(0, [1.0, 0.0]), group(1, [1.0, 1.0])], algorithm)
    assert loss_advantages(batches) == pytest.approx([-0.5] * 3 + [0.0] * 6 + [0.5] * 3)


def test_every_rank_knows_the_denominators_of_the_whole_step() -> None:
    batches = assemble([group(i, [1.0, 0.0]) for i in range(4)], AlgorithmConfig(), num_ranks=2)
    assert [batch.mini_batches[0].num_loss_tokens for batch in batches] == [24, 24]
    assert sum(int(m.loss_mask.sum()) for b in batches for m in b.mini_batches[0].micro_batches) == 24


def test_truncated_rollouts_can_be_left_out_of_the_loss() -> None:
    groups = [group(0, [1.0, 0.0])]
    groups[0].rollouts[1].status = RolloutStatus.TRUNCATED
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(scale="none"), loss=LossConfig(mask_truncated=True))
    batches = assemble(groups, algorithm)
    assert loss_advantages(batches) == pytest.approx([0.5] * 3)
    assert batches[0].metrics["completions/max_length"] == 3, "the metrics still know them"


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(advantage=AdvantageConfig(name="optimal_token_baseline")),
        AlgorithmConfig(reward_kl=RewardKlConfig(coef=0.1)),
    ],
)
def test_rewards_go_to_the_learner_if_it_computes_the_advantages(algorithm: AlgorithmConfig) -> None:
    groups = [group(0, [1.0, None], lengths=[2, 4]), group(1, [0.5, 0.5])]
    batches = assemble_step(
        groups,
        step=3,
        algorithm=algorithm,
        learner=LearnerConfig(num_ranks=2, max_tokens_per_microbatch=64),
        reward_weights={"right": 2.0},
        seed=0,
        skip_zero_advantage=True,
    )
    for batch in batches:
        assert batch.rewards is not None
        np.testing.assert_array_equal(np.stack(batch.rewards.rewards), [[2.0, np.nan], [1.0, 1.0]])
        assert [counts.tolist() for counts in batch.rewards.num_tokens] == [[2, 4], [3, 3]]
        assert batch.metrics["groups/skipped"] == 0
    assert loss_advantages(batches) == [0.0] * 12, "no rollout is left out"
    assert all(rollout.advantages is None for one in groups for rollout in one), "nothing records the zeros"


def with_greedy(made: RolloutGroup) -> RolloutGroup:
    """Return the group with its last rollout as the greedy one."""
    made.rollouts[-1].is_greedy = True
    return made


@pytest.mark.parametrize("coef", [0.0, 0.1])
def test_a_greedy_completion_is_a_baseline_and_is_not_trained(coef: float) -> None:
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="remax"), reward_kl=RewardKlConfig(coef=coef))
    groups = [with_greedy(group(0, [1.0, 0.0, 0.5], lengths=[2, 3, 9])), with_greedy(group(1, [0.5, 0.25, None]))]
    (batch,) = assemble(groups, algorithm)
    assert [int(micro.loss_mask.sum()) for micro in batch.mini_batches[0].micro_batches] == [2 + 3 + 3 + 3]
    assert (batch.mini_batches[0].num_sequences, batch.metrics["num_completion_tokens"]) == (4, 11)
    assert batch.metrics["reward"] == pytest.approx((1 + 0.5 + 0.25) / 4)
    assert batch.metrics["reward/greedy"] == 0.5
    assert batch.metrics["completions/max_length"] == 3
    assert all(rollout.advantages is None for one in groups for rollout in one if rollout.is_greedy)
    if coef:
        assert batch.rewards is not None
        np.testing.assert_array_equal(np.stack(batch.rewards.rewards), [[1.0, 0.0], [0.5, 0.25]])
        np.testing.assert_array_equal(batch.rewards.baselines, [0.5, np.nan])
        assert [counts.tolist() for counts in batch.rewards.num_tokens] == [[2, 3], [3, 3]]
    else:
        assert loss_advantages([batch]) == pytest.approx([-0.5] * 3 + [0.0] * 6 + [0.5] * 2)


def test_a_greedy_completion_is_not_trained_with_another_advantage_either() -> None:
    """Check what a run has left of remax, if it goes on with other options."""
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="rloo"))
    (batch,) = assemble([with_greedy(group(0, [1.0, 0.0, 1.0]))], algorithm)
    assert loss_advantages([batch]) == [-1.0] * 3 + [1.0] * 3


def test_the_branches_of_an_episode_are_numbered_one_after_the_other() -> None:
    made = group(0, [1.0, 0.0], lengths=[3, 2])
    made.rollouts[0] = played(made.rollouts[0], [0, 0, 0, 1.0], (group(0, [1.0], lengths=[1]).rollouts[0],))
    (batch,) = assemble([made], AlgorithmConfig(reward_kl=RewardKlConfig(coef=0.1)))
    (micro,) = batch.mini_batches[0].micro_batches
    assert batch.rewards is not None
    assert (batch.rewards.num_tokens[0].tolist(), micro.first_indices.tolist()) == ([4, 2], [0, 3, 4])


ONLINE = AlgorithmConfig(loss=LossConfig(name="dpo"))


def test_the_best_and_the_worst_of_each_group_are_a_pair() -> None:
    groups = [group(0, [0.5, 1.0, 0.0, 1.0]), group(1, [1.0, 1.0, 1.0, 1.0]), group(2, [None, 0.2, 0.7, None])]
    (batch,) = assemble(groups, ONLINE)
    (mini_batch,) = batch.mini_batches
    (micro,) = mini_batch.micro_batches
    assert mini_batch.num_sequences == 2
    assert micro.group_ids.tolist() == [0, 0, 2, 2]
    assert loss_advantages([batch]) == [-1.0] * 6 + [1.0] * 6
    first, *_ = groups
    expected = [first.rollouts[1], first.rollouts[2], groups[2].rollouts[2], groups[2].rollouts[1]]
    assert micro.token_ids.tolist() == [token for rollout in expected for token in rollout.token_ids]
    assert batch.metrics["groups/paired"] == 2


def test_a_truncated_rollout_is_in_no_pair_where_it_counts_in_no_loss() -> None:
    groups = [group(0, [0.0, 0.5, 1.0])]
    groups[0].rollouts[0].status = RolloutStatus.TRUNCATED
    masked = replace(ONLINE, loss=LossConfig(name="dpo", mask_truncated=True))
    for algorithm, worst in ((ONLINE, 0), (masked, 1)):
        (micro,) = assemble(groups, algorithm)[0].mini_batches[0].micro_batches
        length = len(groups[0].rollouts[worst].token_ids)
        assert micro.token_ids[-length:].tolist() == groups[0].rollouts[worst].token_ids.tolist()


def test_a_step_without_any_pair_trains_nothing() -> None:
    (batch,) = assemble([group(0, [1.0, 1.0]), group(1, [0.0, 0.0])], ONLINE)
    assert [mini.num_loss_tokens for mini in batch.mini_batches] == [0]
    assert batch.metrics["groups/paired"] == 0


def test_metrics_of_a_step() -> None:
    groups = [group(0, [1.0, 0.0], lengths=[2, 4], version=1), group(1, [1.0, 1.0], version=3)]
    groups[0].rollouts[1].finish_reason, groups[1].rollouts[0].finish_reason = "length", "max_turns"
    metrics = step_metrics(groups, step=3)
    assert metrics["reward"] == 0.75
    assert metrics["rewards/right/mean"] == 0.75
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["completions/max_length"] == 4
    assert metrics["completions/clipped_ratio"] == 0.25
    assert metrics["completions/terminated/max_length"] == 3
    assert (metrics["staleness/mean"], metrics["staleness/max"], metrics["staleness/mixed_ratio"]) == (1.0, 2.0, 0.0)


def test_a_rollout_of_several_versions_is_as_stale_as_its_oldest_token() -> None:
    groups = [group(0, [1.0, 0.0], version=3), group(1, [1.0, 1.0], version=2)]
    groups[0].rollouts[1].policy_versions[2] = 1
    metrics = step_metrics(groups, step=3)
    assert (metrics["staleness/mean"], metrics["staleness/max"], metrics["staleness/mixed_ratio"]) == (1.5, 2.0, 0.25)


def test_a_group_without_a_sampled_token_has_no_staleness() -> None:
    groups = [group(0, [1.0, 0.0], version=498), group(1, [0.0, 0.0])]
    for rollout in groups[1]:
        rollout.loss_mask[:] = False
        rollout.policy_versions[:] = -1
    for chosen, want in ((groups, 2.0), (groups[1:], 0.0)):
        metrics = step_metrics(chosen, step=500)
        assert (metrics["staleness/mean"], metrics["staleness/max"]) == (want, want)


def test_what_rewards_log_is_averaged_over_the_groups_that_have_it() -> None:
    groups = [group(index, [1.0, 0.0]) for index in range(3)]
    groups[0].logged, groups[2].logged = {"words": 2.0}, {"words": 5.0}
    assert step_metrics(groups, step=0)["logged/words"] == 3.5


def test_a_rollout_without_reward_is_left_out_of_the_means() -> None:
    metrics = step_metrics([group(0, [1.0, None])], step=0)
    assert metrics["reward"] == 1.0


def played(rollout: Rollout, turn_rewards: list[float], branches: tuple[Rollout, ...] = ()) -> Rollout:
    """Return a rollout as an episode with one turn for each of its tokens; branches hold the last turns."""
    turns = np.where(rollout.loss_mask, np.arange(len(rollout.token_ids)) - 2, NO_TURN).astype(np.int32)
    trace = EpisodeTrace(
        messages=[], reward=sum(turn_rewards), turn_rewards=turn_rewards, end="done", branches=branches
    )
    return replace(rollout, turns=turns, episode=trace, rewards={"environment": sum(turn_rewards)})


def test_the_branches_of_an_episode_count_as_one_sequence() -> None:
    made = group(0, [1.0, 0.0], lengths=[3, 2])
    branch = group(0, [1.0], lengths=[1]).rollouts[0]
    branch = replace(branch, turns=np.where(branch.loss_mask, 3, NO_TURN).astype(np.int32))
    made.rollouts = [played(made.rollouts[0], [0, 0, 0, 1.0], (branch,)), played(made.rollouts[1], [0, 0])]
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="rloo"))
    (batch,) = assemble_step(
        [made],
        step=0,
        algorithm=algorithm,
        learner=LearnerConfig(max_tokens_per_microbatch=64),
        reward_weights={"environment": 1.0},
        seed=0,
    )
    (mini,) = batch.mini_batches
    assert (mini.num_sequences, mini.num_loss_tokens) == (2, 6)
    (micro,) = mini.micro_batches
    assert micro.num_sequences == 3
    assert micro.shares is not None
    assert [*micro.shares[micro.loss_mask]] == [0.75] * 3 + [0.25] + [1.0] * 2
    assert [*micro.advantages[micro.loss_mask]] == [1.0] * 4 + [-1.0] * 2
    assert batch.metrics["num_completion_tokens"] == 6


def test_turns_may_have_advantages_of_their_own() -> None:
    made = group(0, [0.0, 0.0], lengths=[3, 1])
    made.rollouts = [played(made.rollouts[0], [0.5, 0.0, 1.0]), played(made.rollouts[1], [2.0])]
    for rollout, reward in zip(made, (1.5 + 0.25, 2.0), strict=True):
        rollout.reward = reward  # a reward function has added 0.25 to the first
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="rloo", credit="turns"))
    (batch,) = assemble_step(
        [made],
        step=0,
        algorithm=algorithm,
        learner=LearnerConfig(max_tokens_per_microbatch=64),
        reward_weights={"environment": 1.0, "right": 1.0},
        seed=0,
    )
    (micro,) = batch.mini_batches[0].micro_batches
    assert [*micro.advantages[micro.loss_mask]] == [1.75 - 2.0, 1.25, 1.25, 2.0 - 1.75]


@pytest.mark.parametrize(
    ("rewards", "expected"), [([1.5, None, 2.0], [-0.5, 1.0, 1.0, 0, 0.5]), ([1.5, None, None], [0, 0, 0, 0, 0])]
)
def test_an_episode_without_a_reward_counts_in_no_turn(rewards: list[float | None], expected: list[float]) -> None:
    made = group(0, [0.0, 0.0, 0.0], lengths=[3, 1, 1])
    turns = ([0.5, 0.0, 1.0], [0.0], [2.0])
    made.rollouts = [played(rollout, own) for rollout, own in zip(made, turns, strict=True)]
    for rollout, reward in zip(made, rewards, strict=True):
        rollout.reward = reward
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="rloo", credit="turns"))
    set_advantages([made], algorithm, {"environment": 1.0})
    found = [own.advantages[own.loss_mask] for own in made.sequences if own.advantages is not None]
    assert [*np.concatenate(found)] == expected


def test_a_reward_without_weight_is_no_signal() -> None:
    made = group(0, [1.0, 1.0])
    for index, rollout in enumerate(made):
        rollout.rewards = {"right": 1.0, "length": float(index)}
    algorithm = AlgorithmConfig(combine="normalize_then_sum")
    assert has_signal(made, algorithm, {"right": 1.0, "length": 0.5})
    assert not has_signal(made, algorithm, {"right": 1.0, "length": 0.0})


def test_equal_sums_of_different_turns_are_a_signal_where_turns_are_credited() -> None:
    made = group(0, [1.0, 1.0, 1.0], lengths=[2, 3, 1])
    early, late, unknown = (played(x, own) for x, own in zip(made, ([1.0, 0], [0, 1.0, 0], [5.0]), strict=True))
    unknown.reward = None
    advantages = [AdvantageConfig(name="rloo", credit=credit) for credit in ("turns", "episode")]
    turns, episodes = (AlgorithmConfig(advantage=own) for own in advantages)
    made.rollouts = [early, late]
    weights = {"environment": 1.0}
    assert has_signal(made, turns, weights)
    assert not has_signal(made, episodes, weights)
    made.rollouts = [early, played(late, [1.0, 0, 0]), unknown]
    assert not has_signal(made, turns, weights)


def test_a_group_has_a_signal_where_turns_are_credited_only_if_an_advantage_is_not_0() -> None:
    """Rewards of functions count for an episode's last turn, and those of the environment by their weight."""
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(name="rloo", credit="turns"))
    rng, found = np.random.default_rng(0), []
    for _ in range(200):
        weight, lengths = float(rng.integers(2)), rng.integers(1, 3, size=3).tolist()
        made = group(0, rng.integers(2, size=3).astype(float).tolist(), lengths=lengths)
        made.rollouts = [
            played(rollout, rng.integers(2, size=count).astype(float).tolist())
            for rollout, count in zip(made, lengths, strict=True)
        ]
        weights = {"environment": weight, "right": 1.0}
        set_advantages([made], algorithm, weights)
        found.append(any(own.advantages is not None and own.advantages.any() for own in made.sequences))
        assert has_signal(made, algorithm, weights) == found[-1]
    assert {*found} == {True, False}


def test_own_advantages_of_tokens_reach_the_branches_of_an_episode(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def advantages(rewards, inputs):\n"
        "    assert [group.group_id for group in inputs.groups] == [0]\n"
        "    pairs = [list(zip(*of_group)) for of_group in zip(rewards, inputs.num_tokens)]\n"
        "    return [[10 * reward + np.arange(count) for reward, count in group] for group in pairs]\n"
    )
    made = group(0, [1.0, 2.0], lengths=[3, 2])
    branch = group(0, [1.0], lengths=[1]).rollouts[0]
    trace = EpisodeTrace(messages=[], reward=1.0, turn_rewards=[1.0], end="done", branches=(branch,))
    made.rollouts[0] = replace(made.rollouts[0], episode=trace)
    algorithm = AlgorithmConfig(advantage=AdvantageConfig(path=f"{tmp_path}/mine.py:advantages"))
    set_advantages([made], algorithm, {"right": 1.0})
    per_token = [
        [*sequence.advantages[sequence.loss_mask]]
        for sequence in made.sequences
        if sequence.advantages is not None and not sequence.advantages[~sequence.loss_mask].any()
    ]
    assert per_token == [[10, 11, 12], [13], [20, 21]]

"""The decisions of the replay store, feature by feature, and their effects on the accounts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_cases import REWARD, admit, bring, group, open_store, score

from rlpipe.configs.schema.algorithm_config import AlgorithmConfig, LossConfig, ReplayPolicyConfig
from rlpipe.configs.schema.learner_config import LearnerConfig
from rlpipe.configs.schema.root_config import ReplayConfig
from rlpipe.data.packing import pack_step
from rlpipe.data.sources.row_source import Cursor
from rlpipe.errors import RunError
from rlpipe.replay.assemble import assemble_step
from rlpipe.replay.ledger.run_ledger import NO_VARIANCE, GroupState
from rlpipe.replay.step_queue import StepReport
from rlpipe.replay.store import FailuresInARow, Outcome, ReplayStore
from rlpipe.scoring.scorer import GroupScores
from rlpipe.types import RolloutGroup, TrainBatch

FLAT, MIXED = [1.0, 1.0], [1.0, 0.0]


def trained_groups(batches: list[TrainBatch] | None) -> int:
    """Return the number of trained groups, which have two sequences each."""
    assert batches is not None
    micros = [micro for batch in batches for mini in batch.mini_batches for micro in mini.micro_batches]
    return sum(micro.num_sequences for micro in micros) // 2


def metric(batches: list[TrainBatch] | None, name: str) -> float:
    assert batches is not None
    return batches[0].metrics[name]


def test_a_failed_group_leaves_its_slot_and_its_reason(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    admit(store, 0, 1)
    failed = group(0, [], scored=False)
    failed.failure = "the engine refused it"
    assert store.generated([failed]).discarded == {0: "the engine refused it"}
    bring_nothing = GroupScores(group_id=1, failures={REWARD: "it raised KeyError"})
    store.generated([group(1, list(MIXED), scored=False)])
    (reason,) = store.scored([1], [[bring_nothing]]).discarded.values()
    assert "KeyError" in reason
    rows = store.ledger.rows("SELECT group_id, state, reason FROM groups ORDER BY group_id")
    assert rows == [(0, "DISCARDED", "the engine refused it"), (1, "DISCARDED", reason)]
    assert store.ledger.num_slots_taken(0) == 0
    assert not list(store.ledger.load([0, 1]))


def test_scores_without_tokens_or_twice_are_ignored(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    admit(store, 0)
    score(store, 0, MIXED)
    assert store.ledger.counts() == {GroupState.ADMITTED: 1}
    bring(store, 0, MIXED)
    score(store, 0, FLAT)
    assert store.ledger.rows("SELECT reward FROM groups") == [(0.5,)]


@pytest.mark.parametrize("reopened", [False, True])
def test_a_step_is_the_same_whenever_it_is_asked_for(tmp_path: Path, reopened: bool) -> None:
    store = open_store(tmp_path)
    admit(store, 0, 1, 2, 3)
    for group_id in (3, 1, 0):
        bring(store, group_id, [float(group_id), 0.5])
    first = store.batches(0)
    store = open_store(tmp_path) if reopened else store
    second = store.batches(0)
    assert first is not None
    assert second is not None
    for one, other in zip(first[0].mini_batches[0].micro_batches, second[0].mini_batches[0].micro_batches, strict=True):
        for name in ("token_ids", "loss_mask", "logprobs", "advantages", "policy_versions"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    assert second[0].metrics == first[0].metrics


def test_a_new_process_continues_where_the_dead_one_was(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    admit(store, 0, 1, 2, 3)
    bring(store, 0, MIXED)
    store.generated([group(1, list(MIXED), scored=False)])
    again = open_store(tmp_path)
    resume_state = again.resume_state([])
    assert [(g.group_id, state) for g, state in resume_state.unfinished] == [
        (0, GroupState.SCORED),
        (1, GroupState.GENERATED),
        (2, GroupState.ADMITTED),
        (3, GroupState.ADMITTED),
    ]
    assert (resume_state.next_group_id, resume_state.num_slots_taken, resume_state.cursor.position) == (4, 4, 4)
    assert [g.group_id for g in again.unscored([0, 1, 2, 3])] == [1]
    assert again.batches(0) is None
    score(again, 1, MIXED)
    assert again.batches(0) is not None


def test_greedy_completions_outlive_the_process_and_are_trained_in_no_step(tmp_path: Path) -> None:
    replay = ReplayConfig(max_staleness=1, refill_attempts=3)

    def reopen() -> ReplayStore:
        return open_store(tmp_path, advantage="remax", replay=replay)

    store = reopen()
    admit(store, 0, 1, 2)
    for group_id in (0, 1, 2):
        made = group(group_id, [0.0, 0.0, 0.0], scored=False)
        made.rollouts[-1].is_greedy = True
        store.generated([made])
    store = reopen()
    (found,) = store.unscored([1])
    assert [rollout.is_greedy for rollout in found] == [False, False, True]
    assert score(store, 0, [1.0, 1.0, 0.5]).discarded == {}, "the greedy completion makes the difference"
    assert score(store, 1, [1.0, 1.0, 1.0]).discarded.keys() == {1}
    score(store, 2, [1.0, 0.0, 0.0])
    results = []
    for _ in range(2):
        batches = store.batches(0)
        assert batches is not None
        micros = batches[0].mini_batches[0].micro_batches
        results.append(sorted(float(value) for micro in micros for value in micro.advantages[micro.loss_mask]))
        assert batches[0].metrics["reward/greedy"] == 0.25
        assert (batches[0].metrics["groups/discarded"], batches[0].metrics["groups/failed"]) == (1, 0)
        store = reopen()
    assert results == [[0.5] * 6 + [1.0] * 3] * 2, "an advantage of 0 is skipped, and no greedy token is there"


# Rollouts without gradient --------------------------------------------------------------------------------------------


def test_groups_without_advantage_are_skipped_and_counted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    admit(store, 0, 1)
    bring(store, 0, MIXED)
    bring(store, 1, FLAT)
    batches = store.batches(0)
    assert trained_groups(batches) == 1
    assert metric(batches, "groups/skipped") == 1
    assert batches is not None
    mini = batches[0].mini_batches[0]
    assert (mini.num_loss_tokens, mini.num_sequences) == (12, 4), "the denominators know them"
    assert store.ledger.rows("SELECT count(*) FROM groups WHERE step = 0") == [(2,)], "they count as trained"


def test_a_step_without_any_advantage_has_nothing_to_do(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    admit(store, 0, 1)
    bring(store, 0, FLAT)
    bring(store, 1, FLAT)
    batches = store.batches(0)
    assert batches is not None
    assert [mini.micro_batches for mini in batches[0].mini_batches] == [[]]


@pytest.mark.parametrize(
    ("loss", "replay"),
    [
        (LossConfig(beta=0.1), ReplayConfig()),
        (LossConfig(entropy_coef=0.1), ReplayConfig()),
        (LossConfig(entropy_target=1.0), ReplayConfig()),
        (LossConfig(name="dro"), ReplayConfig()),
        (LossConfig(name="m2po"), ReplayConfig()),
        (LossConfig(path="mine.py:loss"), ReplayConfig()),
        (LossConfig(top_entropy_quantile=0.2), ReplayConfig()),
        (LossConfig(), ReplayConfig(skip_zero_advantage=False)),
    ],
)
def test_groups_that_have_a_gradient_all_the_same_are_trained(loss: LossConfig, replay: ReplayConfig) -> None:
    batches = assemble_step(
        [group(0, list(FLAT)), group(1, list(MIXED))],
        step=0,
        algorithm=AlgorithmConfig(loss=loss),
        learner=LearnerConfig(max_tokens_per_microbatch=64),
        reward_weights={REWARD: 1.0},
        seed=0,
        skip_zero_advantage=replay.skip_zero_advantage,
    )
    assert trained_groups(batches) == 2


def test_the_last_comparison_leaves_nothing_out(tmp_path: Path) -> None:
    store = open_store(tmp_path, num_steps=1)
    admit(store, 0, 1)
    bring(store, 0, MIXED)
    bring(store, 1, FLAT)
    assert trained_groups(store.batches(1)) == 2


def test_every_rank_still_has_the_same_number_of_micro_batches() -> None:
    rollouts = [rollout for index in range(6) for rollout in group(index, list(FLAT if index else MIXED))]
    for rollout in rollouts:
        rollout.advantages = np.full(len(rollout.token_ids), 0.0 if rollout.group_id else 1.0, np.float32)
    batches = pack_step(rollouts, step=0, num_ranks=3, max_tokens=16, skip_zero_advantage=True)
    counts = {len(batch.mini_batches[0].micro_batches) for batch in batches}
    assert len(counts) == 1
    assert sum(int(m.loss_mask.sum()) for b in batches for m in b.mini_batches[0].micro_batches) == 6


# Refill ---------------------------------------------------------------------------------------------------------------


def test_groups_without_variance_are_replaced_a_bounded_number_of_times(tmp_path: Path) -> None:
    store = open_store(tmp_path, replay=ReplayConfig(max_staleness=1, refill_attempts=2))
    admit(store, 0)
    outcome = bring(store, 0, FLAT)
    assert (list(outcome.discarded), outcome.attempts) == ([0], [1])
    admit(store, 1, attempt=1)
    outcome = bring(store, 1, FLAT)
    assert (list(outcome.discarded), outcome.attempts) == ([1], [2])
    admit(store, 2, attempt=2)
    assert not bring(store, 2, FLAT).discarded, "after that, the group is taken as it is"
    assert store.ledger.rows("SELECT reason FROM groups WHERE state = 'DISCARDED'") == [
        ("no reward variance (attempt 1)",),
        ("no reward variance (attempt 2)",),
    ]
    admit(store, 3)
    assert not bring(store, 3, MIXED).discarded
    assert metric(store.batches(0), "groups/refilled") == 1


def test_an_attempt_that_a_crash_left_open_is_known(tmp_path: Path) -> None:
    replay = ReplayConfig(max_staleness=1, refill_attempts=2)
    store = open_store(tmp_path, replay=replay)
    admit(store, 0, 1)
    bring(store, 0, FLAT)
    bring(store, 1, FLAT)
    admit(store, 2, attempt=1)
    assert open_store(tmp_path, replay=replay).resume_state([]).attempts == [1]


# Replay of groups with signal -----------------------------------------------------------------------------------------


def run_step(store: ReplayStore, step: int, rewards: dict[int, list[float]]) -> list[TrainBatch] | None:
    admit(store, *rewards, version=step)
    for group_id, values in rewards.items():
        bring(store, group_id, list(values), version=step)
    return store.batches(step)


def test_kept_groups_take_the_place_of_groups_without_signal(tmp_path: Path) -> None:
    replay = ReplayConfig(reuse_groups=2)
    store = open_store(tmp_path, replay=replay)
    assert metric(run_step(store, 0, {0: MIXED, 1: MIXED}), "groups/replayed") == 0
    batches = run_step(store, 1, {2: FLAT, 3: MIXED})
    assert metric(batches, "groups/replayed") == 1
    assert trained_groups(batches) == 2, "group 3, and one of the first step"
    assert batches is not None
    assert batches[0].mini_batches[0].num_sequences == 4, "the group that is replaced is in no denominator"
    assert metric(batches, "frac_reward_zero_std") == 0.5, "but in the metrics of rewards"
    assert metric(batches, "staleness/max") == 0, "which is that of fresh groups"
    assert store.ledger.rows("SELECT * FROM replays") == [(1, 1)], "the newest first"
    assert store.ledger.rows("SELECT state, count(*) FROM groups GROUP BY state") == [("ASSIGNED", 4)]


def test_the_groups_after_the_last_step_are_all_compared(tmp_path: Path) -> None:
    store = open_store(tmp_path, replay=ReplayConfig(reuse_groups=2), num_steps=2)
    run_step(store, 0, {0: MIXED, 1: MIXED})
    assert metric(run_step(store, 1, {2: MIXED, 3: FLAT}), "groups/replayed") == 1
    batches = run_step(store, 2, {4: FLAT, 5: FLAT})
    assert metric(batches, "groups/replayed") == 0, "older groups would show how far the policy has moved"


def test_a_group_is_replayed_once_and_the_oldest_are_forgotten(tmp_path: Path) -> None:
    store = open_store(tmp_path, groups_per_step=3, replay=ReplayConfig(reuse_groups=2))
    run_step(store, 0, {0: MIXED, 1: MIXED, 2: MIXED})
    assert metric(run_step(store, 1, {3: FLAT, 4: FLAT, 5: FLAT}), "groups/replayed") == 2
    assert metric(run_step(store, 2, {6: FLAT, 7: FLAT, 8: FLAT}), "groups/replayed") == 0
    assert store.ledger.rows("SELECT group_id FROM replays ORDER BY 1") == [(1,), (2,)]


POLICIES = """
def oldest(kept, inputs, *, most=10):
    assert [group.group_id for group in inputs.groups] == [2, 3], "the fresh groups"
    return kept[: min(most, inputs.num_wanted)]

def all_of(kept, inputs):
    return kept

def twice(kept, inputs):
    return [kept[0], kept[0]]

def fresh(kept, inputs):
    return inputs.groups[:1]

def ids(kept, inputs):
    return [group.group_id for group in kept]

def raising(kept, inputs):
    return kept[99]
"""


@pytest.mark.parametrize(("name", "first"), [("newest", 1), ("most_spread", 0)])
def test_the_built_in_policies_choose_by_age_or_by_the_spread_of_rewards(tmp_path: Path, name: str, first: int) -> None:
    store = open_store(tmp_path, replay=ReplayConfig(reuse_groups=3), policy=ReplayPolicyConfig(name=name))
    run_step(store, 0, {0: [0.0, 5.0], 1: MIXED})
    run_step(store, 1, {2: MIXED, 3: FLAT})
    run_step(store, 2, {4: FLAT, 5: MIXED})
    replayed = store.ledger.rows("SELECT group_id, step FROM replays ORDER BY step")
    assert replayed == [(first, 1), (2, 2)], "of equal spreads the newer"


def replay_by(folder: Path, name: str, **kwargs: Any) -> ReplayStore:
    (folder / "policies.py").write_text(POLICIES)
    policy = ReplayPolicyConfig(path=f"{folder}/policies.py:{name}", kwargs=kwargs)
    store = open_store(folder, replay=ReplayConfig(reuse_groups=2), policy=policy)
    run_step(store, 0, {0: MIXED, 1: MIXED})
    return store


def test_an_own_policy_chooses_the_groups_that_are_replayed(tmp_path: Path) -> None:
    store = replay_by(tmp_path, "oldest")
    assert metric(run_step(store, 1, {2: FLAT, 3: MIXED}), "groups/replayed") == 1
    assert store.ledger.rows("SELECT * FROM replays") == [(0, 1)]
    assert store._kept.ids == [1, 3], "a replayed group is not kept any longer"


def test_an_own_policy_may_choose_none(tmp_path: Path) -> None:
    store = replay_by(tmp_path, "oldest", most=0)
    assert metric(run_step(store, 1, {2: FLAT, 3: MIXED}), "groups/replayed") == 0
    assert store._kept.ids == [1, 3], "the newest two"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("all_of", "returned 2 groups, and inputs.num_wanted is 1"),
        ("twice", "returned the groups [0, 0], which are not different ones of the kept groups"),
        ("fresh", "returned the groups [2], which are not different ones of the kept groups"),
        ("ids", "returned [0, 1], not a list of kept groups"),
        ("raising", "raised IndexError: list index out of range (policies.py, line 19)"),
    ],
)
def test_problems_of_an_own_policy_are_one_line(tmp_path: Path, name: str, problem: str) -> None:
    store = replay_by(tmp_path, name)
    with pytest.raises(RunError) as error:
        run_step(store, 1, {2: FLAT, 3: MIXED})
    fix = "; fix the function, or set algorithm.replay.path=null"
    assert str(error.value) == f"algorithm.replay.path: {tmp_path}/policies.py:{name} {problem}{fix}"


def test_after_a_restart_the_newest_groups_with_signal_are_kept(tmp_path: Path) -> None:
    replay = ReplayConfig(reuse_groups=1)
    store = open_store(tmp_path, replay=replay)
    run_step(store, 0, {0: MIXED, 1: FLAT})
    run_step(store, 1, {2: FLAT, 3: FLAT})
    run_step(store, 2, {4: MIXED, 5: FLAT})
    store = open_store(tmp_path, replay=replay)
    run_step(store, 3, {6: FLAT, 7: FLAT})
    assert store.ledger.rows("SELECT group_id, step FROM replays ORDER BY step") == [(0, 1), (4, 3)]


@pytest.mark.parametrize("reopened", [False, True])
def test_a_group_that_was_crowded_out_does_not_come_back_with_a_restart(tmp_path: Path, reopened: bool) -> None:
    replay = ReplayConfig(reuse_groups=2)

    def reopen() -> ReplayStore:
        return open_store(tmp_path, groups_per_step=1, replay=replay)

    store = reopen()
    for step in range(3):
        run_step(store, step, {step: MIXED})  # the third crowds out the first
    run_step(store, 3, {3: FLAT})
    store = reopen() if reopened else store
    for step in range(4, 7):
        run_step(store, step, {step: FLAT})
    assert store.ledger.rows("SELECT group_id, step FROM replays ORDER BY step") == [(2, 3), (1, 4)]


def test_a_step_with_replayed_groups_is_the_same_when_it_is_trained_again(tmp_path: Path) -> None:
    replay = ReplayConfig(reuse_groups=4)
    store = open_store(tmp_path, replay=replay)
    run_step(store, 0, {0: MIXED, 1: [0.0, 1.0]})
    first = run_step(store, 1, {2: FLAT, 3: FLAT})
    second = open_store(tmp_path, replay=replay).batches(1)
    assert first is not None
    assert second is not None
    for one, other in zip(first[0].mini_batches, second[0].mini_batches, strict=True):
        for mine, again in zip(one.micro_batches, other.micro_batches, strict=True):
            np.testing.assert_array_equal(mine.advantages, again.advantages)
            np.testing.assert_array_equal(mine.token_ids, again.token_ids)


def test_completions_of_a_step_that_is_trained_again_are_reported_again(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    run_step(store, 0, {0: MIXED, 1: MIXED})
    store = open_store(tmp_path)
    store.batches(0)
    store.ledger.complete(StepReport(step=0, metrics={"loss": 1.0}))
    (report,) = store.reports(-1)
    assert [sample.group_id for sample in report.samples] == [0]


def test_kept_groups_survive_a_restart_and_the_dropping_of_tokens(tmp_path: Path) -> None:
    replay = ReplayConfig(reuse_groups=1)
    store = open_store(tmp_path, keep_steps=0, replay=replay)
    run_step(store, 0, {0: MIXED, 1: FLAT})
    store.checkpointed(1)
    assert [g.group_id for g in store.ledger.load([0, 1])] == [0]
    store = open_store(tmp_path, keep_steps=0, replay=replay)
    first = run_step(store, 1, {2: FLAT, 3: FLAT})
    assert metric(first, "groups/replayed") == 1
    store = open_store(tmp_path, keep_steps=0, replay=replay)
    assert metric(store.batches(1), "groups/replayed") == 1, "the same when the step is trained again"


# Deferred re-roll -----------------------------------------------------------------------------------------------------


def test_prompts_that_earned_nothing_are_named(tmp_path: Path) -> None:
    replay = ReplayConfig(max_staleness=1, reroll_after=0.25)
    store = open_store(tmp_path, replay=replay)
    admit(store, 0, 1, 2)
    assert [g.group_id for g in bring(store, 0, [0.0, -1.0, None]).zero_reward] == [0]
    assert not bring(store, 1, [0.0, 0.1]).zero_reward
    assert not bring(store, 2, [None, None]).zero_reward, "who knows"
    assert [g.group_id for g in open_store(tmp_path, replay=replay).resume_state([]).zero_reward] == [0]


def test_prompts_that_earned_nothing_are_named_when_their_group_is_refilled(tmp_path: Path) -> None:
    replay = ReplayConfig(max_staleness=1, reroll_after=0.25, refill_attempts=1)
    store = open_store(tmp_path, replay=replay)
    admit(store, 0, 1)
    outcome = bring(store, 0, [0.0, 0.0])
    assert (list(outcome.discarded), outcome.attempts, [g.group_id for g in outcome.zero_reward]) == ([0], [1], [0])
    assert not bring(store, 1, [1.0, 1.0]).zero_reward
    assert [g.group_id for g in open_store(tmp_path, replay=replay).resume_state([]).zero_reward] == [0]


def test_a_prompt_that_was_put_back_and_failed_is_named_again(tmp_path: Path) -> None:
    replay = ReplayConfig(max_staleness=1, reroll_after=0.25)
    store = open_store(tmp_path, replay=replay)
    admit(store, 0)
    (earned_nothing,) = bring(store, 0, [0.0, 0.0]).zero_reward
    again = replace(earned_nothing, group_id=1, reroll=1)
    store.admit([again], Cursor(epoch=0, position=1))
    assert not open_store(tmp_path, replay=replay).resume_state([]).zero_reward
    broken = group(1, [1.0], scored=False)
    broken.failure = "the engine refused it"
    first = store.generated([broken])
    assert [(named.position, named.reroll) for named in first.zero_reward] == [(earned_nothing.position, 0)]
    store = open_store(tmp_path, replay=replay)
    assert store.resume_state([]).zero_reward == [earned_nothing]
    assert store.generated([broken]) == first, "the answer was lost with the process"


def test_a_prompt_that_was_put_back_and_could_not_be_scored_is_named_again(tmp_path: Path) -> None:
    replay = ReplayConfig(max_staleness=1, reroll_after=0.25)
    store = open_store(tmp_path, replay=replay)
    admit(store, 0)
    (earned_nothing,) = bring(store, 0, [0.0, 0.0]).zero_reward
    store.admit([replace(earned_nothing, group_id=1, reroll=1)], Cursor(epoch=0, position=1))
    store.generated([group(1, [0.0, 0.0], scored=False)])
    failed = [[GroupScores(group_id=1, failures={REWARD: "it raised"})]]
    first = store.scored([1], failed)
    assert [(named.position, named.reroll) for named in first.zero_reward] == [(earned_nothing.position, 0)]
    assert open_store(tmp_path, replay=replay).scored([1], failed) == first


def test_without_rerolls_nobody_is_named(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    admit(store, 0)
    assert not bring(store, 0, [0.0, 0.0]).zero_reward


# Streaming ------------------------------------------------------------------------------------------------------------


def test_groups_that_were_scored_before_the_last_was_generated_are_counted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    admit(store, 0, 1)
    bring(store, 0, MIXED)
    bring(store, 1, MIXED)
    assert metric(store.batches(0), "groups/streamed") == 1
    admit(store, 2, 3, version=1)
    store.generated([group(index, list(MIXED), version=1, scored=False) for index in (2, 3)])
    both: list[RolloutGroup] = store.unscored([2, 3])
    score(store, 2, MIXED)
    score(store, 3, MIXED)
    assert len(both) == 2
    assert metric(store.batches(1), "groups/streamed") == 0


def test_a_call_that_is_repeated_after_a_death_has_the_same_answer(tmp_path: Path) -> None:
    replay = ReplayConfig(max_staleness=1, refill_attempts=1)
    store = open_store(tmp_path, replay=replay)
    admit(store, 0, 1)
    broken = group(0, [1.0], scored=False)
    broken.failure = "the engine refused it"
    first = store.generated([broken, group(1, [1.0, 1.0], scored=False)])
    assert first.discarded == {0: "the engine refused it"}
    store = open_store(tmp_path, replay=replay)
    assert store.generated([broken, group(1, [1.0, 1.0], scored=False)]) == first
    assert score(store, 0, [1.0, 1.0]).discarded == {}, "a group without tokens was answered for already"
    outcome = score(store, 1, [1.0, 1.0])
    assert outcome.attempts == [1]
    store = open_store(tmp_path, replay=replay)
    assert score(store, 1, [1.0, 1.0]) == outcome


def test_repeated_scores_name_prompts_that_earned_nothing_again(tmp_path: Path) -> None:
    replay = ReplayConfig(max_staleness=1, reroll_after=0.25)
    store = open_store(tmp_path, replay=replay)
    admit(store, 0, 1)
    bring(store, 1, [0.0, 0.0])
    outcome = bring(store, 0, [0.0, -1.0])
    assert [g.group_id for g in outcome.zero_reward] == [0]
    store = open_store(tmp_path, replay=replay)
    assert score(store, 0, [0.0, -1.0]) == outcome


# Failures in a row ----------------------------------------------------------------------------------------------------


def failing(reason: str, *group_ids: int) -> Outcome:
    return Outcome(discarded=dict.fromkeys(group_ids, reason))


def test_a_run_in_which_no_group_succeeds_any_more_is_noticed() -> None:
    failures = FailuresInARow(4)
    assert failures.scored(failing("no judge", *range(7)), range(7)) is None
    assert failures.scored(failing("no judge", *range(10, 17)), range(10, 18)) is None, "one group was scored"
    assert failures.scored(Outcome(), [18]) is None
    assert failures.scored(failing("no judge", *range(20, 26)), range(20, 26)) is None
    assert failures.sampled(Outcome()) is None, "groups that were sampled are not scored yet"
    assert failures.sampled(failing("too long", 30)) is None
    assert failures.scored(failing("no judge", 31), [31]) == "8 groups in a row failed, the last one with: no judge"
    assert failures.sampled(failing("too long", 32)) == "9 groups in a row failed, the last one with: too long"


def test_groups_that_could_not_be_sampled_are_no_success_when_they_pass_the_scorers() -> None:
    failures = FailuresInARow(4)
    for group_id in range(7):
        assert failures.sampled(failing("too long", group_id)) is None
        assert failures.scored(Outcome(), [group_id]) is None
    assert failures.sampled(failing("too long", 7)) == "8 groups in a row failed, the last one with: too long"
    assert failures.scored(failing("too long", 7), [7]) is None, "a repeated call counts it once"


def test_groups_without_reward_variance_are_no_failures() -> None:
    outcome = Outcome(discarded={1: f"{NO_VARIANCE} (attempt 1)", 2: "no judge"})
    assert outcome.failures == {2: "no judge"}


def test_generated_groups_are_discarded_once_and_the_answer_is_repeated(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    admit(store, 0, 1)
    store.generated([group(0, list(MIXED), scored=False), group(1, list(MIXED), scored=False)])
    outcome = store.discard({1: "its row has changed"})
    assert outcome.discarded == {1: "its row has changed"}
    assert [kept.group_id for kept in store.unscored([0, 1])] == [0]
    store = open_store(tmp_path)
    assert store.discard({1: "its row has changed"}) == outcome
    assert store.ledger.counts() == {GroupState.GENERATED: 1, GroupState.DISCARDED: 1}

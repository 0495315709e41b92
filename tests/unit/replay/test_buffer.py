"""Admission and buffer: staleness is bounded in any order of finished groups, and nothing waits forever."""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.replay.buffer import Admission, GroupTicket, ReplayBuffer
from rlpipe.types import Prompt, RolloutGroup

PROMPT = Prompt(prompt_id=0, epoch=0, token_ids=np.zeros(1, np.int32), prompt="", task={})


def group(group_id: int) -> RolloutGroup:
    return RolloutGroup(group_id=group_id, prompt=PROMPT, rollouts=[])


def admitted(group_id: int, version: int) -> GroupTicket:
    return GroupTicket(group_id=group_id, version=version, epoch=0, position=group_id, prompt_id=group_id)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 3), st.integers(1, 4))
def test_staleness_is_bounded_whatever_order_groups_finish_in(
    seed: int, max_staleness: int, groups_per_step: int
) -> None:
    random, num_steps = Random(seed), 8
    admission = Admission(groups_per_step=groups_per_step, max_staleness=max_staleness, num_steps=num_steps)
    buffer = ReplayBuffer(groups_per_step=groups_per_step, max_staleness=max_staleness)
    flying: dict[int, int] = {}
    versions: dict[int, int] = {}
    next_id = step = 0
    while step < num_steps:
        while admission.capacity:
            admission.admit(1)
            buffer.admit([admitted(next_id, admission.version)])
            flying[next_id] = versions[next_id] = admission.version
            next_id += 1
        assert len(buffer.pending) <= (max_staleness + 1) * groups_per_step
        taken = buffer.take(step)
        if taken is None:
            assert flying, "a step waits although nothing is in flight"
            finished = random.choice(sorted(flying))
            del flying[finished]
            if random.random() < 0.1:
                buffer.discard(finished)
                admission.discard(1)
            else:
                buffer.add(group(finished))
            continue
        assert len(taken) == groups_per_step
        assert all(0 <= step - versions[g.group_id] <= max_staleness for g in taken)
        step += 1
        admission.publish(step)
    assert not buffer.pending


def test_synchronous_training_admits_one_step_at_a_time() -> None:
    admission = Admission(groups_per_step=4, max_staleness=0, num_steps=2)
    assert admission.capacity == 4
    admission.admit(4)
    assert admission.capacity == 0
    admission.publish(1)
    assert admission.capacity == 4
    admission.admit(4)
    admission.publish(2)
    assert admission.capacity == 0, "the run has no further step"


def test_a_resumed_run_admits_from_its_first_step() -> None:
    admission = Admission(groups_per_step=4, max_staleness=1, num_steps=10, first_step=5)
    assert (admission.version, admission.capacity) == (5, 8)


def test_a_version_that_is_reported_late_takes_no_slot_back() -> None:
    admission = Admission(groups_per_step=4, max_staleness=0, num_steps=10)
    admission.publish(2)
    admission.publish(1)
    assert (admission.version, admission.capacity) == (2, 12)


def test_a_step_waits_for_the_group_that_is_due() -> None:
    buffer = ReplayBuffer(groups_per_step=1, max_staleness=1)
    buffer.admit([admitted(0, 0), admitted(1, 0)])
    buffer.add(group(1))
    assert [g.group_id for g in buffer.take(0) or []] == [1]
    buffer.admit([admitted(2, 1)])
    buffer.add(group(2))
    assert buffer.take(1) is None, "group 0 is due in step 1"
    buffer.add(group(0))
    assert [g.group_id for g in buffer.take(1) or []] == [0]
    assert [g.group_id for g in buffer.take(2) or []] == [2]


def test_unknown_and_repeated_groups_are_refused() -> None:
    buffer = ReplayBuffer(groups_per_step=1, max_staleness=0)
    with pytest.raises(ValueError, match="not admitted"):
        buffer.add(group(3))
    buffer.admit([admitted(3, 0)])
    buffer.add(group(3))
    with pytest.raises(ValueError, match="already"):
        buffer.add(group(3))


def test_admission_beyond_the_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="5 groups were to be admitted, but the capacity is 4"):
        Admission(groups_per_step=4, max_staleness=0, num_steps=1).admit(5)


def taken_by_the_rule(
    groups: list[GroupTicket], scored: set[int], *, step: int, groups_per_step: int, max_staleness: int
) -> list[int] | None:
    """Return the ids that a step takes: scored groups of the oldest versions, if all others can still be in time."""
    urgency = {entry.group_id: (entry.version, entry.group_id) for entry in groups}
    chosen = sorted(scored, key=urgency.__getitem__)[:groups_per_step]
    versions = sorted(entry.version for entry in groups if entry.group_id not in chosen)
    in_time = all(
        count <= (version + max_staleness - step) * groups_per_step for count, version in enumerate(versions, start=1)
    )
    return sorted(chosen) if len(chosen) == groups_per_step and in_time else None


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(0, 4))
def test_a_step_takes_what_the_rule_says_of_every_group(seed: int, groups_per_step: int, max_staleness: int) -> None:
    random = Random(seed)
    buffer = ReplayBuffer(groups_per_step=groups_per_step, max_staleness=max_staleness)
    scored: set[int] = set()
    next_id = step = 0
    for _ in range(60):
        flying = [entry.group_id for entry in buffer.pending if entry.group_id not in scored]
        match random.choice(["admit", "add", "add", "discard", "take", "step"]):
            case "admit":
                new = [admitted(next_id + offset, random.randint(0, step)) for offset in range(random.randint(0, 4))]
                buffer.admit(new)
                next_id += len(new)
            case "add" if flying:
                finished = random.choice(flying)
                buffer.add(group(finished))
                scored.add(finished)
            case "discard" if next_id:
                gone = random.randrange(next_id)
                buffer.discard(gone)
                scored.discard(gone)
            case "step":
                step += 1
            case _:
                expected = taken_by_the_rule(
                    buffer.pending, scored, step=step, groups_per_step=groups_per_step, max_staleness=max_staleness
                )
                taken = buffer.take(step)
                assert (None if taken is None else [entry.group_id for entry in taken]) == expected
                scored -= set(expected or [])
        assert buffer.num_scored == len(scored)

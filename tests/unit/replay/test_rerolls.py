"""Tests that prompts to re-roll come back late, in order, and not all at once."""

from replay_cases import admitted

from rlpipe.replay.buffer import Rerolls


def ids(rerolls: Rerolls, version: int, at_most: int = 9) -> list[int]:
    return [group.group_id for group in rerolls.take(version, at_most)]


def test_prompts_come_back_once_a_share_of_the_run_is_over() -> None:
    rerolls = Rerolls(first_version=5, per_step=3)
    rerolls.add(admitted(7, version=2))
    assert ids(rerolls, 4) == []
    assert ids(rerolls, 5) == [7]
    assert ids(rerolls, 6) == []
    rerolls.add(admitted(8, version=6))
    assert ids(rerolls, 6) == [], "the policy is still the same"
    assert ids(rerolls, 7) == [8]


def test_a_version_of_several_steps_brings_back_the_prompts_of_them_all() -> None:
    rerolls = Rerolls(first_version=0, per_step=1)
    for group_id in range(9):
        rerolls.add(admitted(group_id))
    assert ids(rerolls, 8) == [0], "a resumed run does not know how many steps its first version has had"
    assert ids(rerolls, 12) == [1, 2, 3, 4]
    assert ids(rerolls, 12) == []


def test_at_most_so_many_come_back_in_a_step() -> None:
    rerolls = Rerolls(first_version=0, per_step=2)
    for group_id in range(5):
        rerolls.add(admitted(group_id))
    assert ids(rerolls, 1, at_most=1) == [0]
    assert ids(rerolls, 1) == [1]
    assert ids(rerolls, 1) == []
    assert ids(rerolls, 2) == [2, 3]
    assert len(rerolls) == 1

"""Tests that turns are found at their markers, whatever else the tokens contain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rlpipe.data.masks.boundaries import LossMask, RoleBoundary, find_turns

USER = RoleBoundary(role="user", start=(1, 2), end=(9,))
ASSISTANT = RoleBoundary(role="assistant", start=(1, 3), end=(9,))


def places(token_ids: list[int], *boundaries: RoleBoundary) -> list[tuple[str, int, int, int, int]]:
    return [(turn.boundary.role, *turn[1:]) for turn in find_turns(np.array(token_ids, np.int32), boundaries)]


def test_each_turn_has_its_markers_and_content() -> None:
    assert places([1, 2, 50, 9, 0, 1, 3, 60, 61, 9], USER, ASSISTANT) == [
        ("user", 0, 2, 3, 4),
        ("assistant", 5, 7, 9, 10),
    ]


def test_turns_of_one_role_in_a_row_stay_apart() -> None:
    assert [turn[1:3] for turn in places([1, 3, 50, 9, 1, 3, 9, 1, 3, 51, 9], ASSISTANT)] == [(0, 2), (4, 6), (7, 9)]


def test_the_longest_start_counts_in_any_order_of_the_boundaries() -> None:
    short = RoleBoundary(role="tool", start=(1,), end=(9,))
    for boundaries in [(short, ASSISTANT), (ASSISTANT, short)]:
        assert [turn[0] for turn in places([1, 3, 50, 9, 1, 4, 9], *boundaries)] == ["assistant", "tool"]


def test_of_equal_starts_the_last_one_counts() -> None:
    other = RoleBoundary(role="tool", start=(1, 3), end=(8,))
    assert places([1, 3, 9, 8], ASSISTANT, other) == [("tool", 0, 2, 3, 4)]


def test_an_end_that_does_not_belong_to_its_turn_starts_the_next() -> None:
    user = RoleBoundary(role="user", start=(1,), end=(2,), include_end=False)
    assistant = RoleBoundary(role="assistant", start=(2,), end=(9,))
    assert places([1, 50, 2, 60, 9, 1, 51, 2, 61, 9], user, assistant) == [
        ("user", 0, 1, 2, 3),
        ("assistant", 2, 3, 4, 5),
        ("user", 5, 6, 7, 8),
        ("assistant", 7, 8, 9, 10),
    ]


def test_an_end_that_belongs_to_its_turn_starts_none() -> None:
    user = RoleBoundary(role="user", start=(1,), end=(2,))
    assistant = RoleBoundary(role="assistant", start=(2,), end=(9,))
    assert [turn[0] for turn in places([1, 50, 2, 60, 9], user, assistant)] == ["user"]


def test_markers_within_a_turn_start_none() -> None:
    assert [turn[0] for turn in places([1, 3, 1, 2, 50, 9, 9], USER, ASSISTANT)] == ["assistant"]


@pytest.mark.parametrize("rest", [[], [60], [60, 1], [60, 1, 2]])
def test_a_turn_that_is_cut_off_goes_to_the_end(rest: list[int]) -> None:
    length = 2 + len(rest)
    assert places([1, 3, *rest], USER, ASSISTANT) == [("assistant", 0, 2, length, length)]


def test_a_turn_without_end_marker_goes_to_the_end() -> None:
    endless = RoleBoundary(role="assistant", start=(1, 3), end=None)
    assert places([1, 2, 9, 1, 3, 60, 9, 1, 2], USER, endless) == [("user", 0, 2, 2, 3), ("assistant", 3, 5, 9, 9)]


def test_markers_longer_than_the_sequence_or_cut_off_by_its_end_are_not_there() -> None:
    long = RoleBoundary(role="user", start=(1,) * 20, end=(9,))
    assert places([1, 2, 3], long) == []
    assert places([7, 1], USER) == []
    assert places([], USER) == []


def test_an_end_of_several_tokens_is_found_whole() -> None:
    boundary = RoleBoundary(role="assistant", start=(1,), end=(8, 9))
    assert places([1, 8, 8, 9, 9], boundary) == [("assistant", 0, 1, 2, 4)]


# Turns within others --------------------------------------------------------------------------------------------------

RESULT = RoleBoundary(role="tool", start=(7,), end=(8,), interrupts=True)


def test_a_turn_continues_after_one_that_interrupts_it() -> None:
    """Check that the interrupting turn's start ends the first part of the outer turn."""
    assert places([1, 3, 60, 7, 70, 8, 61, 9, 1, 2, 50, 9], USER, ASSISTANT, RESULT) == [
        ("assistant", 0, 2, 3, 4),
        ("tool", 3, 4, 5, 6),
        ("assistant", 6, 6, 7, 8),
        ("user", 8, 10, 11, 12),
    ]


def test_turns_that_interrupt_in_a_row_leave_no_part_between_them() -> None:
    assert [turn[:3] for turn in places([1, 3, 60, 7, 8, 7, 70, 8, 9], ASSISTANT, RESULT)] == [
        ("assistant", 0, 2),
        ("tool", 3, 4),
        ("tool", 5, 6),
        ("assistant", 8, 8),
    ]


def test_a_start_right_after_an_interruption_ends_the_interrupted_turn() -> None:
    assert places([1, 3, 60, 7, 70, 8, 1, 2, 50, 9], USER, ASSISTANT, RESULT) == [
        ("assistant", 0, 2, 3, 4),
        ("tool", 3, 4, 5, 6),
        ("user", 6, 8, 9, 10),
    ]


def test_an_interruption_without_end_goes_up_to_that_of_the_interrupted_turn() -> None:
    found = places([1, 3, 60, 7, 1, 2, 50, 9, 1, 3, 61, 9, 8], USER, ASSISTANT, RESULT)
    assert found == [("assistant", 0, 2, 3, 4), ("tool", 3, 4, 7, 7), ("assistant", 8, 10, 11, 12)]
    assert places([1, 3, 60, 7, 70], ASSISTANT, RESULT) == [("assistant", 0, 2, 3, 4), ("tool", 3, 4, 5, 5)]
    assert places([1, 3, 60, 7], ASSISTANT, RESULT) == [("assistant", 0, 2, 3, 4), ("tool", 3, 4, 4, 4)]


def test_what_interrupts_counts_before_an_end_that_begins_within_its_start() -> None:
    longer = replace(RESULT, start=(7, 9))
    assert places([1, 3, 60, 7, 9, 70, 8, 61, 9], ASSISTANT, longer) == [
        ("assistant", 0, 2, 3, 5),
        ("tool", 3, 5, 6, 7),
        ("assistant", 7, 7, 8, 9),
    ]


def test_what_interrupts_may_stand_alone_and_is_not_interrupted() -> None:
    assert places([7, 70, 7, 8, 60, 9], ASSISTANT, RESULT) == [("tool", 0, 1, 3, 4)]


def test_where_a_longer_start_stands_nothing_interrupts() -> None:
    longer = RoleBoundary(role="user", start=(7, 6), end=(9,))
    assert [turn[0] for turn in places([1, 3, 60, 7, 6, 8, 9], ASSISTANT, RESULT, longer)] == ["assistant"]


def test_an_end_that_does_not_belong_to_an_interruption_is_the_next_parts() -> None:
    excluded = replace(RESULT, include_end=False)
    assert places([1, 3, 7, 70, 8, 61, 9], ASSISTANT, excluded) == [
        ("assistant", 0, 2, 2, 3),
        ("tool", 2, 3, 4, 5),
        ("assistant", 4, 4, 6, 7),
    ]


@pytest.mark.parametrize("changed", [{"role": ""}, {"start": ()}, {"end": ()}])
def test_a_boundary_without_role_or_marker_is_refused(changed: dict) -> None:
    with pytest.raises(ValueError, match="needs a role and markers"):
        RoleBoundary(**{"role": "user", "start": (1,), "end": (2,)} | changed)


def test_a_turn_with_several_ends_goes_to_the_first() -> None:
    two = [RoleBoundary(role="a", start=(1,), end=(8,)), RoleBoundary(role="a", start=(1,), end=(9,))]
    assert places([1, 5, 9, 1, 6, 8, 7, 1, 4], *two) == [("a", 0, 1, 2, 3), ("a", 3, 4, 5, 6), ("a", 7, 8, 9, 9)]


def test_a_shared_end_belongs_to_its_turn_and_starts_the_next() -> None:
    boundaries = [
        RoleBoundary(role="user", start=(1,), end=(2,), include_end=False),
        RoleBoundary(role="assistant", start=(2,), end=(1,), shares_end=True),
    ]
    token_ids = [1, 5, 2, 6, 1, 7, 2, 8]
    assert places(token_ids, *boundaries) == [
        ("user", 0, 1, 2, 3), ("assistant", 2, 3, 4, 5), ("user", 4, 5, 6, 7), ("assistant", 6, 7, 8, 8)
    ]  # fmt: skip
    mask = LossMask(boundaries=boundaries).mark(np.array(token_ids, np.int32))
    assert np.flatnonzero(mask).tolist() == [3, 4, 7]


def test_other_tokens_of_a_start_marker_start_a_turn_too() -> None:
    boundary = RoleBoundary(role="a", start=(1, 3), end=(9,), other_starts=((1,), (1, 2, 2)))
    assert places([1, 3, 5, 9, 1, 4, 9, 1, 2, 2, 5, 9], boundary) == [
        ("a", 0, 2, 3, 4), ("a", 4, 5, 6, 7), ("a", 7, 10, 11, 12)
    ]  # fmt: skip

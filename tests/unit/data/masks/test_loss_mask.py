"""Tests that turns are trained by role and end markers by ``train_on_eos``, but never padding or media."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.plain_masks import plain_mask
from rlpipe.data.masks.boundaries import LossMask, RoleBoundary, TrainedEnds

USER, ASSISTANT, END, PAD, IMAGE = 1, 2, 9, 0, 7
CHATML = LossMask(
    boundaries=[
        RoleBoundary(role="user", start=(USER,), end=(END,)),
        RoleBoundary(role="assistant", start=(ASSISTANT,), end=(END,)),
    ],
    media_ids=(IMAGE,),
    pad_id=PAD,
    end_id=END,
)
TURNS = [USER, 50, END, ASSISTANT, 60, 61, END, USER, 51, END, ASSISTANT, 62, END]


def marked(rules: LossMask, token_ids: list[int]) -> list[int]:
    """Return the positions of the trained tokens."""
    return np.flatnonzero(rules.mark(np.array(token_ids, np.int32))).tolist()


@pytest.mark.parametrize(
    ("ends", "counted"),
    [("turn", [4, 5, 6, 11, 12]), ("all", [2, 4, 5, 6, 9, 11, 12]), ("none", [4, 5, 11]), ("last", [4, 5, 11, 12])],
)
def test_end_markers_count_as_told(ends: str, counted: list[int]) -> None:
    assert marked(replace(CHATML, ends=TrainedEnds(ends)), TURNS) == counted


def test_the_last_end_is_that_of_the_last_turn_that_counts() -> None:
    rules = replace(CHATML, ends=TrainedEnds.LAST)
    assert marked(rules, [*TURNS, USER, 52, END]) == [4, 5, 11, 12]
    assert marked(rules, [*TURNS, ASSISTANT, 63]) == [4, 5, 11, 14]


@pytest.mark.parametrize(
    ("roles", "counted"),
    [({"user"}, [1, 2, 8, 9]), ({"user", "assistant"}, [1, 2, 4, 5, 6, 8, 9, 11, 12]), (set(), []), ({"tool"}, [])],
)
def test_roles_count_as_told(roles: set[str], counted: list[int]) -> None:
    assert marked(replace(CHATML, roles=frozenset(roles)), TURNS) == counted


def test_all_end_markers_count_even_if_no_role_does() -> None:
    assert marked(replace(CHATML, roles=frozenset(), ends=TrainedEnds.ALL), TURNS) == [2, 6, 9, 12]


def test_start_markers_count_where_they_belong_to_the_turn() -> None:
    boundaries = [replace(boundary, include_start=True) for boundary in CHATML.boundaries]
    assert marked(replace(CHATML, boundaries=boundaries), TURNS) == [3, 4, 5, 6, 10, 11, 12]


@pytest.mark.parametrize("ends", TrainedEnds)
def test_end_markers_that_do_not_belong_to_their_turn_never_count(ends: TrainedEnds) -> None:
    boundaries = [replace(boundary, include_end=False) for boundary in CHATML.boundaries]
    assert marked(replace(CHATML, boundaries=boundaries, ends=ends), TURNS) == [4, 5, 11]


def test_all_tokens_count_but_padding_and_media() -> None:
    rules = replace(CHATML, counts_all=True, ends=TrainedEnds.NONE)
    assert marked(rules, [*TURNS[:3], IMAGE, 50, PAD, PAD]) == [0, 1, 2, 4]


def test_padding_and_media_within_a_turn_do_not_count() -> None:
    assert marked(CHATML, [ASSISTANT, IMAGE, 60, PAD, 61, PAD, PAD]) == [2, 4]
    assert marked(CHATML, [PAD] * 5) == []


def test_an_end_token_that_pads_too_counts_as_end() -> None:
    rules = replace(CHATML, pad_id=END)
    assert marked(rules, [END, END, ASSISTANT, 60, END, END, END]) == [3, 4]
    endless = replace(rules, boundaries=[RoleBoundary(role="assistant", start=(ASSISTANT,), end=None)])
    assert marked(endless, [END, END, ASSISTANT, 60, END, END, END]) == [3, 4]
    assert marked(replace(rules, counts_all=True), [END, END, USER, 60, END, END, END]) == [2, 3, 4]


def test_a_batch_is_marked_row_by_row() -> None:
    rows = np.array([[ASSISTANT, 60, END, PAD], [USER, 50, ASSISTANT, 61], [PAD, PAD, ASSISTANT, 62]], np.int32)
    assert CHATML.mark(rows).tolist() == [CHATML.mark(row).tolist() for row in rows]
    assert CHATML.mark(rows[:0]).shape == (0, 4)


def test_of_boundaries_with_one_start_all_of_the_last_ones_role_count() -> None:
    first, last = (RoleBoundary(role="assistant", start=(ASSISTANT,), end=end) for end in ((END,), (USER,)))
    between = RoleBoundary(role="user", start=(ASSISTANT,), end=None)
    rules = replace(CHATML, boundaries=[first, between, last])
    assert marked(rules, [ASSISTANT, 60, END, 61, USER]) == [1, 2]
    assert marked(rules, [ASSISTANT, 60, USER, 61, END]) == [1, 2]


MARKERS = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)
BOUNDARIES = st.builds(
    RoleBoundary,
    role=st.sampled_from(["user", "assistant", "tool"]),
    start=MARKERS,
    end=st.none() | MARKERS,
    include_start=st.booleans(),
    include_end=st.booleans(),
    interrupts=st.booleans(),
    shares_end=st.booleans(),
)


def alike(boundaries: list[RoleBoundary]) -> list[RoleBoundary]:
    """Return the boundaries, where those of one role and start all interrupt other turns, or none does."""
    first = {(own.role, own.start): own.interrupts for own in reversed(boundaries)}
    return [replace(own, interrupts=first[own.role, own.start]) for own in boundaries]


RULES = st.builds(
    LossMask,
    boundaries=st.lists(BOUNDARIES, max_size=5).map(alike),
    roles=st.frozensets(st.sampled_from(["user", "assistant", "tool"])),
    ends=st.sampled_from(TrainedEnds),
    counts_all=st.booleans(),
    media_ids=st.lists(st.integers(0, 6), max_size=2),
    pad_id=st.none() | st.integers(0, 6),
    end_id=st.none() | st.integers(0, 6),
)


FEW_TOKENS = given(rules=RULES, token_ids=st.lists(st.integers(0, 6), max_size=40))
"""Sequences of so few different tokens that markers overlap, nest and break off."""


@settings(max_examples=300, deadline=None)
@FEW_TOKENS
def test_masks_equal_those_made_token_by_token(rules: LossMask, token_ids: list[int]) -> None:
    assert rules.mark(np.array(token_ids, np.int32)).tolist() == plain_mask(rules, token_ids)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@FEW_TOKENS
def test_a_thousand_masks_equal_those_made_token_by_token(rules: LossMask, token_ids: list[int]) -> None:
    assert rules.mark(np.array(token_ids, np.int32)).tolist() == plain_mask(rules, token_ids)

"""Tests that each position of a mix alone determines its source, and that sources have the shares of their weights."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rlpipe.data.sources.row_source import Mixture

weights = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=6)


def draws(mixture: Mixture, first: int, count: int) -> list[tuple[int, int]]:
    return [mixture.assign(position) for position in range(first, first + count)]


@settings(deadline=None)
@given(weights=weights, position=st.integers(0, 2000))
def test_seeking_equals_drawing_one_by_one(weights: list[float], position: int) -> None:
    walked = draws(Mixture(weights), 0, position + 5)
    assert draws(Mixture(weights), position, 5) == walked[position:]
    counts = Counter(source for source, _ in walked[:position])
    assert Mixture(weights).counts(position) == [counts[source] for source in range(len(weights))]


@given(weights=weights, far=st.integers(0, 10**12), near=st.integers(0, 2000))
def test_jumps_back_and_forth_leave_no_trace(weights: list[float], far: int, near: int) -> None:
    mixture = Mixture(weights)
    expected = draws(Mixture(weights), far, 3), draws(Mixture(weights), near, 3)
    assert (draws(mixture, far, 3), draws(mixture, near, 3)) == expected
    assert draws(mixture, far, 3) == expected[0]


@given(weights=weights, position=st.integers(0, 10**9))
def test_counts_are_the_shares_of_the_weights(weights: list[float], position: int) -> None:
    counts = Mixture(weights).counts(position)
    assert sum(counts) == position
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - position * weight / sum(weights)) <= len(weights) / 2 + 0.5


@given(weights=weights)
def test_rows_of_a_source_come_one_after_the_other(weights: list[float]) -> None:
    seen: Counter[int] = Counter()
    for source, count in draws(Mixture(weights), 0, 200):
        assert count == seen[source]
        seen[source] += 1


def test_equal_sources_take_turns_and_a_light_one_comes_in_the_middle() -> None:
    assert [source for source, _ in draws(Mixture([1, 1]), 0, 6)] == [0, 1, 0, 1, 0, 1]
    assert [source for source, _ in draws(Mixture([3, 1]), 0, 8)] == [0, 0, 1, 0, 0, 0, 1, 0]

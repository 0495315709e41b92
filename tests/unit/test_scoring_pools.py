"""Groups that are finished together are spread over all processes of a pool, in calls that do not grow too large."""

import pytest

from rlpipe.scoring.pools import MAX_GROUPS_PER_CALL, split_calls


@pytest.mark.parametrize(
    ("num_groups", "size", "calls"),
    [(1, 4, [1]), (4, 4, [1, 1, 1, 1]), (6, 4, [2, 2, 2]), (5, 2, [3, 2]), (7, 1, [7]), (0, 3, [])],
)
def test_groups_are_spread_over_the_pool(num_groups: int, size: int, calls: list[int]) -> None:
    groups = list(range(num_groups))
    split = split_calls(groups, size)
    assert [len(call) for call in split] == calls
    assert [group for call in split for group in call] == groups


def test_a_call_has_a_bound() -> None:
    assert [len(call) for call in split_calls(range(100), 1)] == [MAX_GROUPS_PER_CALL] * 3 + [4]

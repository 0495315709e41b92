"""Tests that the matrix cases that `make test` runs cover every value, or every pair of values."""

from itertools import product

import pytest
from covering import covering, one_in

SHARED = [{"r": 1}, {"r": 2}, {"r": 3}]
CASES = [dict(zip("abc", values, strict=True)) for values in product([1, True, 2], "xy", SHARED)]


@pytest.mark.parametrize(("strength", "most"), [(1, 3), (2, 11), (3, 18)])
def test_all_combinations_are_in_few_cases(strength: int, most: int) -> None:
    chosen = covering(CASES, strength)
    assert len(chosen) <= most
    if strength == 1:
        assert {repr(CASES[index]["a"]) for index in chosen} == {"1", "True", "2"}
        assert {CASES[index]["c"]["r"] for index in chosen} == {1, 2, 3}
    if strength == 2:
        pairs = {(CASES[index]["b"], CASES[index]["c"]["r"]) for index in chosen}
        assert pairs == set(product("xy", [1, 2, 3]))


def test_one_of_several_values_is_not_slow() -> None:
    kept = [value for value in one_in(3, "abcdefg") if isinstance(value, str)]
    others = [value.values for value in one_in(3, "abcdefg") if not isinstance(value, str)]
    assert kept == ["a", "d", "g"]
    assert others == [("b",), ("c",), ("e",), ("f",)]


def test_a_single_parameter_keeps_all_its_values() -> None:
    assert covering([{"a": 1}, {"a": 2}], 2) == {0, 1}

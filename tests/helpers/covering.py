"""Selection of cases: those of a matrix that cover every value, or every pair of values, and one of several values."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = Mapping[str, Any]
"""The value of each parameter."""


def covering(cases: Sequence[Case], strength: int) -> set[int]:
    """Return the indices of cases that cover every combination of ``strength`` values that occurs in any case.

    The selection is greedy: it takes the case with the most combinations that are still missing, the first on a tie.
    """
    combined = [_combinations(case, strength) for case in cases]
    missing = set().union(*combined)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(combined[index] & missing), -index))
        chosen.add(best)
        missing -= combined[best]
    return chosen


def one_in(count: int, values: Iterable[Any]) -> list[Any]:
    """Return the values of one parameter for ``parametrize``: the first of every ``count``, and the others as slow."""
    return [
        pytest.param(value, marks=pytest.mark.slow) if index % count else value for index, value in enumerate(values)
    ]


def _combinations(case: Case, strength: int) -> set[tuple[tuple[str, Hashable], ...]]:
    values = [(name, _key(case[name])) for name in sorted(case)]
    return set(combinations(values, min(strength, len(values))))


def _key(value: Any) -> Hashable:
    """Return a hashable key, which is the identity of dicts and lists, as the cases of a ``parametrize`` share them."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)

"""Chooses cases of a matrix of parameters that together have every value, or every pair of values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

Case = Mapping[str, Any]
"""Each parameter's value."""


def covering(cases: Sequence[Case], strength: int) -> set[int]:
    """Indices of cases in which all combinations of ``strength`` values occur that occur in any.

    Greedy: takes the case with most combinations that are still missing, the first of several.
    """
    combined = [_combinations(case, strength) for case in cases]
    missing = set().union(*combined)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(cases)), key=lambda index: (len(combined[index] & missing), -index))
        chosen.add(best)
        missing -= combined[best]
    return chosen


def _combinations(case: Case, strength: int) -> set[tuple[tuple[str, Hashable], ...]]:
    values = [(name, _key(case[name])) for name in sorted(case)]
    return set(combinations(values, min(strength, len(values))))


def _key(value: Any) -> Hashable:
    """Dicts and lists are told apart as objects: all cases share those of a ``parametrize``."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return (type(value), value)

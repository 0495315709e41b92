"""Selection of cases of a parameter matrix that together cover every value, or every pair of values."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import Any

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

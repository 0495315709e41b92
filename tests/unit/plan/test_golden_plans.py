"""Tests that the plans of twenty configs are still those in their files."""

from __future__ import annotations

import json
from typing import Any

import pytest
from golden_plans import PLANS, golden_file, make_plan

QUICK = ("gsm8k", "ebft_strided")


def differences(found: Any, kept: Any, path: str = "plan") -> list[str]:
    """Return where two JSON values differ, except for the last digits of sums in another order."""
    if isinstance(kept, dict) and isinstance(found, dict) and found.keys() == kept.keys():
        return [line for key in kept for line in differences(found[key], kept[key], f"{path}.{key}")]
    if isinstance(kept, list) and isinstance(found, list) and len(found) == len(kept):
        pairs = enumerate(zip(found, kept, strict=True))
        return [line for index, pair in pairs for line in differences(*pair, f"{path}[{index}]")]
    if isinstance(kept, float) and isinstance(found, float):
        kept = pytest.approx(kept, rel=1e-9)
    return [] if found == kept else [f"{path}: {found!r} instead of {kept!r}"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in PLANS])
def test_a_plan_is_what_it_was(name: str) -> None:
    assert not differences(make_plan(name), json.loads(golden_file(name).read_text()))

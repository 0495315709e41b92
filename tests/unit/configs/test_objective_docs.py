"""Tests that tables of the docs have each objective, with its formula and the paper that it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rlpipe.configs.schema.algorithm_config import AdvantageConfig, CorrectionConfig, LossConfig
from rlpipe.configs.schema.preference_config import PreferenceConfig

DOCS = Path(__file__).parents[3] / "docs"
WITHOUT_PAPER = {"abs", "none"}
NOWHERE_ELSE = {"none", "max_rl", "group_norm", "reinforce"}
"""Objectives that no other library has under a name of its own."""


def rows_of(page: str, header: str) -> dict[str, list[str]]:
    """Return the columns up to the other libraries' of a table, by the names in the last column of ``header``."""
    lines = (DOCS / page).read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(header))
    name, paper, found = header.count("|") - 1, _cells(lines[start]).index("paper"), {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        cells = _cells(line)
        found[cells[name].split("`")[1]] = cells[name + 1 : paper + 2]
    return found


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.replace(r"\|", "").split("|")]


def choices_of(schema: Any, option: str) -> Sequence[str]:
    (found,) = (entry.metadata["choices"] for entry in fields(schema) if entry.name == option)
    assert isinstance(found, tuple)
    return found


@pytest.mark.parametrize(
    ("schema", "option", "page", "header"),
    [
        (AdvantageConfig, "name", "algorithms.md", "| name |"),
        (LossConfig, "name", "algorithms.md", "| name | loss of a token"),
        (LossConfig, "level", "algorithms.md", "| `level` (for `clip`) |"),
        (LossConfig, "kl", "algorithms.md", "| `kl` |"),
        (LossConfig, "aggregate", "algorithms.md", "| `aggregate` |"),
        (CorrectionConfig, "mode", "algorithms.md", "| `mode` |"),
        (PreferenceConfig, "loss", "preferences.md", "| `algorithm=` | `preference.loss` |"),
    ],
)
def test_every_objective_has_a_formula_and_a_paper(schema: Any, option: str, page: str, header: str) -> None:
    names = set(choices_of(schema, option))
    found = rows_of(page, header)
    assert names == found.keys()
    for name, (*formula, paper, libraries) in found.items():
        assert any(formula), name
        assert paper or name in WITHOUT_PAPER, name
        assert libraries or name in NOWHERE_ELSE, name

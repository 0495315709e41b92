"""The parts of a plan's report: rows for people, and the same as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True, frozen=True)
class Section:
    """``rows`` are labels and texts; a label that is empty goes on with the row above."""

    name: str
    """In JSON."""
    title: str
    rows: Sequence[tuple[str, str]]
    data: Mapping[str, Any]
    """Numbers in bytes, seconds and tokens."""


def to_text(sections: Sequence[Section]) -> str:
    """Their rows as columns of one width."""
    width = max(len(label) for section in sections for label, _ in section.rows)
    return "\n\n".join(
        "\n".join([section.title, *(f"  {label:<{width}}  {text}" for label, text in section.rows)])
        for section in sections
    )

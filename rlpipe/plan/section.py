"""The sections of a plan's report: rows of text, and the same as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True, frozen=True)
class Section:
    """A section of a report; ``rows`` are labels and texts, and an empty label continues the row above."""

    name: str
    """Key in the JSON report."""
    title: str
    rows: Sequence[tuple[str, str]]
    data: Mapping[str, Any]
    """Values in bytes, seconds and tokens."""


def to_text(sections: Sequence[Section]) -> str:
    """Return the sections as text, with label columns of one width."""
    width = max(len(label) for section in sections for label, _ in section.rows)
    return "\n\n".join(
        "\n".join([section.title, *(f"  {label:<{width}}  {text}" for label, text in section.rows)])
        for section in sections
    )

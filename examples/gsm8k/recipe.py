"""The data and reward code of the GSM8K example: the row transform, and a reward for the form of the answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]

FINAL_LINE = re.compile(r"\n#### -?\$?\d[\d,]*(\.\d+)?\s*")
"""Form that the system prompt asks for: a last line with four hashes and the number."""


def to_prompt(cfg: Mapping[str, Any]) -> tuple[Callable[[Row], Row], dict[str, list[str]]]:
    """Rename ``question`` to ``prompt`` and keep ``answer``, whose final number the accuracy reads.

    A row without a final number raises ``ValueError``, so that it is skipped and counted instead of failing later, when
    it is scored.
    """

    def rename(row: Row) -> Row:
        if "####" not in row["answer"]:
            raise ValueError("its answer has no final number after ####")
        return {"prompt": row["question"].strip(), "answer": row["answer"]}

    return rename, {"remove_columns": ["question"]}


def final_line(completions: Sequence[list[dict[str, Any]]]) -> list[float]:
    """Return 1 if the completion explains and then ends in one line ``#### number``, as prompted, else 0."""
    return [float(has_final_line(completion[0]["content"])) for completion in completions]


def has_final_line(text: str) -> bool:
    head, separator, tail = text.partition("\n####")
    return bool(head.strip()) and FINAL_LINE.fullmatch(separator + tail) is not None

"""The row transform of the GPU run: a problem and its final answer, from DAPO's data or MATH-500."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]


def to_prompt(cfg: Mapping[str, Any]) -> tuple[Callable[[Row], Row], dict[str, str]]:
    """Make ``prompt`` and ``answer`` from ``prompt`` and ``solution``, the columns of DAPO-Math-17k-Processed.

    Rows with ``problem`` and ``answer``, such as those of MATH-500, get the same columns, for ``data.held_out.path``.
    """

    def rename(row: Row) -> Row:
        if "problem" in row:
            return {"prompt": row["problem"].strip(), "answer": row["answer"]}
        return {"prompt": row["prompt"].strip(), "answer": row["solution"]}

    return rename, {"remove_columns": "__all__"}

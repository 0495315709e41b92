"""The row transform of the GPU run: a problem and its final answer, of DAPO's data or of MATH-500's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]


def to_prompt(cfg: Mapping[str, Any]) -> tuple[Callable[[Row], Row], dict[str, str]]:
    """Makes ``prompt`` and ``answer`` of ``prompt`` and ``solution``, as DAPO-Math-17k-Processed calls them.

    Rows with ``problem`` and ``answer``, such as those of MATH-500, become the same, for ``data.held_out.path``.
    """

    def rename(row: Row) -> Row:
        if "problem" in row:
            return {"prompt": row["problem"].strip(), "answer": row["answer"]}
        return {"prompt": row["prompt"].strip(), "answer": row["solution"]}

    return rename, {"remove_columns": "__all__"}

"""The row transform of the GPU run, for DAPO's data and MATH-500, and the cold start of the small run.

The cold start is supervised training on the column ``worked``, until some of the products are right. A model from the
hub needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import rlpipe
from rlpipe.quickstart import learn_solutions

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


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy and save it at ``config.model.path``; ``model.prepare`` of the example."""
    learn_solutions(config, column="worked")

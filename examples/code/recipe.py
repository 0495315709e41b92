"""The row transform of the GPU run, for tasks of MBPP, and the cold start of the small run.

The cold start is supervised training on the column ``program``, until some of the programs pass. A model from the hub
needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import rlpipe
from rlpipe.quickstart import learn_solutions

Row = dict[str, Any]


def to_prompt(cfg: Mapping[str, Any]) -> tuple[Callable[[Row], Row], dict[str, str]]:
    """Make ``prompt`` from the text and the first test, which names the function, and ``tests`` from all tests.

    One test is shown and three are run, so that returning what the prompt shows is not enough.
    """

    def task(row: Row) -> Row:
        tests = [f"{row['test_setup_code']}\n{test}" for test in row["test_list"]]
        return {"prompt": f"{row['text'].strip()}\nA test: {row['test_list'][0]}", "tests": tests}

    return task, {"remove_columns": "__all__"}


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy and save it at ``config.model.path``; ``model.prepare`` of the example."""
    learn_solutions(config, column="program")

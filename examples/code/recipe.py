"""The row transform of the GPU run: an MBPP task as a prompt, and its tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]


def to_prompt(cfg: Mapping[str, Any]) -> tuple[Callable[[Row], Row], dict[str, str]]:
    """Make ``prompt`` from the text and the first test, which names the function, and ``tests`` from all tests.

    One test is shown and three are run, so that returning what the prompt shows is not enough.
    """

    def task(row: Row) -> Row:
        tests = [f"{row['test_setup_code']}\n{test}" for test in row["test_list"]]
        return {"prompt": f"{row['text'].strip()}\nA test: {row['test_list'][0]}", "tests": tests}

    return task, {"remove_columns": "__all__"}

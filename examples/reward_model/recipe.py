"""The row transform of the GPU run: the prompts of preference data, without the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]


def to_prompt(cfg: Mapping[str, Any]) -> tuple[Callable[[Row], Row], dict[str, str]]:
    """Keep only ``prompt``, since the answers, which no reward reads, would be sent with every group."""

    def prompt_alone(row: Row) -> Row:
        return {"prompt": row["prompt"].strip()}

    return prompt_alone, {"remove_columns": "__all__"}

"""Completions of a step as a table, in the forms that trackers take."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpipe.common.formatting import storable

COMPLETIONS = "completions"
"""Name of the table in every tracker."""
BEFORE, AFTER = ("step", "prompt", "completion", "reward"), ("advantage", "tokens", "status")
"""Columns of every table, before and after those of the reward functions."""
MAX_CELL_CHARS = 2000
"""Characters of a text in Markdown; the other forms have all of it."""


@dataclass(kw_only=True, frozen=True)
class CompletionTable:
    """Rows of ``completions.jsonl`` of one step, in columns that all of them have.

    A reward function has a column of its name; if another column has that name, ``rewards/`` comes before it.
    """

    step: int
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    @classmethod
    def of(cls, step: int, rows: Sequence[Mapping[str, Any]]) -> CompletionTable:
        rewards = list(dict.fromkeys(name for row in rows for name in row["rewards"] or {}))
        columns = [*BEFORE, *_reward_columns(rewards), *AFTER]
        cells = [
            [
                step,
                storable(_prompt_text(row["prompt"])),
                storable(row["completion"]),
                row["reward"],
                *((row["rewards"] or {}).get(name) for name in rewards),
                row["advantage"],
                row["num_tokens"],
                row["status"],
            ]
            for row in rows
        ]
        return cls(step=step, columns=columns, rows=cells)

    def to_columns(self) -> dict[str, list[Any]]:
        """Return the values of each column, by its name."""
        return {name: [row[index] for row in self.rows] for index, name in enumerate(self.columns)}

    def to_markdown(self) -> str:
        """Return a table of Markdown, in which texts can't become markup, whatever a model wrote."""
        lines = [[_escape(name) for name in self.columns], ["---"] * len(self.columns)]
        lines += [[_escape(_show(value)) for value in row] for row in self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _reward_columns(names: Sequence[str]) -> list[str]:
    columns, used = [], {*BEFORE, *AFTER, *names}
    for name in names:
        column = name
        while column in BEFORE + AFTER or (column != name and column in used):
            column = f"rewards/{column}"
        used.add(column)
        columns.append(column)
    return columns


def _prompt_text(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return a prompt as one text; the messages of a conversation have their roles before them."""
    if isinstance(prompt, str):
        return prompt
    return "\n".join(f"{message.get('role')}: {message.get('content')}" for message in prompt)


def _show(value: Any) -> str:
    return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _escape(text: str) -> str:
    """Return a text as entities of HTML, which Markdown and HTML both show as they are."""
    shown = text if len(text) <= MAX_CELL_CHARS else f"{text[:MAX_CELL_CHARS]}…"
    escaped = html.escape(shown).replace("\n", "<br>")
    return "".join(f"&#{ord(char)};" if char in "|*_`[]()#~\\!" else char for char in escaped)

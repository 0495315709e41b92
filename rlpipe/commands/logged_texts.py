"""Texts of groups whose tokens the ledger has dropped, from ``completions.jsonl`` beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlpipe.replay.ledger.query import GroupRow
from rlpipe.tracking.jsonl import rows_of_step

COMPLETIONS = "completions.jsonl"
FOLDERS_UP = 3
"""Levels from a checkpoint's ledger up to the run's folder, and one more."""


class LoggedTexts:
    """Reader of the logged rollouts of a run, given its folder, a checkpoint or a ledger."""

    def __init__(self, run: Path) -> None:
        folders = [run.absolute(), *run.absolute().parents[:FOLDERS_UP]]
        self._file = next((file for folder in folders if (file := folder / COMPLETIONS).is_file()), None)
        self._steps: dict[int, list[dict[str, Any]]] = {}

    def rollouts(self, row: GroupRow) -> list[dict[str, Any]]:
        """Return the logged rollouts of a group, in their order; empty if its step has logged others."""
        if self._file is None or row.step is None:
            return []
        step = row.step + 1  # the log counts steps from 1
        if step not in self._steps:
            self._steps = {step: rows_of_step(self._file, step)}
        return [rollout for rollout in self._steps[step] if rollout.get("group_id") == row.group_id]

    def with_prompts(self, rows: Sequence[GroupRow]) -> list[GroupRow]:
        """Return the rows, those whose tokens are dropped with their logged prompts."""
        dropped = {row.group_id: row for row in rows if row.is_dropped}
        by_step = sorted(dropped.values(), key=lambda row: row.step or 0)  # a step is read once
        prompts = {row.group_id: logged[0].get("prompt") for row in by_step if (logged := self.rollouts(row))}
        return [replace(row, prompt=prompts[row.group_id]) if row.group_id in prompts else row for row in rows]

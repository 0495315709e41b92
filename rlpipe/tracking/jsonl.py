"""Metrics and completions as lines of JSON."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any, BinaryIO

from rlpipe.common import run_files
from rlpipe.common.formatting import printable
from rlpipe.data.render.messages import content_text
from rlpipe.replay.ledger.query import GroupRow
from rlpipe.scoring.rewards import Tokenizer, decode_completions
from rlpipe.tracking.completion_table import CompletionTable
from rlpipe.types import Rollout, RolloutGroup

logger = logging.getLogger(__name__)
MAX_HELD_OUT = 100
"""Held-out prompts whose answers are logged, the same ones at each evaluation."""
FOLDERS_UP = 3
"""Levels from a checkpoint's ledger up to the run's folder, and one more."""


class StepLog:
    """File of lines that carry a ``step``; opening it removes the lines of ``first_step`` and later.

    With a ``repeated`` kind, only lines of that kind are removed.
    A write that fails, on a full disk for example, is undone and reported in a warning; later writes are still tried.
    """

    def __init__(self, path: Path, first_step: int, *, repeated: str | None = None) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _forget_steps(path, first_step, repeated)

    def append(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps({"step": step, **row}, ensure_ascii=False, default=str) + "\n" for row in rows)
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("ab") as file:
                file.write(text.encode(errors="backslashreplace"))  # half an emoji has no UTF-8
        except OSError as error:
            logger.warning("step %d is missing in %s: %s", step, self._path, error)
            with suppress(OSError):
                os.truncate(self._path, size)


def _forget_steps(path: Path, first_step: int, kind: str | None) -> None:
    """Drop the lines of ``first_step`` and later, and lines that were cut off in the middle."""
    with path.open("rb") as lines:  # several gigabytes, where all completions are kept
        if all(_is_kept(line, first_step, kind) for line in lines):
            return
        lines.seek(0)
        temporary = path.with_name(path.name + ".tmp")
        with temporary.open("wb") as target:
            target.writelines(line for line in lines if _is_kept(line, first_step, kind))
    temporary.replace(path)


def _is_kept(line: bytes, first_step: int, kind: str | None) -> bool:
    row = _parse(line) if line.endswith(b"\n") else None
    return row is not None and (row["step"] < first_step or (kind is not None and row.get("kind") != kind))


def _parse(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, or None if the line was cut off."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file, in order; skip lines that were cut off."""
    if not path.exists():
        return
    with path.open("rb") as file:
        yield from _rows_from(file, 0)


def rows_of_step(path: Path, step: int) -> list[dict[str, Any]]:
    """Return the objects of one step of a file whose steps are in order, without reading the steps before it."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        first, last = 0, path.stat().st_size
        while first < last:  # the first line of the step, if there is one, begins between the two
            middle = (first + last) // 2
            row = next(_rows_from(file, middle), None)
            if row is None or row["step"] >= step:
                last = middle
            else:
                first = middle + 1
        return list(takewhile(lambda row: row["step"] == step, _rows_from(file, first)))


def _rows_from(file: BinaryIO, offset: int) -> Iterator[dict[str, Any]]:
    """Yield the objects of the whole lines that begin at an offset or after it."""
    file.seek(max(offset - 1, 0))
    if offset:
        file.readline()
    for line in file:
        if (row := _parse(line)) is not None:
            yield row


def rows_after(path: Path, offset: int, limit: int) -> tuple[list[dict[str, Any]], int]:
    """Return up to ``limit`` objects of the whole lines after an offset, and the offset of what follows them."""
    rows: list[dict[str, Any]] = []
    with path.open("rb") as file:
        file.seek(offset)
        while len(rows) < limit and (line := file.readline()).endswith(b"\n"):
            offset += len(line)
            if (row := _parse(line)) is not None:
                rows.append(row)
    return rows, offset


def num_steps_logged(path: Path, num_steps: int) -> int:
    """Return the newest of the first ``num_steps`` steps that has a line with a loss, or ``num_steps`` if none has."""
    return max(
        (row["step"] for row in read_rows(path) if "loss" in row and row["step"] <= num_steps), default=num_steps
    )


class JsonlTracker:
    """Tracker that appends ``step``, ``time`` (seconds since 1970) and the metrics; NaN and infinity become null."""

    def __init__(self, path: Path, first_step: int) -> None:
        self._log = StepLog(path, first_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = {name: float(value) if math.isfinite(value) else None for name, value in metrics.items()}
        self._log.append(step, [{"time": round(time.time(), 3), **values}])

    def log_completions(self, table: CompletionTable) -> None:
        """Do nothing, because ``CompletionsLog`` has written them."""

    def close(self, *, failed: bool = False) -> None:
        """Do nothing, because every line is in the file already."""


class CompletionsLog:
    """File with the rollouts of each step's first ``num_groups`` groups, one JSON object per rollout.

    Opening it removes ``first_step`` and later steps, as for the metrics.
    """

    def __init__(self, path: Path, *, num_groups: int, tokenizer: Tokenizer, first_step: int) -> None:
        self._num_groups = num_groups
        self._tokenizer = tokenizer
        self._log = StepLog(path, first_step) if num_groups else None

    def log(self, step: int, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        """Write the rollouts of the first groups, and return their rows."""
        if self._log is None or not groups:
            return []
        rows = []
        for group in groups[: self._num_groups]:
            texts = decode_completions(self._tokenizer, group)
            rows += [_describe(group, rollout, text) for rollout, text in zip(group, texts, strict=True)]
        self._log.append(step, rows)
        return rows

    def describe(self, group: RolloutGroup) -> str:
        """Return the group's first rollout as a line that is safe to print, whatever the model wrote."""
        rollout, text = group.rollouts[0], decode_completions(self._tokenizer, group)[0]
        reward = "" if rollout.reward is None else f"  (reward {rollout.reward:.3g})"
        return f"sample: {show_beginning(last_turn(group.prompt.prompt))} -> {show_beginning(text)}{reward}"


def last_turn(prompt: str | Sequence[Mapping[str, Any]]) -> str:
    """Return the prompt, or the text of a conversation's last message, if it has any."""
    return prompt if isinstance(prompt, str) else content_text(prompt[-1].get("content")) if prompt else ""


def show_beginning(text: str, longest: int = 80) -> str:
    """Return the beginning of a text as one line that is safe to print."""
    shown = printable(text[:longest]).replace("\n", "\\n").replace("\t", "\\t")
    return shown[:longest] + ("…" if len(shown) > longest or len(text) > longest else "")


def _describe(group: RolloutGroup, rollout: Rollout, text: str) -> dict[str, Any]:
    return {
        "group_id": rollout.group_id,
        "sample_index": rollout.sample_index,
        "prompt_id": rollout.prompt_id,
        "prompt": group.prompt.prompt,
        "completion": text,
        "rewards": rollout.rewards,
        "reward": rollout.reward,
        "advantage": rollout.mean_advantage,
        **({"is_greedy": True} if rollout.is_greedy else {}),
        "policy_version": rollout.oldest_version,
        "num_tokens": len(rollout.completion_ids),
        "status": rollout.status.value,
        "finish_reason": rollout.finish_reason,
    }


class LoggedTexts:
    """Reader of the logged rollouts of a run, given its folder, a checkpoint or a ledger."""

    def __init__(self, run: Path) -> None:
        folders = [run.absolute(), *run.absolute().parents[:FOLDERS_UP]]
        self._file = next((file for folder in folders if (file := folder / run_files.COMPLETIONS).is_file()), None)
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

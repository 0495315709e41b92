"""Files with one JSON object per line and step: appending whole lines, dropping steps on resume, reading back."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class StepLog:
    """File of lines that carry a ``step``; opening it removes the lines of ``first_step`` and later.

    A write that fails, on a full disk for example, is undone and reported in a warning; later writes are still tried.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _forget_steps(path, first_step)

    def append(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        text = "".join(json.dumps({"step": step, **row}, ensure_ascii=False, default=str) + "\n" for row in rows)
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            with self._path.open("ab") as file:
                file.write(text.encode())
        except OSError as error:
            logger.warning("step %d is missing in %s: %s", step, self._path, error)
            with suppress(OSError):
                os.truncate(self._path, size)


def _forget_steps(path: Path, first_step: int) -> None:
    """Drop the lines of ``first_step`` and later, and lines that were cut off in the middle."""
    with path.open("rb") as file:
        lines = file.readlines()
    kept = [line for line in lines if _is_before(line, first_step)]
    if kept == lines:
        return
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(b"".join(kept))
    temporary.replace(path)


def _is_before(line: bytes, first_step: int) -> bool:
    row = _parse(line) if line.endswith(b"\n") else None
    return row is not None and row["step"] < first_step


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
        for line in file:
            row = _parse(line)
            if row is not None:
                yield row


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

    def close(self) -> None:
        """Do nothing, because every line is in the file already."""

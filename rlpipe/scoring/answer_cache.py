"""Cache of a judge's answers, keyed by the content of the question."""

from __future__ import annotations

import logging
import sqlite3
from collections import OrderedDict
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_IN_MEMORY = 10_000
BUSY_TIMEOUT_S = 10.0


class AnswerCache:
    """Cache of answers in memory (least recently used) and in an SQLite file that processes and runs share."""

    def __init__(self, path: str | None, *, max_in_memory: int = MAX_IN_MEMORY) -> None:
        self._answers: OrderedDict[str, str] = OrderedDict()
        self._max_in_memory = max_in_memory
        self._database: sqlite3.Connection | None = None
        if path is not None:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, answer TEXT NOT NULL)")

    def get(self, key: str) -> str | None:
        if key in self._answers:
            self._answers.move_to_end(key)
            return self._answers[key]
        row = self._run("SELECT answer FROM answers WHERE key = ?", (key,))
        if row is None:
            return None
        self._keep(key, row[0])
        return str(row[0])

    def put(self, key: str, answer: str) -> None:
        self._keep(key, answer)
        self._run("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, answer))

    def _run(self, statement: str, values: tuple[str, ...]) -> tuple[str] | None:
        """Run a statement and return its first row; after an error, stop using the file, which is only a cache."""
        if self._database is None:
            return None
        try:
            row: tuple[str] | None = self._database.execute(statement, values).fetchone()
        except sqlite3.Error as error:
            logger.warning("the judge's cache can't be used any more: %s", error)
            self._database = None
            return None
        return row

    def _keep(self, key: str, answer: str) -> None:
        self._answers[key] = answer
        self._answers.move_to_end(key)
        while len(self._answers) > self._max_in_memory:
            self._answers.popitem(last=False)

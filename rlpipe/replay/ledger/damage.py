"""Finds what is damaged in a ledger: its pages, tables, columns, the types of its values, and its groups."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path

from rlpipe.errors import LedgerDamaged
from rlpipe.replay.ledger.database import SCHEMA, SETTINGS
from rlpipe.replay.ledger.run_ledger import GroupState, Ledger

MAY_BE_NULL = ("groups", "ended_at")
"""Tables and columns that may hold NULL; what a group must have depends on its state, which ``audit`` checks."""
TICKET = ("epoch", "position", "prompt_id", "attempt", "reroll", "version")
"""Columns of every group that a run continues with."""
FINITE, IN_CALENDAR = "-1.7976931348623157e308 AND 1.7976931348623157e308", "0 AND 253402300799"
"""Ranges of real numbers, and of times in seconds since 1970, which end with the year 9999."""


def damage(path: Path) -> str | None:
    """Return why no run can continue with the ledger at ``path``, or None."""
    if not path.is_file():
        return "it is not a file"
    try:
        with closing(Ledger(path, read_only=True, at_rest=True)) as ledger, ledger.snapshot():
            check_pages(ledger)
            check_values(ledger)
            check_groups(ledger)
            _check_resumable(ledger)
    except LedgerDamaged as error:
        return error.problem
    return None


def check_pages(ledger: Ledger) -> None:
    """Raise ``LedgerDamaged`` if SQLite finds a damaged page; this reads the whole file."""
    answer: str = ledger.rows("PRAGMA integrity_check(1)")[0][0]
    if answer != "ok":
        raise ledger.damaged(answer.splitlines()[-1])


def check_values(ledger: Ledger) -> None:
    """Raise ``LedgerDamaged`` if a table, a column or the type of a value is not as in the schema."""
    for table, columns in _tables().items():
        found = [name for _, name, *_ in ledger.rows(f"PRAGMA table_info({table})")]
        if found != list(columns):
            columns_there = f"has the columns {', '.join(found)}" if found else "is missing"
            raise ledger.damaged(f"table {table} {columns_there}")
        wrong = " ".join(f"WHEN NOT ({test}) THEN '{name}'" for name, test in columns.items())
        key = next(iter(columns))
        query = f"SELECT {key}, CASE {wrong} END AS wrong FROM {table} WHERE wrong IS NOT NULL LIMIT 1"
        for row, name in ledger.rows(query):
            raise ledger.damaged(f"{table}.{name} is of the wrong type or out of range where {key} is {row!r:.40}")
    for name in SETTINGS:
        ledger.get(name)
    _ = ledger.place, ledger.checkpoint_step


def check_groups(ledger: Ledger) -> None:
    """Raise ``LedgerDamaged`` if the tokens of a group that is still needed can't be read."""
    needed = ledger.rows("SELECT group_id FROM groups WHERE state NOT IN ('TRAINED', 'DISCARDED')")
    for _ in ledger.load(group_id for (group_id,) in needed):
        pass


def _check_resumable(ledger: Ledger) -> None:
    """Raise ``LedgerDamaged`` for what ``audit`` would report, but no run could continue with."""
    states = ", ".join(repr(state.value) for state in GroupState)
    incomplete = " OR ".join(f"{name} IS NULL" for name in TICKET)
    for (group_id,) in ledger.rows(
        f"SELECT group_id FROM groups WHERE state IS NULL OR state NOT IN ({states}) OR {incomplete}"
        " OR state IN ('GENERATED', 'SCORED', 'ASSIGNED')"
        " AND group_id NOT IN (SELECT group_id FROM payloads JOIN tokens USING (group_id)) LIMIT 1"
    ):
        raise ledger.damaged(f"group {group_id} is in no state, or lacks a number or its tokens")
    ledger.reports(after=-1)


@cache
def _tables() -> dict[str, dict[str, str]]:
    """Return for each table of the schema its columns, with an SQL test that sound values pass."""
    with closing(sqlite3.connect(":memory:")) as model:
        model.executescript(SCHEMA)
        tables = [name for (name,) in model.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        return {table: dict(_columns(model, table)) for table in tables}


def _columns(model: sqlite3.Connection, table: str) -> Iterator[tuple[str, str]]:
    for _, name, kind, *_ in model.execute(f"PRAGMA table_info({table})"):
        test = f"typeof({name}) = '{kind.lower()}'"
        if kind == "REAL":
            test += f" AND {name} BETWEEN {IN_CALENDAR if name == 'time' or name.endswith('_at') else FINITE}"
        if table in MAY_BE_NULL or name in MAY_BE_NULL:
            test = f"{name} IS NULL OR {test}"
        yield name, test

"""Selection of a run's groups by any of their properties, in any order, a page at a time."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass
from typing import Any

from rlpipe.errors import InputError
from rlpipe.replay.ledger.run_ledger import GroupState
from rlpipe.viewer.group_index import STATUS_BITS, GroupIndex

PAGE = 50
MAX_COUNTED = 100_000
"""Matches beyond which groups are not counted any more."""
FEW_PROMPTS = 1000
MAX_CHOICES = 40
SORTS = {
    "id": "group_id",
    "step": "step",
    "reward": "reward",
    "std": "reward_std",
    "best": "best_reward",
    "length": "length",
    "staleness": "staleness",
    "version": "version",
    "status": "statuses",
    "reason": "reason",
    "state": f"CASE state {' '.join(f'WHEN {state.value!r} THEN {at}' for at, state in enumerate(GroupState))} END",
}
"""Columns of the index by the names that the page sorts by; a reward function is another, ``reward:NAME``."""
FUNCTION = "reward:"
BOUNDS = ("step", "reward", "std", "best", "length", "staleness", "version")
"""Properties that can be bounded, by ``NAME_min`` and ``NAME_max``."""


@dataclass(kw_only=True, frozen=True)
class GroupQuery:
    """Selection and order of the table of groups; an empty text matches anything."""

    sort: str = "id"
    descending: bool = True
    after: tuple[float, int] | None = None
    """Sort key and id of the last row of the page before."""
    bounds: tuple[tuple[str, float | None, float | None], ...] = ()
    """Names as for ``sort``, with the least and the greatest value."""
    state: str = ""
    status: str = ""
    reason: str = ""
    text: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether all groups are shown by their ids, for which the ledger's own key is enough."""
        return self.sort == "id" and not (self.bounds or self.state or self.status or self.reason or self.text)


@dataclass(kw_only=True, frozen=True)
class GroupPage:
    """A page of the table of groups."""

    group_ids: list[int]
    after: tuple[float, int] | None
    """Start of the next page; None after the last one."""


def find_page(index: GroupIndex, query: GroupQuery, size: int = PAGE) -> GroupPage:
    """Return a page of the groups that match; those without a value to sort by come last.

    States are in the order in which a group has them, and groups with equal statuses, or with the same reason of
    discard, are next to each other.

    Raises ``InputError`` if the run has no such reward function, property, status or state.
    """
    with index.reading() as connection:
        column = _column(connection, query.sort)
        key = f"coalesce({column}, {'-9e999' if query.descending else '9e999'})"
        conditions, values = _conditions(index, connection, query)
        where = " AND ".join(conditions) or "1"
        if query.after is not None:
            where += f" AND ({key}, group_id) {'<' if query.descending else '>'} (?, ?)"
            values = [*values, *query.after]
        order = "DESC" if query.descending else "ASC"
        rows = connection.execute(
            f"SELECT group_id, {key} AS key FROM entries WHERE {where} ORDER BY key {order}, group_id {order} LIMIT ?",
            (*values, size + 1),
        ).fetchall()
    after = (float(rows[size - 1][1]), rows[size - 1][0]) if len(rows) > size else None
    return GroupPage(group_ids=[row[0] for row in rows[:size]], after=after)


def count_groups(index: GroupIndex, query: GroupQuery) -> int:
    """Return the number of groups that match, at most ``MAX_COUNTED``."""
    with index.reading() as connection:
        conditions, values = _conditions(index, connection, query)
        where = " AND ".join(conditions) or "1"
        counted = f"SELECT count(*) FROM (SELECT 1 FROM entries WHERE {where} LIMIT {MAX_COUNTED})"
        return int(connection.execute(counted, values).fetchone()[0])


def _column(connection: sqlite3.Connection, name: str) -> str:
    if name in SORTS:
        return SORTS[name]
    if name.startswith(FUNCTION):
        cursor = connection.execute("SELECT number FROM functions WHERE name = ?", (name.removeprefix(FUNCTION),))
        if (row := cursor.fetchone()) is not None:
            return f"function_{row[0]}"
    raise InputError(f"there is no property {name!r}; it is one of {', '.join(SORTS)}, or {FUNCTION}NAME of a reward")


def _conditions(index: GroupIndex, connection: sqlite3.Connection, query: GroupQuery) -> tuple[list[str], list[Any]]:
    tests: list[tuple[str, Any]] = []
    for name, minimum, maximum in query.bounds:
        column = _column(connection, name)
        tests += [
            (f"{column} {sign} ?", value) for sign, value in ((">=", minimum), ("<=", maximum)) if value is not None
        ]
    if query.state:
        tests.append(("state = ?", query.state))
    if query.status:
        if query.status not in STATUS_BITS:
            raise InputError(f"there is no status {query.status!r}; it is one of {', '.join(STATUS_BITS)}")
        tests.append(("statuses & ?", STATUS_BITS[query.status]))
    if query.reason:
        tests.append(("reason = (SELECT reason FROM reasons WHERE text = ?)", query.reason))
    conditions, values = [test for test, _ in tests], [value for _, value in tests]
    if query.text:
        # With the plus, SQLite scans the entries; without it, it looks up each prompt that was found.
        conditions.append(
            "prompt IN found" if index.find_text(connection, query.text) < FEW_PROMPTS else "+prompt IN found"
        )
    return conditions, values


def find_choices(index: GroupIndex) -> dict[str, list[str]]:
    """Return the values that can be chosen: reward functions, and states and reasons, the most frequent first."""
    with index.reading() as connection:
        functions = connection.execute("SELECT name FROM functions ORDER BY number").fetchall()
        states = connection.execute("SELECT state FROM entries GROUP BY state ORDER BY count(*) DESC").fetchall()
        reasons = connection.execute(
            "SELECT text FROM reasons JOIN (SELECT reason, count(*) AS number FROM entries WHERE reason IS NOT NULL"
            f" GROUP BY reason) USING (reason) ORDER BY number DESC LIMIT {MAX_CHOICES}"
        ).fetchall()
    choices = {"functions": functions, "states": states, "reasons": reasons}
    return {name: [row[0] for row in rows] for name, rows in choices.items()} | {"statuses": [*STATUS_BITS]}

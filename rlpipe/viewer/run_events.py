"""Events of a run for the view: those of its ledger or log, discarded groups, and the begin and end of commands."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rlpipe.replay.ledger.run_ledger import Ledger
from rlpipe.tracking.jsonl import read_rows
from rlpipe.tracking.outcome import RUNNING, RunOutcome

MAX_MARKS = 500
"""Newest events, and newest deaths, from which the page chooses its marks above curves."""
DISCARD_MARKS = 40
"""Parts of the run's time whose discarded groups have one mark for each reason."""
MAX_REASONS = 50
RESUME, END, DISCARD = "resume", "end", "discard"
"""Kinds of events that are in no ledger."""
FIELDS = ("id", "time", "kind", "subject", "message")
_WHEN = "coalesce(scored_at, generated_at, admitted_at)"


def ledger_events(ledger: Ledger, before: int | None, kind: str, limit: int) -> dict[str, Any]:
    """Return the newest events before one, the kinds of events, and why and when groups were discarded."""
    rows = ledger.rows(
        "SELECT id, time, kind, subject, message FROM events WHERE id < ? AND (? = '' OR kind = ?)"
        " ORDER BY id DESC LIMIT ?",
        2**62 if before is None else before,
        kind,
        kind,
        limit + 1,
    )
    kinds = ledger.rows("SELECT kind, count(*) FROM events GROUP BY kind ORDER BY 2 DESC")
    discards = ledger.rows(
        f"SELECT reason, count(*), min({_WHEN}), max({_WHEN}) FROM groups WHERE state = 'DISCARDED'"
        f" GROUP BY reason ORDER BY 2 DESC LIMIT {MAX_REASONS}"
    )
    return {
        "events": [dict(zip(FIELDS, row, strict=True)) for row in rows[:limit]],
        "before": rows[limit - 1][0] if len(rows) > limit else None,
        "kinds": dict(kinds),
        "discards": [dict(zip(("reason", "count", "first", "last"), row, strict=True)) for row in discards],
        "discarded": [*_discards(ledger)],
    }


def logged_events(log: Path, before: int | None, kind: str, limit: int) -> dict[str, Any]:
    """Return what ``ledger_events`` does for a run without a ledger, from its log of events."""
    rows = [{"id": number, **row} for number, row in enumerate(read_rows(log))]
    earlier = rows if before is None else rows[: max(before, 0)]
    chosen = [row for row in reversed(earlier) if not kind or row["kind"] == kind]
    return {
        "events": [{name: row[name] for name in (*FIELDS, "step")} for row in chosen[:limit]],
        "before": chosen[limit - 1]["id"] if len(chosen) > limit else None,
        "kinds": dict(Counter(row["kind"] for row in rows).most_common()),
        "discards": [],
        "discarded": [],
    }


def ledger_marks(ledger: Ledger) -> list[dict[str, Any]]:
    """Return the newest events, and the newest deaths, of which some may be older, for the marks above curves."""
    rows = ledger.rows(
        "SELECT id, time, kind, subject, message FROM events WHERE"
        " id IN (SELECT id FROM events ORDER BY id DESC LIMIT ?)"
        " OR id IN (SELECT id FROM events WHERE kind = 'death' ORDER BY id DESC LIMIT ?) ORDER BY id DESC",
        MAX_MARKS,
        MAX_MARKS,
    )
    return [dict(zip(FIELDS, row, strict=True)) for row in rows]


def logged_marks(log: Path) -> list[dict[str, Any]]:
    """Return what ``ledger_marks`` does for a run without a ledger, from its log of events."""
    events = [row for kind in ("", "death") for row in logged_events(log, None, kind, MAX_MARKS)["events"]]
    return [*{row["id"]: row for row in events}.values()]


def _discards(ledger: Ledger) -> Iterator[dict[str, Any]]:
    """Yield one event for the groups that were discarded for one reason in one of equal parts of the run's time."""
    rows = ledger.rows(
        f"WITH gone AS (SELECT reason, {_WHEN} AS time FROM groups WHERE state = 'DISCARDED'),"
        " range AS (SELECT min(time) AS first, max(max(time) - min(time), 1e-3) AS length FROM gone)"
        " SELECT gone.reason, count(*), max(gone.time) FROM gone, range"
        f" GROUP BY gone.reason, CAST((gone.time - first) / length * {DISCARD_MARKS} AS INT)"
        " ORDER BY 2 DESC LIMIT ?",
        MAX_MARKS,
    )
    for number, (reason, count, moment) in enumerate(rows):
        groups = "1 group" if count == 1 else f"{count:,} groups"
        yield dict(zip(FIELDS, (f"{DISCARD}-{number}", moment, DISCARD, reason, f"{groups}: {reason}"), strict=True))


def command_events(outcome: RunOutcome | None, state: str, changed_at: float) -> list[dict[str, Any]]:
    """Return where a run's commands began again and ended, the newest first.

    ``state`` is that of the latest command, whose files changed last at ``changed_at``.
    """
    if outcome is None:
        return []
    commands = [*outcome.earlier, outcome]
    events: list[dict[str, Any]] = []
    for number, command in enumerate(commands):
        if number:
            events.append(_command_event(number, RESUME, command.began_at, "a command went on with the run"))
        is_last = number == len(commands) - 1
        ending = state if is_last else command.state if command.state != RUNNING else "killed"
        if ending != RUNNING:
            error = "" if command.message is None else f", {command.error}: {command.message}"
            fallback = changed_at if is_last else commands[number + 1].began_at
            end = _command_event(number, END, command.ended_at or fallback, f"{ending}{error}")
            events.append(end | {"state": ending})
    return events[::-1]


def _command_event(number: int, kind: str, moment: float, message: str) -> dict[str, Any]:
    return dict(zip(FIELDS, (f"{kind}-{number}", moment, kind, "run", message), strict=True))

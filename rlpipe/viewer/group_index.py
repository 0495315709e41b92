"""The viewer's own index of a run's groups, which filters and sorts millions of rows that the ledger has no index for.

The ledger keeps rewards by name, outcomes and prompts in one JSON text a group. What the table of groups is filtered
by is copied from there, in batches, to a SQLite file of the viewer; the ledger itself is only read.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from hashlib import blake2b
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

from rlpipe.common import run_files
from rlpipe.common.atomic_io import write_ahead
from rlpipe.common.formatting import storable
from rlpipe.data.render.messages import content_text
from rlpipe.replay.ledger.database import DECODING_ERRORS, stored_prompt
from rlpipe.replay.ledger.run_ledger import Ledger
from rlpipe.tracking.jsonl import rows_after
from rlpipe.types import NO_VERSION, RolloutStatus

BATCH = 2000
"""Groups that one transaction adds."""
AT_ONCE = 8
"""Records that are in memory at a time: one of long episodes has many megabytes."""
MAX_FUNCTIONS = 32
"""Reward functions that have a column."""
MAX_START_CHARS = 160
"""Characters of a prompt's last message that are kept as they are, to be shown."""
BUSY_TIMEOUT_S = 10.0
STATUS_BITS = {status.value: 1 << index for index, status in enumerate(RolloutStatus)}
MAPPED_BYTES = 2**30
SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS functions (number INTEGER PRIMARY KEY, name TEXT UNIQUE);
CREATE TABLE IF NOT EXISTS reasons (reason INTEGER PRIMARY KEY, text TEXT UNIQUE);
CREATE TABLE IF NOT EXISTS entries (
    group_id INTEGER PRIMARY KEY, step INTEGER, state TEXT, reason INTEGER, reward REAL, reward_std REAL,
    best_reward REAL, length REAL, staleness INTEGER, version INTEGER, num_rollouts INTEGER, statuses INTEGER,
    prompt INTEGER);
CREATE INDEX IF NOT EXISTS entries_by_prompt ON entries (prompt, version);
CREATE TABLE IF NOT EXISTS prompts (prompt INTEGER PRIMARY KEY, lower TEXT, start TEXT, key INTEGER UNIQUE);
CREATE TABLE IF NOT EXISTS held_out (
    number INTEGER PRIMARY KEY, version INTEGER, prompt INTEGER, prompt_id INTEGER, reward REAL, row TEXT,
    UNIQUE (prompt, prompt_id, version));
"""
COPIED = "group_id, step, state, reason, reward, reward_std, best_reward, length, staleness, version, num_rollouts"
SOURCE = f"""
SELECT group_id, step, state, reason, reward, reward_std, best_reward, num_loss_tokens * 1.0 / nullif(num_rollouts, 0),
    step - nullif(oldest_version, {NO_VERSION}), nullif(oldest_version, {NO_VERSION}), num_rollouts
FROM groups WHERE group_id >= ? ORDER BY group_id LIMIT {10 * BATCH}
"""
UNSCORED = "('ADMITTED', 'GENERATED')"
OPEN = "('ADMITTED', 'GENERATED', 'SCORED')"
"""States of groups that can still change in more than their state."""


def prompt_text(prompt: str | Sequence[dict[str, Any]]) -> str:
    """Return a prompt as one text, in which it is searched for."""
    texts = [prompt] if isinstance(prompt, str) else [content_text(message.get("content")) for message in prompt]
    return storable("\n".join(texts))  # SQLite stores no lone surrogates


def _group_of(row: dict[str, Any]) -> Any:
    return row.get("group_id")


def shown_start(prompt: str | Sequence[dict[str, Any]]) -> str:
    """Return the start of a prompt's last message, by which it is told from others: the first is often the same."""
    return prompt_text(prompt if isinstance(prompt, str) else prompt[-1:])[:MAX_START_CHARS]


def prompt_key(text: str) -> int:
    """Return a number that stands for a prompt's text in every run."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big", signed=True)


class GroupIndex:
    """Index in the file ``path`` of the groups in a run's ledger, and of the texts that were logged in its ``folder``.

    Several processes may keep the same file up to date. A file of another ledger, or one that is damaged, is replaced.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        self.path, self._folder = path, folder
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._make()
        except sqlite3.OperationalError:  # another viewer writes it, or the disk is full: it is not damaged
            raise
        except sqlite3.DatabaseError:
            path.unlink(missing_ok=True)
            self._make()
        self._turn = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._search: tuple[str, int] | None = None
        """Text and version of the data of which ``found`` holds the prompts."""
        self.num_indexed = self.num_groups = 0
        """Groups whose records have been looked for, and groups in the ledger."""
        self.num_known: int | None = None
        """Groups whose records were found: tokens are dropped, and with them prompts and rewards by function."""
        self.read = set[int]()
        """Groups that were read with their rewards, but come after one without rewards."""
        self.read_of: tuple[Any, ...] = ()
        """Identity and incarnation of the ledger that they were read from."""

    def _make(self) -> None:
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=BUSY_TIMEOUT_S)) as connection:
            write_ahead(connection, BUSY_TIMEOUT_S)
            connection.executescript(SCHEMA)

    def connect(self) -> sqlite3.Connection:
        """Return a connection for queries; the index may grow meanwhile."""
        address = f"{self.path.absolute().as_uri()}?mode=ro"
        connection = sqlite3.connect(address, uri=True, isolation_level=None, check_same_thread=False)
        connection.execute(f"PRAGMA mmap_size = {MAPPED_BYTES}")
        connection.execute("PRAGMA temp_store = MEMORY")
        return connection

    @contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """Yield, to one thread at a time, a connection that keeps what was found last, and sees one state."""
        with self._turn:
            if self._connection is None:
                self._connection = self.connect()
                self._connection.execute("CREATE TEMP TABLE found (prompt INTEGER PRIMARY KEY)")
            self._connection.execute("BEGIN")
            try:
                yield self._connection
            finally:
                if self._connection.in_transaction:  # SQLite has ended it after some errors
                    self._connection.execute("COMMIT")

    def find_text(self, connection: sqlite3.Connection, text: str) -> int:
        """Put the prompts that have a text, in any case, into the connection's table ``found``; return their number."""
        search = (text, connection.execute("PRAGMA data_version").fetchone()[0])
        if search != self._search:
            self._search = None
            connection.execute("DELETE FROM found")
            connection.execute(
                "INSERT INTO found SELECT prompt FROM prompts WHERE instr(lower, ?) ORDER BY prompt", (text.lower(),)
            )
            self._search = search
        return int(connection.execute("SELECT count(*) FROM found").fetchone()[0])

    def means(self, group_ids: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Return the prompt, the outcomes and the mean of each reward function of groups whose records are indexed."""
        with self.reading() as connection:
            names = [name for (name,) in connection.execute("SELECT name FROM functions ORDER BY number")]
            columns = "".join(f", function_{number}" for number in range(len(names)))
            rows = connection.execute(
                f"SELECT group_id, statuses, key, start{columns} FROM entries JOIN prompts USING (prompt)"
                f" WHERE group_id IN ({', '.join(map(str, group_ids))})"
            ).fetchall()
        return {
            number: {
                "functions": dict(zip(names, values, strict=True)),
                "prompt": start,
                "key": str(key),  # JavaScript has no integers of 64 bits
                "statuses": [status for status, bit in STATUS_BITS.items() if statuses & bit],
            }
            for number, statuses, key, start, *values in rows
        }

    def update(self, ledger: Ledger, identity: Sequence[Any], stopped: Callable[[], bool] = lambda: False) -> None:
        """Add what is new in the ledger, whose file has this ``identity``; return early once ``stopped``."""
        if not self.path.exists():  # the user's cache was emptied
            with self._turn:
                self._connection = self._search = None
                self._make()
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=60)) as connection:
            connection.execute("PRAGMA synchronous = OFF")
            _IndexUpdate(self, connection, ledger, self._folder, stopped).update(json.dumps([*identity]))
            self.num_known = connection.execute("SELECT count(prompt) FROM entries").fetchone()[0]


class _IndexUpdate:
    """One pass over a ledger that adds to the index."""

    def __init__(
        self,
        index: GroupIndex,
        connection: sqlite3.Connection,
        ledger: Ledger,
        folder: Path,
        stopped: Callable[[], bool],
    ) -> None:
        self._index, self._connection, self._ledger = index, connection, ledger
        self._folder, self._stopped = folder, stopped
        self._functions: dict[str, int] = {}
        self._reasons: dict[str, int] = {}

    def update(self, identity: str) -> None:
        """Copy the columns of all groups first, then read their records, then the logs of texts."""
        if self._get("identity") != identity:
            self._reset(identity)
        self._functions = {name: number for number, name in self._connection.execute("SELECT * FROM functions")}
        self._reasons = {text: reason for reason, text in self._connection.execute("SELECT * FROM reasons")}
        self._index.num_groups = self._ledger.next_group_id()
        self._copy_columns()
        self._read_evaluations()
        self._read_records()
        self._read_completions()

    def _get(self, key: str, default: Any = None) -> Any:
        row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else default

    def _set(self, **values: Any) -> None:
        self._connection.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        with self._connection:
            yield

    def _reset(self, identity: str) -> None:
        """Forget the groups of another ledger, or of one that a copy has replaced, and its reward functions."""
        with self._transaction():
            for table in ("entries", "prompts", "reasons", "held_out", "meta"):
                self._connection.execute(f"DELETE FROM {table}")
            for (number,) in self._connection.execute("SELECT number FROM functions").fetchall():
                self._connection.execute(f"ALTER TABLE entries DROP COLUMN function_{number}")
            self._connection.execute("DELETE FROM functions")
            self._set(identity=identity)

    def _copy_columns(self) -> None:
        """Copy the columns of groups that are new, or could have changed since the last look."""
        checkpoint, last = self._ledger.checkpoint_step, self._ledger.rows("SELECT max(step) FROM groups")[0][0]
        first_open = self._ledger.rows(f"SELECT min(group_id) FROM groups WHERE state IN {OPEN}")[0][0]
        indexed_step = self._get("last_step")
        incarnation = self._ledger.get("incarnation")
        start = (
            int(self._get("first_open", 0)) if self._get("incarnation") == incarnation else 0
        )  # a resumed run may release groups
        if indexed_step is not None:  # groups of the last step change once more, when the run ends
            query = "SELECT min(group_id) FROM groups WHERE step >= ?"
            start = min(start, self._ledger.rows(query, indexed_step)[0][0] or start)
        first = start if self._get("checkpoint_step") == checkpoint else 0
        while not self._stopped():
            rows = self._ledger.rows(SOURCE, start)
            with self._transaction():
                updates = ", ".join(f"{name} = excluded.{name}" for name in COPIED.split(", ")[1:])
                self._connection.executemany(
                    f"INSERT INTO entries ({COPIED}) VALUES ({', '.join('?' * 11)})"
                    f" ON CONFLICT (group_id) DO UPDATE SET {updates}",
                    [(*row[:3], self._reason(row[3]), *row[4:]) for row in rows],
                )
            if len(rows) < 10 * BATCH:
                break
            start = rows[-1][0] + 1
        else:  # goes on from here, but for what may still change
            with self._transaction():
                self._set(
                    first_open=start if first_open is None else min(start, first_open),
                    last_step=last,
                    incarnation=incarnation,
                    checkpoint_step=-1,
                )
            return
        with self._transaction():
            self._connection.execute(
                "UPDATE entries SET state = 'TRAINED' WHERE state = 'ASSIGNED' AND step < ? AND group_id >= ?",
                (checkpoint, first),
            )
            following = self._index.num_groups if first_open is None else first_open
            self._set(first_open=following, last_step=last, incarnation=incarnation, checkpoint_step=checkpoint)

    def _reason(self, text: str | None) -> int | None:
        if text is None:
            return None
        if text not in self._reasons:
            self._connection.execute("INSERT OR IGNORE INTO reasons (text) VALUES (?)", (text,))
            query = "SELECT reason FROM reasons WHERE text = ?"
            self._reasons[text] = self._connection.execute(query, (text,)).fetchone()[0]
        return self._reasons[text]

    def _read_records(self) -> None:
        """Read the records of groups that had no rewards yet at the last look."""
        unscored = self._ledger.rows(f"SELECT min(group_id) FROM groups WHERE state IN {UNSCORED}")[0][0]
        settled = self._index.num_groups if unscored is None else unscored
        start = self._index.num_indexed = int(self._get("first_unscored", 0))
        source = (self._get("identity"), self._get("incarnation"))
        is_same = source == self._index.read_of  # else its groups may have been generated again
        self._index.read = {number for number in self._index.read if is_same and number >= start}
        self._index.read_of = source
        while not self._stopped():
            query = "SELECT group_id FROM payloads WHERE group_id >= ? ORDER BY group_id LIMIT ?"
            ids = [number for (number,) in self._ledger.rows(query, start, BATCH)]
            with self._transaction():
                num_added = self._add_records(ids, settled)
                is_last = num_added == len(ids) < BATCH
                following = settled if is_last else ids[num_added - 1] + 1
                self._set(first_unscored=min(following, settled))
            self._index.num_indexed = following
            if is_last:
                self._index.num_indexed = self._index.num_groups
                return
            start = following

    def _add_records(self, ids: Sequence[int], settled: int) -> int:
        """Add the records of groups, of those from ``settled`` on only once; return how many, fewer once stopped."""
        query = f"SELECT group_id FROM entries WHERE group_id BETWEEN ? AND ? AND state NOT IN {UNSCORED}"
        bounds = (max(ids[0], settled), ids[-1]) if ids else (0, -1)
        scored = {number for (number,) in self._connection.execute(query, bounds)}
        known = self._index.read & scored
        for first in range(0, len(ids), AT_ONCE):
            if first and self._stopped():
                return first
            chosen = [number for number in ids[first : first + AT_ONCE] if number not in known]
            query = f"SELECT group_id, record FROM payloads WHERE group_id IN ({', '.join(map(str, chosen))})"
            for group_id, record in self._ledger.rows(query) if chosen else ():
                self._add_record(group_id, record)
            self._index.read |= scored.intersection(chosen)
        return len(ids)

    def _add_record(self, group_id: int, text: str) -> None:
        try:
            record = json.loads(text)
            self._add(group_id, stored_prompt(record), record["rollouts"])
        except DECODING_ERRORS:  # the view of this group says what is wrong with it
            return

    def _read_completions(self) -> None:
        """Add what the log of completions has of groups whose records were dropped before they were read."""
        missing = "SELECT 1 FROM entries WHERE group_id = ? AND prompt IS NULL"
        for rows in self._new_rows(run_files.COMPLETIONS):
            for group_id, rollouts in groupby(rows, _group_of):
                if self._connection.execute(missing, (group_id,)).fetchone():
                    entries = [*rollouts]
                    self._add(group_id, entries[0]["prompt"], entries)

    def _read_evaluations(self) -> None:
        """Add the answers to held-out prompts; of two evaluations of a version the later one counts."""
        for rows in self._new_rows(run_files.EVALUATIONS, table="held_out"):
            self._connection.executemany(
                "INSERT INTO held_out (version, prompt, prompt_id, reward, row) VALUES (?, ?, ?, ?, ?)"
                " ON CONFLICT DO UPDATE SET reward = excluded.reward, row = excluded.row",
                [
                    (row["step"], self._prompt(row["prompt"]), row["prompt_id"], row["reward"], json.dumps(row))
                    for row in rows
                ],
            )

    def _new_rows(self, name: str, *, table: str | None = None) -> Iterator[list[dict[str, Any]]]:
        """Yield the new rows of a log in batches, each within a transaction that also notes how far it was read.

        If the log is another file than before, its ``table`` is emptied first.
        """
        path, offset, inode = self._folder / name, *(int(self._get(f"{name} {key}", 0)) for key in ("offset", "inode"))
        if not path.is_file():
            if offset and table is not None:
                with self._transaction():
                    self._connection.execute(f"DELETE FROM {table}")
                    self._set(**{f"{name} offset": 0})
            return
        file = path.stat()
        if file.st_ino != inode or file.st_size < offset:  # a resumed run has dropped the rows of later steps
            offset = 0
        while not self._stopped():
            is_first = offset == 0
            rows, following = rows_after(path, offset, BATCH)
            is_last = len(rows) < BATCH
            num_complete = len(rows) if is_last else sum(_group_of(row) != _group_of(rows[-1]) for row in rows)
            if 0 < num_complete < len(rows):  # the next batch begins with the group that this one does not have whole
                rows, following = rows_after(path, offset, num_complete)
            offset = following
            with self._transaction():
                if is_first and table is not None:
                    self._connection.execute(f"DELETE FROM {table}")
                yield rows
                self._set(**{f"{name} offset": offset, f"{name} inode": file.st_ino})
            if is_last:
                return

    def _add(self, group_id: int, prompt: Any, rollouts: Sequence[dict[str, Any]]) -> None:
        """Add a group's prompt, its outcomes, and the mean of each reward."""
        statuses = 0
        for rollout in rollouts:
            statuses |= STATUS_BITS.get(rollout["status"], 0)
        values = {"prompt": self._prompt(prompt), "statuses": statuses, **self._means(rollouts)}
        changes = ", ".join(f"{name} = ?" for name in values)
        self._connection.execute(f"UPDATE entries SET {changes} WHERE group_id = ?", (*values.values(), group_id))

    def _prompt(self, prompt: str | Sequence[dict[str, Any]]) -> int:
        """Return the number of a prompt; numbers count on, so that looking up those of many groups is fast."""
        text = prompt_text(prompt)
        key = prompt_key(text)
        existing = self._connection.execute("SELECT prompt FROM prompts WHERE key = ?", (key,)).fetchone()
        if existing is None:
            row = (text.lower(), shown_start(prompt), key)
            added = self._connection.execute("INSERT INTO prompts (lower, start, key) VALUES (?, ?, ?)", row)
            return int(added.lastrowid or 0)
        return int(existing[0])

    def _means(self, rollouts: Iterable[dict[str, Any]]) -> dict[str, float]:
        """Return the mean of each reward function, by the column that it has in the index."""
        by_name: dict[str, list[float]] = {}
        for rollout in rollouts:
            for name, value in rollout["rewards"].items():
                if value is not None:
                    by_name.setdefault(name, []).append(float(value))
        return {
            f"function_{number}": fmean(values)
            for name, values in by_name.items()
            if (number := self._function(name)) is not None
        }

    def _function(self, name: str) -> int | None:
        """Return the column's number of a reward function, which is added if the index has room for it."""
        if name not in self._functions:
            row = self._connection.execute("SELECT number FROM functions WHERE name = ?", (name,)).fetchone()
            if row is None:
                number = self._connection.execute("SELECT count(*) FROM functions").fetchone()[0]
                if number >= MAX_FUNCTIONS:
                    return None
                self._connection.execute("INSERT INTO functions VALUES (?, ?)", (number, name))
                self._connection.execute(f"ALTER TABLE entries ADD COLUMN function_{number} REAL")
                row = (number,)
            self._functions[name] = row[0]
        return self._functions[name]

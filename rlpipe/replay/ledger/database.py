"""The ledger's SQLite file: its tables, and how groups and steps are serialised."""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from rlpipe.common import run_files
from rlpipe.common.atomic_io import check_room
from rlpipe.common.formatting import storable
from rlpipe.data.render.messages import content_text
from rlpipe.data.row import dump_values, load_values
from rlpipe.errors import DataError, LedgerDamaged, LedgerError
from rlpipe.types import (
    BoolArray,
    ChatMessages,
    EpisodeTrace,
    FloatArray,
    GroundTruth,
    PlacedImage,
    Prompt,
    Rollout,
    RolloutGroup,
    RolloutStatus,
)

COMPRESSION = 1
"""zlib's fastest level; higher levels take three times as long to save a tenth of the size."""
COLUMN = "column:"
"""Prefix of the names of arrays that hold a column of the row."""
TOKEN_ARRAYS = ("token_ids", "loss_mask", "logprobs", "policy_versions")


def pack_arrays(group: RolloutGroup, *, with_columns: bool = False) -> bytes:
    """Return the packed arrays of a group: the concatenated rollouts, and the prompt's tokens, truth and images.

    ``with_columns`` adds those of the row's columns that can be stored.
    """
    sequences = group.sequences
    arrays: dict[str, NDArray[Any]] = {"prompt": group.prompt.token_ids}
    arrays["lengths"] = np.array([len(sequence.token_ids) for sequence in sequences], np.int32)
    for name in TOKEN_ARRAYS if sequences else ():
        arrays[name] = np.concatenate([getattr(sequence, name) for sequence in sequences])
    if has_episodes(group):
        arrays["num_sequences"] = np.array([len(rollout.sequences) for rollout in group], np.int32)
        arrays["turns"] = np.concatenate([sequence.turns for sequence in sequences])
    if group.prompt.truth is not None:
        arrays |= {"truth": group.prompt.truth.token_ids, "truth_mask": group.prompt.truth.is_assistant}
    for index, image in enumerate(group.prompt.images):
        arrays[f"image_{index}"] = np.frombuffer(image.content, np.uint8)
    if group.prompt.images:
        spans = [(image.start, image.num_tokens) for image in group.prompt.images]
        arrays["image_places"] = np.array(spans, np.int32)  # [I, 2]
    for name, value in group.prompt.task.items() if with_columns else ():
        with suppress(DataError):
            arrays[COLUMN + name] = np.frombuffer(dump_values(value, name), np.uint8)
    return zlib.compress(save(arrays), COMPRESSION)


def pack_record(group: RolloutGroup) -> str:
    """Return the JSON record: all but the arrays and the row's columns, which the prompt source still has."""
    record = {
        "prompt_id": group.prompt.prompt_id,
        "epoch": group.prompt.epoch,
        "prompt": group.prompt.prompt,
        "generate_s": group.generate_s,
        "score_s": group.score_s,
        "engine": group.engine,
        "logged": group.logged,
        "rollouts": [
            {
                "sample_index": rollout.sample_index,
                "status": rollout.status.value,
                "finish_reason": rollout.finish_reason,
                "rewards": rollout.rewards,
                "reward": rollout.reward,
                **_advantage_record(rollout),
                **({"is_greedy": True} if rollout.is_greedy else {}),
                **({} if rollout.episode is None else {"episode": _episode_record(rollout.episode)}),
            }
            for rollout in group
        ],
    }
    return json.dumps(record, ensure_ascii=False, default=str)


def _advantage_record(rollout: Rollout) -> dict[str, Any]:
    """Return the advantage that all loss tokens share, or else their mean and the runs of equal ones."""
    if rollout.advantages is None:
        return {"advantage": None}
    values = rollout.loss_advantages
    if not len(values):
        return {"advantage": float(rollout.advantages[-1])}
    if (values == values[0]).all():
        return {"advantage": float(values[0])}
    starts = np.flatnonzero(np.diff(values, prepend=np.nan))
    counts = np.diff([*starts, len(values)])
    runs = [list(run) for run in zip(counts.tolist(), values[starts].tolist(), strict=True)]
    return {"advantage": float(values.mean()), "advantages": runs}


def has_episodes(group: RolloutGroup) -> bool:
    return any(rollout.episode is not None for rollout in group)


def _episode_record(episode: EpisodeTrace) -> dict[str, Any]:
    return {
        "messages": episode.messages,
        "reward": episode.reward,
        "turn_rewards": list(episode.turn_rewards),
        "end": episode.end,
    }


def unpack_group(group_id: int, record_text: str, packed: bytes, task: Mapping[str, Any] | None = None) -> RolloutGroup:
    """Return the group as it was stored; ``task`` holds the row's columns, null those that were stored with it.

    Raises what its conversions raise if the group is damaged: call it within ``Database.decoding``.
    """
    record, arrays = json.loads(record_text), load(zlib.decompress(packed))
    if task is None:
        columns = {name: stored for name, stored in arrays.items() if name.startswith(COLUMN)}
        task = {name.removeprefix(COLUMN): load_values(stored.tobytes()) for name, stored in columns.items()}
    prompt = Prompt(
        prompt_id=record["prompt_id"],
        epoch=record["epoch"],
        token_ids=arrays["prompt"],
        prompt=stored_prompt(record),
        task=task,
        truth=GroundTruth(token_ids=arrays["truth"], is_assistant=arrays["truth_mask"]) if "truth" in arrays else None,
        images=tuple(
            PlacedImage(start=start, num_tokens=num_tokens, content=arrays[f"image_{index}"].tobytes())
            for index, (start, num_tokens) in enumerate(arrays.get("image_places", np.zeros(0)).tolist())
        ),
    )
    names = (*TOKEN_ARRAYS, "turns") if "turns" in arrays else TOKEN_ARRAYS
    ends = np.cumsum(arrays["lengths"])
    sequences = {name: np.split(arrays[name], ends[:-1]) for name in names if len(ends)}
    last = np.cumsum(arrays.get("num_sequences", np.ones(len(record["rollouts"]), np.int32))).tolist()
    rollouts = []
    for entry, start, stop in zip(record["rollouts"], [0, *last], last, strict=False):
        advantages = _stored_advantages(entry, sequences["loss_mask"][start:stop])
        first, *branches = [
            Rollout(
                group_id=group_id,
                sample_index=int(entry["sample_index"]),
                prompt_id=prompt.prompt_id,
                task=prompt.task,
                rewards={name: _optional_number(value) for name, value in entry["rewards"].items()},
                reward=_optional_number(entry["reward"]),
                status=RolloutStatus(entry["status"]),
                finish_reason=entry["finish_reason"],
                advantages=advantages[index - start],
                images=prompt.images,
                episode=None,
                rejected=None,
                is_greedy=bool(entry.get("is_greedy", False)),
                first_index=0,
                **{name: sequences[name][index] for name in names},
            )
            for index in range(start, stop)
        ]
        if "episode" in entry:
            first.episode = _stored_episode(entry["episode"], branches)
        rollouts.append(first)
    return RolloutGroup(
        group_id=group_id,
        prompt=prompt,
        rollouts=rollouts,
        generate_s=float(record["generate_s"]),
        score_s=float(record["score_s"]),
        engine=record["engine"],
        logged={name: float(value) for name, value in record["logged"].items()},
    )


def _stored_advantages(entry: Mapping[str, Any], masks: Sequence[BoolArray]) -> Sequence[FloatArray | None]:
    """Return the advantages of each sequence of a rollout, with the loss masks ``masks``; zeros where it has none."""
    if entry["advantage"] is None:
        return [None] * len(masks)
    if "advantages" not in entry:
        return [np.full(len(mask), entry["advantage"], np.float32) for mask in masks]
    counts, values = zip(*entry["advantages"], strict=True)
    advantages = np.zeros(sum(map(len, masks)), np.float32)
    advantages[np.concatenate(masks)] = np.repeat(np.array(values, np.float32), counts)
    return np.split(advantages, np.cumsum([len(mask) for mask in masks[:-1]]))


def _stored_episode(record: Mapping[str, Any], branches: Sequence[Rollout]) -> EpisodeTrace:
    for message in record["messages"]:
        content_text(message.get("content"))
    return EpisodeTrace(
        messages=record["messages"],
        reward=_optional_number(record["reward"]),
        turn_rewards=[float(value) for value in record["turn_rewards"]],
        end=str(record["end"]),
        branches=branches,
    )


def stored_prompt(record: Mapping[str, Any]) -> str | ChatMessages:
    """Return a record's prompt, if it can be shown."""
    prompt: str | ChatMessages = record["prompt"]
    for message in () if isinstance(prompt, str) else prompt:
        content_text(message.get("content"))
    return prompt


def _optional_number(value: Any) -> float | None:
    return None if value is None else float(value)


NO_LEDGER = "it has no tables of a ledger"
SCHEMA_VERSION, WITH_EPISODES = 1, 2
"""Versions of the records: those of ledgers without episodes, and with them."""

SETTINGS: Mapping[str, type] = {
    "schema": int,
    "run_id": str,
    "owner": dict,
    "config": dict,
    "earlier_configs": list,
    "place": list,
    "checkpoint_step": int,
    "digests": dict,
    "incarnation": int,
    "writers": list,
}
"""Types of the values in ``meta``."""
ENVIRONMENT = {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_PROTOCOL,
    sqlite3.SQLITE_INTERRUPT,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_NOLFS,
}
"""SQLite's codes of errors that say nothing against the file's content."""
DECODING_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SafetensorError,
    TypeError,
    ValueError,
    zlib.error,
)
"""Errors raised by conversions of JSON or packed arrays that are not as they were written."""

SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT) WITHOUT ROWID;
CREATE TABLE groups (
    group_id INTEGER PRIMARY KEY, epoch INTEGER, position INTEGER, prompt_id INTEGER, attempt INTEGER, reroll INTEGER,
    version INTEGER, state TEXT, step INTEGER, reason TEXT,
    reward REAL, reward_std REAL, best_reward REAL, num_rollouts INTEGER, num_tokens INTEGER, num_loss_tokens INTEGER,
    oldest_version INTEGER, engine TEXT, generate_s REAL, score_s REAL,
    admitted_at REAL, generated_at REAL, scored_at REAL, assigned_at REAL, trained_at REAL);
CREATE INDEX groups_by_state ON groups (state, step);
CREATE INDEX groups_by_step ON groups (step);
CREATE INDEX groups_by_place ON groups (epoch, position, reroll);
CREATE TABLE payloads (group_id INTEGER PRIMARY KEY, record TEXT);
CREATE TABLE tokens (group_id INTEGER PRIMARY KEY REFERENCES payloads ON DELETE CASCADE, arrays BLOB);
CREATE TABLE differences (group_id INTEGER PRIMARY KEY REFERENCES payloads ON DELETE CASCADE, halves BLOB);
CREATE TABLE replays (group_id INTEGER PRIMARY KEY, step INTEGER);
CREATE TABLE skipped (
    epoch INTEGER, position INTEGER, prompt_id INTEGER, reason TEXT, PRIMARY KEY (epoch, position)) WITHOUT ROWID;
CREATE TABLE steps (step INTEGER PRIMARY KEY, metrics TEXT, ended_at REAL, times INTEGER, last INTEGER);
CREATE TABLE events (id INTEGER PRIMARY KEY, time REAL, kind TEXT, subject TEXT, message TEXT);
"""


class _Connection(sqlite3.Connection):
    """Connection that stores any text; what UTF-8 can't express, lone surrogates, becomes a backslash escape."""

    def execute(self, query: str, values: Any = (), /) -> sqlite3.Cursor:
        try:
            return super().execute(query, values)
        except UnicodeEncodeError:  # raised before anything is executed
            return super().execute(query, [_storable(value) for value in values])

    def executemany(self, query: str, rows: Any, /) -> sqlite3.Cursor:
        return super().executemany(query, ([_storable(value) for value in row] for row in rows))


def _storable(value: Any) -> Any:
    return storable(value) if isinstance(value, str) else value


class Database:
    """The SQLite file at ``path``, which a writer creates; raises ``LedgerError`` if it can't be read or written.

    Whatever is wrong with its content raises ``LedgerDamaged``. A reader may declare that the file is ``at_rest``, so
    that SQLite leaves no files beside it.
    """

    def __init__(self, path: Path, *, read_only: bool, at_rest: bool) -> None:
        self.path = path
        self._writer: str | None = None
        with self._errors():
            self._connection = _connect(path, read_only=read_only, at_rest=at_rest)
            if not read_only:
                self._make_tables()
            schema = self.get("schema")
            if schema is None and not self.rows("SELECT 1 FROM sqlite_master"):
                raise LedgerDamaged(
                    f"the ledger {path} is empty: if its run has just begun, look again, or else start it again, or "
                    f"use the copy, {run_files.LEDGER}, in one of its checkpoints",
                    NO_LEDGER,
                )
            if schema is None:
                raise self.damaged(NO_LEDGER)
            if schema not in (SCHEMA_VERSION, WITH_EPISODES):
                problem = f"schema {schema}, not {SCHEMA_VERSION} or {WITH_EPISODES}"
                raise LedgerDamaged(
                    f"{path} is not a ledger of this version of rlpipe ({problem}): use the version that wrote it, or "
                    "another output folder",
                    problem,
                )

    def close(self) -> None:
        self._connection.close()

    def get(self, key: str) -> Any:
        """Return a value of the run as a whole, or None."""
        if not self.rows("SELECT 1 FROM sqlite_master WHERE name = 'meta'"):
            return None
        rows = self.rows("SELECT value FROM meta WHERE key = ?", key)
        with self.decoding(key):
            value = json.loads(rows[0][0]) if rows else None
        if not isinstance(value, SETTINGS.get(key, object) | None):
            raise self.damaged(f"{key} is of the type {type(value).__name__}, not {SETTINGS[key].__name__}")
        return value

    def damaged(self, problem: str) -> LedgerDamaged:
        """Return the error that says what is damaged, and what to do."""
        return LedgerDamaged(
            f"the ledger {self.path} is damaged ({problem}): use the copy, {run_files.LEDGER}, in one of its "
            "run's checkpoints, or begin a new run with another output",
            problem,
        )

    @contextmanager
    def decoding(self, subject: str) -> Iterator[None]:
        """Turn the errors of decoding what a row holds into ``LedgerDamaged``, which names the ``subject``."""
        try:
            yield
        except DECODING_ERRORS as error:
            raise self.damaged(f"{subject} can't be read: {type(error).__name__}: {error}") from error

    def set(self, **values: Any) -> None:
        with self._transaction():
            self._set(**values)

    def take_over(self) -> None:
        """Make all changes fail that another process of the run still tries to write, such as a dead driver's actor."""
        writer = uuid4().hex
        self.set(writer=writer, writers=[*self.writers, writer])
        self._writer = writer

    @property
    def writers(self) -> list[str]:
        """Ids of the processes that have taken over the ledger, in turn; of two copies that went on, they differ."""
        return self.get("writers") or []

    def set_missing(self, **values: Any) -> None:
        """Set those of the values that are not there yet."""
        with self._transaction():
            self._set(**{key: value for key, value in values.items() if self.get(key) is None})

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return the rows that any query selects."""
        with self._errors():
            return self._connection.execute(query, values).fetchall()

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Hold a read transaction, in which all queries see one state, whatever is written meanwhile."""
        with self._errors():
            self._connection.execute("BEGIN")
        try:
            yield
        finally:
            self._connection.rollback()

    def back_up(self, target: Path) -> None:
        """Write a consistent copy to ``target``; may run on a thread of its own."""
        with self._errors(), closing(_connect(self.path, read_only=True)) as source:
            (pages,), (page_bytes,) = (source.execute(f"PRAGMA page_{n}").fetchone() for n in ("count", "size"))
            target.unlink(missing_ok=True)  # of a process that died meanwhile
            check_room(target.parent, pages * page_bytes)
            source.execute("VACUUM INTO ?", (str(target),))  # takes room there alone, and none for temporary files
            with target.open("rb") as copy:
                os.fsync(copy.fileno())

    def _make_tables(self) -> None:
        with self._transaction():
            if not self.rows("SELECT 1 FROM sqlite_master"):
                for statement in filter(str.strip, SCHEMA.split(";")):
                    self._connection.execute(statement)
                self._set(schema=SCHEMA_VERSION)
            # Ledgers of earlier versions do not have all tables and indices.
            elif self.get("schema") in (SCHEMA_VERSION, WITH_EPISODES):
                for statement in filter(str.strip, SCHEMA.split(";")):
                    kind = "TABLE" if "CREATE TABLE" in statement else "INDEX"
                    self._connection.execute(statement.replace(f"CREATE {kind}", f"CREATE {kind} IF NOT EXISTS"))

    def _set(self, **values: Any) -> None:
        self._connection.executemany(
            "INSERT OR REPLACE INTO meta VALUES (?, ?)", [(key, json.dumps(value)) for key, value in values.items()]
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                if self._writer is not None and self._writer != self.get("writer"):
                    raise LedgerError(f"another process has taken over the ledger {self.path}; this one has to stop")
                yield
            except BaseException:
                if self._connection.in_transaction:  # a full disk has rolled it back already
                    self._connection.rollback()
                raise
            self._connection.execute("COMMIT")

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, OverflowError, UnicodeDecodeError) as error:
            code = getattr(error, "sqlite_errorcode", None)
            if isinstance(error, OSError) or (code is not None and code & 0xFF in ENVIRONMENT):
                fix = "check its disk and permissions, and try again"
                if code == sqlite3.SQLITE_PROTOCOL:  # as on network file systems, which lock in another way
                    fix = "set ledger.folder to a folder on a local disk"
                elif code == sqlite3.SQLITE_TOOBIG:
                    fix = "a group has over 1 GB: set a smaller algorithm.group_size or rollout.sampling.max_tokens"
                raise LedgerError(f"the ledger {self.path} can't be used: {error}; {fix}") from error
            raise self.damaged(str(error)) from error


def _connect(path: Path, *, read_only: bool, at_rest: bool = False) -> sqlite3.Connection:
    """Open a connection with explicit transactions.

    ``synchronous=NORMAL`` loses no commit when a process dies; when the machine does, it may lose the newest ones.

    For a reader, SQLite creates an empty log beside the file if there is none. It must not for a ledger ``at_rest``,
    and can't in a folder that is not writable. Without a log nobody writes, so the file is then read as immutable.
    """
    if read_only:
        has_log = path.with_name(f"{path.name}-wal").exists()
        is_immutable = not has_log and (at_rest or not os.access(path.parent, os.W_OK))
        mode = "ro&immutable=1" if is_immutable else "ro"
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode={mode}", uri=True, isolation_level=None)
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=_Connection)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA foreign_keys = ON")
    return connection

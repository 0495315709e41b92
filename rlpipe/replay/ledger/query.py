"""Queries of a run's ledger, and the search for damage in its pages, tables, columns, values and groups."""

from __future__ import annotations

import json
import math
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

from rlpipe.common import run_files
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.errors import DataError, LedgerDamaged, LedgerError
from rlpipe.replay.ledger.database import SCHEMA, SETTINGS, stored_prompt
from rlpipe.replay.ledger.run_ledger import GroupState, Ledger, LedgerEvent
from rlpipe.types import NO_VERSION, ChatMessages

WANTED = "specify the output folder of a reinforcement learning run, one of its checkpoints, or a .sqlite file"
ADDED = ("differences",)
"""Tables that ledgers of earlier versions lack, until a run writes to them again."""
MAY_BE_NULL = ("groups", "ended_at")
"""Tables and columns that may hold NULL; what a group must have depends on its state, which ``audit`` checks."""
TICKET = ("epoch", "position", "prompt_id", "attempt", "reroll", "version")
"""Columns of every group that a run continues with."""
FINITE, IN_CALENDAR = "-1.7976931348623157e308 AND 1.7976931348623157e308", "0 AND 253402300799"
"""Ranges of real numbers, and of times in seconds since 1970, which end with the year 9999."""


def ledger_path(output: Path, name: str, folder: str | None) -> Path:
    """Return the ledger's path on the replay actor's machine, for the run ``name``; ``folder`` is ``ledger.folder``."""
    return (output if folder is None else Path(folder) / name).absolute() / run_files.LEDGER


def find_ledger(run: Path) -> Path:
    """Return the ledger of a run's folder or a checkpoint, or the file itself; raise ``DataError`` if there is none."""
    if run.is_file():
        return run
    if not run.is_dir():
        raise DataError(f"{run} does not exist: {WANTED}")
    config = _read_config(run / run_files.CONFIG)
    folder = config.get("ledger", {}).get("folder")
    path = ledger_path(run, str(config.get("name")), folder and str(_start_folder(run, config) / folder))
    if path.is_file():
        return path
    if (kind := config.get("algorithm", {}).get("kind", "rl")) != "rl":
        raise DataError(f"{run} is a run with algorithm.kind={kind}, which keeps no ledger: {WANTED}")
    if folder is not None:
        raise DataError(
            f"the ledger {path} (ledger.folder) is not on this machine: inspect it on the replay actor's machine, or "
            f"specify a checkpoint in {run / run_files.CHECKPOINTS}, which has a copy"
        )
    raise DataError(f"{run} has no {run_files.LEDGER}: {WANTED}")


def _start_folder(run: Path, config: dict[str, Any]) -> Path:
    """Return the folder that a run was started in, if its relative ``output`` shows that, or else the current one."""
    parts, names = run.absolute().parts, Path(str(config.get("output"))).parts
    return Path(*parts[: -len(names)]) if parts[-len(names) :] == names else Path.cwd()


def _read_config(path: Path) -> dict[str, Any]:
    """Return the resolved config of a run, or an empty dict if there is none, as in a checkpoint."""
    if not path.is_file():
        return {}
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        tree = OmegaConf.to_container(OmegaConf.load(path))
    except (YAMLError, OmegaConfBaseException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {' '.join(str(error).split())}") from None
    sections = [tree.get(name, {}) for name in ("ledger", "algorithm")] if isinstance(tree, dict) else []
    if not isinstance(tree, dict) or not all(isinstance(section, dict) for section in sections):
        raise DataError(f"{path} holds no options: it is not the {run_files.CONFIG} of a run")
    return {str(key): value for key, value in tree.items()}


@contextmanager
def reading(path: Path, *, check: bool = True) -> Iterator[Ledger]:
    """Yield the ledger in one state, whatever is written meanwhile; raise ``DataError`` if it can't be read.

    No file appears beside the ledger of a run that has ended.
    Without ``check``, its values are not compared with the schema, which takes a second for 200,000 groups.
    """
    try:
        with closing(Ledger(path, read_only=True, at_rest=True)) as ledger, ledger.snapshot():
            if check:
                check_values(ledger)
            yield ledger
    except LedgerError as error:
        raise DataError(str(error)) from error


MODEL_OPTIONS = ("path", "tokenizer", "revision", "trust_remote_code")


def stored_model(ledger: Ledger) -> ModelConfig | None:
    """Return the model of the run's config, or None if there is no config."""
    config = ledger.get("config")
    if config is None:
        return None
    with ledger.decoding("the model in config"):
        return ModelConfig(**{name: config["model"][name] for name in MODEL_OPTIONS})


SORT_KEYS = {
    "id": "group_id",
    "step": "step",
    "prompt": "prompt_id",
    "reward": "reward",
    "std": "reward_std",
    "best": "best_reward",
    "staleness": "step - nullif(oldest_version, -1)",
    "tokens": "num_tokens",
    "generate": "generate_s",
    "score": "score_s",
}
"""Names of sort keys for groups, with their SQL expressions."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupRow:
    """The ledger's record of one group; the fields up to ``trained_at`` are columns of the table."""

    group_id: int
    epoch: int
    position: int
    prompt_id: int
    attempt: int
    reroll: int
    version: int
    state: str
    step: int | None
    reason: str | None
    reward: float | None
    reward_std: float | None
    best_reward: float | None
    num_rollouts: int | None
    num_tokens: int | None
    num_loss_tokens: int | None
    oldest_version: int | None
    engine: str | None
    generate_s: float | None
    score_s: float | None
    admitted_at: float | None
    generated_at: float | None
    scored_at: float | None
    assigned_at: float | None
    trained_at: float | None
    replayed_in: int | None
    """Later step that trained the group again."""
    prompt: str | ChatMessages | None
    """The prompt, or None if the group's tokens are dropped, or not there yet."""

    @property
    def staleness(self) -> int | None:
        """Number of versions from the one that sampled the oldest token to the step's."""
        if self.step is None or self.oldest_version in (None, NO_VERSION):
            return None
        return self.step - (self.oldest_version or 0)

    @property
    def is_dropped(self) -> bool:
        """Whether the group's tokens were stored once, and are dropped now."""
        return self.prompt is None and self.generated_at is not None

    @property
    def why_no_tokens(self) -> str:
        if self.state == "DISCARDED":
            return "the tokens of discarded groups are not kept"
        if self.is_dropped:
            return "its tokens were dropped (ledger.keep_steps)"
        return "it has no tokens yet"


@dataclass(kw_only=True, slots=True, frozen=True)
class StepRow:
    """A step that was trained or, as the run's last one, compared; step 0 makes version 1."""

    step: int
    times: int
    """Number of times that the step was trained; more than one only after a crash."""
    ended_at: float
    last: bool
    metrics: dict[str, float]


@dataclass(kw_only=True, slots=True, frozen=True)
class GroupFilter:
    """Filter for groups; bounds are inclusive, and None matches any value."""

    group_id: int | None = None
    first_step: int | None = None
    last_step: int | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    states: tuple[str, ...] = ()
    epoch: int | None = None
    prompt_id: int | None = None

    def condition(self) -> tuple[str, list[Any]]:
        """Return the filter as an SQL condition and its parameters."""
        compared = {
            "group_id = ?": self.group_id,
            "step >= ?": self.first_step,
            "step <= ?": self.last_step,
            "reward >= ?": self.least_reward,
            "reward <= ?": self.most_reward,
            "epoch = ?": self.epoch,
            "prompt_id = ?": self.prompt_id,
        }
        active = {test: value for test, value in compared.items() if value is not None}
        tests = [*active, *([f"state IN ({', '.join('?' * len(self.states))})"] if self.states else [])]
        return " AND ".join(tests) or "1", [*active.values(), *self.states]


def find_groups(
    ledger: Ledger, wanted: GroupFilter, *, sort: str = "id", ascending: bool = False, limit: int | None = None
) -> list[GroupRow]:
    """Return the first ``limit`` groups, sorted by a key of ``SORT_KEYS``; groups without a value come last."""
    condition, values = wanted.condition()
    order = f"{SORT_KEYS[sort]} {'ASC' if ascending else 'DESC'}"
    return _read_groups(ledger, condition, values, f"({SORT_KEYS[sort]}) IS NULL, {order}, group_id DESC", limit)


def read_groups(ledger: Ledger, group_ids: Iterable[int]) -> list[GroupRow]:
    """Return the groups with these ids that the ledger has, in the order of their ids."""
    return _read_groups(ledger, f"group_id IN ({', '.join(map(str, group_ids))})", [], "group_id")


def _read_groups(
    ledger: Ledger, condition: str, values: list[Any], order: str, limit: int | None = None
) -> list[GroupRow]:
    names = [entry.name for entry in fields(GroupRow)]
    chosen = f"SELECT * FROM groups WHERE {condition} ORDER BY {order} LIMIT ?"
    rows = ledger.rows(
        f"SELECT {', '.join(f'chosen.{name}' for name in names[:-2])},"
        " (SELECT step FROM replays WHERE replays.group_id = chosen.group_id),"
        " (SELECT record FROM payloads WHERE payloads.group_id = chosen.group_id)"
        f" FROM ({chosen}) AS chosen ORDER BY {order}",
        *values,
        -1 if limit is None else limit,
    )
    groups = []
    for *values, record in rows:
        with ledger.decoding(f"group {values[0]}"):
            prompt = None if record is None else stored_prompt(json.loads(record))
        groups.append(GroupRow(**dict(zip(names, [*values, prompt], strict=True))))
    return groups


def find_steps(
    ledger: Ledger, *, first: int = 0, last: int | None = None, after: float = 0.0, limit: int | None = None
) -> list[StepRow]:
    """Return the newest ``limit`` steps that ended later than ``after``, in the order in which they ended."""
    rows = ledger.rows(
        "SELECT step, times, ended_at, last, metrics FROM steps WHERE step >= ? AND step <= ? AND ended_at > ?"
        " ORDER BY ended_at DESC LIMIT ?",
        first,
        2**62 if last is None else last,
        after,
        -1 if limit is None else limit,
    )
    return [
        StepRow(step=step, times=times, ended_at=ended_at, last=bool(last), metrics=ledger.metrics(step, text))
        for step, times, ended_at, last, text in reversed(rows)
    ]


def has_ended(ledger: Ledger) -> bool:
    """Return whether the run has finished; a run that was only stopped has not."""
    return bool(ledger.rows("SELECT 1 FROM steps WHERE last AND ended_at IS NOT NULL"))


Row = GroupRow | StepRow | LedgerEvent
ROW_TYPES = {GroupRow: "group", StepRow: "step", LedgerEvent: "event"}


def to_tree(row: Row) -> dict[str, Any]:
    """Return a row as a dict for JSON, with its ``type``; metrics that are NaN or infinite become None."""
    tree: dict[str, Any] = {"type": ROW_TYPES[type(row)], **asdict(row)}
    if isinstance(row, GroupRow):
        tree["staleness"] = row.staleness
    if isinstance(row, StepRow):
        tree["metrics"] = {name: value if math.isfinite(value) else None for name, value in row.metrics.items()}
    return tree


KNOWN_SINCE = "max(coalesce(admitted_at, 0), coalesce(scored_at, 0))"


class Feed:
    """Feed of rows that are new in a ledger since the last look, even if a copy has replaced the ledger in between.

    A group is new once it passes the filter; if the filter names no state, its rewards must be known, or it must be
    discarded. Steps have to be within the filter's bounds of steps. Rows that are there at the first look are not new.
    """

    def __init__(self, wanted: GroupFilter) -> None:
        self._condition, self._values = wanted.condition()
        self._first_step, self._last_step = wanted.first_step or 0, wanted.last_step
        if not wanted.states:
            self._condition += " AND state NOT IN ('ADMITTED', 'GENERATED')"
        self._file: tuple[int, int] | None = None
        self._floor = 0
        self._shown: set[int] = set()
        self._newest_group = self._newest_step = self._newest_event = 0.0
        self._last_event = 0

    def look(self, ledger: Ledger, file: tuple[int, int]) -> list[Row]:
        """Return new groups, then steps, then events; ``file`` distinguishes ledgers at the same path."""
        if self._file is None:
            self._newest_group, self._newest_step, self._newest_event = ledger.rows(
                f"SELECT (SELECT coalesce(max({KNOWN_SINCE}), 0) FROM groups),"
                " (SELECT coalesce(max(ended_at), 0) FROM steps), (SELECT coalesce(max(time), 0) FROM events)"
            )[0]
            self._floor = _first_open(ledger)
        if file != self._file:
            self._file = file
            self._skip_groups(ledger)
        open_groups = dict(self._open_groups(ledger))
        groups = read_groups(ledger, [group_id for group_id in open_groups if group_id not in self._shown])
        steps = find_steps(ledger, first=self._first_step, last=self._last_step, after=self._newest_step)
        events = ledger.events(self._last_event)
        self._newest_group = max([self._newest_group, *open_groups.values()])
        self._newest_step = max([self._newest_step, *(step.ended_at for step in steps)])
        if events:
            self._last_event, self._newest_event = events[-1].number, events[-1].time
        self._floor = _first_open(ledger)
        self._shown = {group_id for group_id in open_groups if group_id >= self._floor}
        return [*groups, *steps, *events]

    def _skip_groups(self, ledger: Ledger) -> None:
        """Mark as seen what was written to the ledger up to the newest rows that have been looked at."""
        self._floor = min(self._floor, _first_open(ledger))
        self._shown = {group_id for group_id, since in self._open_groups(ledger) if since <= self._newest_group}
        query = "SELECT coalesce(max(id), 0) FROM events WHERE time <= ?"
        self._last_event = ledger.rows(query, self._newest_event)[0][0]

    def _open_groups(self, ledger: Ledger) -> list[tuple[int, float]]:
        """Return the wanted groups that could still change at the last look, with the times when they became known."""
        query = f"SELECT group_id, {KNOWN_SINCE} FROM groups WHERE {self._condition} AND group_id >= ?"
        return [(group_id, since) for group_id, since in ledger.rows(query, *self._values, self._floor)]


def _first_open(ledger: Ledger) -> int:
    """Return the id of the first group that can still change, or else of the next group to come."""
    states = "('ADMITTED', 'GENERATED', 'SCORED', 'ASSIGNED')"
    first: int | None = ledger.rows(f"SELECT min(group_id) FROM groups WHERE state IN {states}")[0][0]
    return ledger.next_group_id() if first is None else first


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
        existing = [name for _, name, *_ in ledger.rows(f"PRAGMA table_info({table})")]
        if not existing and table in ADDED:
            continue
        if existing != list(columns):
            problem = f"has the columns {', '.join(existing)}" if existing else "is missing"
            raise ledger.damaged(f"table {table} {problem}")
        cases = " ".join(f"WHEN NOT ({test}) THEN '{name}'" for name, test in columns.items())
        key = next(iter(columns))
        query = f"SELECT {key}, CASE {cases} END AS wrong FROM {table} WHERE wrong IS NOT NULL LIMIT 1"
        for row, name in ledger.rows(query):
            raise ledger.damaged(f"{table}.{name} is of the wrong type or out of range where {key} is {row!r:.40}")
    for name in SETTINGS:
        ledger.get(name)
    _ = ledger.cursor, ledger.checkpoint_step


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

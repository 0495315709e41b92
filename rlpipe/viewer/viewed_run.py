"""A run that is viewed: what its folder holds, read anew whenever its files change."""

from __future__ import annotations

import json
import math
import socket
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import yaml

from rlpipe.common import run_files
from rlpipe.common.atomic_io import is_held
from rlpipe.common.imports import describe_error
from rlpipe.common.temporary_folders import ScratchFolder
from rlpipe.doctor.diagnosis import diagnose
from rlpipe.errors import DataError, InputError, LedgerError, ModelError
from rlpipe.replay.ledger.query import GroupRow, find_ledger, read_groups, stored_model
from rlpipe.replay.ledger.run_ledger import Ledger
from rlpipe.tracking.jsonl import LoggedTexts
from rlpipe.tracking.outcome import RUNNING, RunOutcome, read_outcome
from rlpipe.tracking.part_states import read_parts
from rlpipe.viewer import run_events
from rlpipe.viewer.group_detail import MAX_TOKENS, describe_group, describe_logged, describe_texts
from rlpipe.viewer.group_index import GroupIndex, shown_start
from rlpipe.viewer.group_query import GroupPage, GroupQuery, count_groups, find_choices, find_page
from rlpipe.viewer.metric_series import MetricSeries
from rlpipe.viewer.run_folders import distinct_names, find_runs, index_path
from rlpipe.viewer.run_tokenizer import open_tokenizer

FILES = (
    run_files.METRICS,
    run_files.OUTCOME,
    run_files.PARTS,
    run_files.COMPLETIONS,
    run_files.EVALUATIONS,
    run_files.EVENTS,
)
HELD_OUT = "HELD OUT"
"""State of an answer to a held-out prompt, which is in no ledger."""
SILENT = "silent"
"""State of a run on another machine that has written nothing for a while, and may go on."""
QUIET_S = 120.0
"""Seconds without a change of any file after which a run without a record of its end counts as ended."""
CLOCK_S = 2.0
"""Seconds by which the start of a process may seem later than what it wrote."""
DIAGNOSIS_S = 20.0
"""Shortest time between two diagnoses of a run that goes on."""
TOKENIZER_S = 10.0
"""Seconds after which a tokenizer that can't be loaded is tried again."""


class NotInRun(DataError):
    """A group, an image or a run that is asked for, and does not exist."""


class ViewedRun:
    """A run's folder, or the path of a ledger; raises ``DataError`` for what can't be read."""

    def __init__(self, path: Path, name: str, *, trusted: bool = False) -> None:
        self.path, self.name, self._trusted = path, name, trusted
        self.folder = path if path.is_dir() else path.parent
        self.series = MetricSeries(self.folder / run_files.METRICS)
        self.index: GroupIndex | None = None
        self.why_no_ledger = ""
        self._ledger_path: Path | None = None
        self._scratch: ScratchFolder | None = None
        self._looked_in: Any = None
        """State of the places where no ledger was found."""
        self._indexed_states: tuple[Any, ...] = ()
        """State of the files whose content is known."""
        self._read_states: tuple[Any, ...] = ()
        """State of the files whose metrics are known; groups may be unread, or unreadable."""
        self.revision = 0
        """Number that grows whenever a file of the run has changed."""
        self.problem = ""
        """Why the run could not be read at the last look."""
        self._changed_at = 0.0
        self._cached_algorithm: Mapping[str, Any] | None = None
        self._tokenizer: tuple[Any, str, float] = (None, "", 0.0)
        """Tokenizer or None, why it can't be loaded, and when that was tried last; 0 if never."""
        self._tokenizer_run: Any = None
        """Id of the run that the tokenizer is of."""
        self._diagnosing = threading.Lock()
        waiting = {"subject": "run", "status": "skipped", "text": "it is being examined", "fix": ""}
        self._diagnosis: tuple[tuple[int, str], float, list[dict[str, str]]] = ((-1, ""), -math.inf, [waiting])

    # Files --------------------------------------------------------------------------------------------------------

    def read_metrics(self) -> None:
        """Read the metrics alone, which the first view shows."""
        self.series.update()
        self._find_ledger()
        self._changed_at = _last_change(map(_state, self._files()))
        self.revision += 1

    def refresh(self, stopped: Callable[[], bool] = lambda: False) -> bool:
        """Read what is new in the run's files until ``stopped``; return whether nothing is left."""
        self.read_new()
        return self._index_new(stopped)

    def read_new(self) -> None:
        """Read what is new in the files other than the ledger, which takes no time."""
        self._find_ledger()
        file_states = tuple(map(_state, self._files()))
        if file_states != self._read_states:
            self.series.update()
            self._cached_algorithm = None  # a run may be made longer when it is resumed
            self._changed_at = _last_change(file_states)
            self.revision += 1  # the curves are new, also if no index can be written
            self._read_states = file_states

    def _index_new(self, stopped: Callable[[], bool]) -> bool:
        file_states = tuple(map(_state, self._files()))
        if file_states == self._indexed_states:
            return True
        if self._ledger_path is not None and self.index is not None:
            file = self._ledger_path.stat()
            with self.ledger() as ledger:
                # A file that takes the place of a removed one may get its number.
                self.index.update(ledger, (file.st_dev, file.st_ino, ledger.get("run_id")), stopped)
        if stopped():  # pages show how far it is
            self._indexed_states = ()
            return False
        self._indexed_states = file_states
        self.revision += 1
        return True

    def _find_ledger(self) -> None:
        """Look for the ledger until it is found, again where it was missing once the config or the folder changes."""
        place = (_state(self.folder / run_files.CONFIG), _state(self.folder))
        if self._ledger_path is not None or place == self._looked_in:
            return
        self._looked_in = place
        try:
            self._ledger_path = find_ledger(self.path)
            self.index = self._open_index(index_path(self._ledger_path))
            with self.ledger() as ledger:
                self.index.num_groups = ledger.next_group_id()
        except DataError as error:
            self.why_no_ledger = str(error)
        except (OSError, sqlite3.Error) as error:
            self.why_no_ledger = f"the index of its groups can't be written: {error}"
            self._ledger_path, self._looked_in = None, None  # it is tried again

    def leave_ledger(self, reason: str) -> None:
        """Show the run without its ledger, which can't be read."""
        self._ledger_path, self.index, self.why_no_ledger = None, None, reason

    def _open_index(self, path: Path) -> GroupIndex:
        """Return the index in the user's cache, or in a temporary folder if nothing can be written there."""
        try:
            return GroupIndex(path, self.folder)
        except (OSError, sqlite3.Error):
            self._scratch = ScratchFolder("rlpipe-view-")
            return GroupIndex(Path(self._scratch.path) / path.name, self.folder)

    def _files(self) -> list[Path]:
        ledger = self._ledger_path
        files = [] if ledger is None else [ledger, ledger.with_name(ledger.name + "-wal")]
        return [*files, *(self.folder / name for name in FILES)]

    @contextmanager
    def ledger(self) -> Iterator[Ledger]:
        """Yield the ledger; each query sees the newest state, and no transaction is held in between."""
        if self._ledger_path is None:
            raise DataError(self.why_no_ledger or f"{self.path} has no ledger")
        try:
            with closing(Ledger(self._ledger_path, read_only=True, at_rest=True)) as ledger:
                yield ledger
        except LedgerError as error:
            raise DataError(str(error)) from error

    # The run as a whole -------------------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the run's name, state and size."""
        outcome = read_outcome(self.folder)
        index, state = self.index, self._state(outcome)
        has_ended = state not in (RUNNING, SILENT)
        return {
            "name": self.name,
            "path": str(self.path),
            "revision": self.revision,
            "state": state,
            "error": "" if outcome is None or outcome.message is None else f"{outcome.error}: {outcome.message}",
            "began_at": None if outcome is None else outcome.began_at,
            "ended_at": (outcome.ended_at or self._changed_at) if outcome is not None and has_ended else None,
            "step": self.series.last_step,
            "num_steps": self._num_steps,
            "reward": self.series.latest("reward"),
            "accuracy": self.series.latest("eval/accuracy"),
            "tokens_per_second": self.series.latest("tokens_per_second"),
            "num_groups": 0 if index is None else index.num_groups,
            "num_indexed": 0 if index is None else index.num_indexed,
            "has_evaluations": (self.folder / run_files.EVALUATIONS).is_file(),
            "problem": self.problem,
            "why_no_ledger": self.why_no_ledger if index is None else "",
        }

    def _state(self, outcome: RunOutcome | None) -> str:
        if outcome is None:
            return RUNNING if time.time() - self._changed_at < QUIET_S else "ended"
        if outcome.state != RUNNING:
            return outcome.state
        if outcome.host == socket.gethostname():
            # The process of a command that holds the folder may be in a container with this host's name.
            return RUNNING if _is_alive(outcome) or is_held(self.folder) else "killed"
        return RUNNING if time.time() - self._changed_at < QUIET_S else SILENT

    @property
    def _algorithm(self) -> Mapping[str, Any]:
        """The run's section ``algorithm``, from its ledger or else its config; empty if neither can be read."""
        section = self._cached_algorithm
        if section is None:
            with suppress(DataError, LookupError, TypeError), self.ledger() as ledger:
                section = ledger.get("config")["algorithm"]
        if section is None:  # a run on rows has no ledger
            with suppress(OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
                section = yaml.safe_load((self.folder / run_files.CONFIG).read_text())["algorithm"]
        self._cached_algorithm = section
        return section if isinstance(section, Mapping) else {}

    @property
    def _num_steps(self) -> int | None:
        number = self._algorithm.get("num_steps")
        return number if isinstance(number, int) else None

    def diagnosis(self) -> list[dict[str, str]]:
        """Return what the doctor says about the run, at most every ``DIAGNOSIS_S`` seconds anew.

        While one request examines the run, others get the lines of before.
        """
        last_key, made_at, _ = self._diagnosis
        key = (self.revision, self._state(read_outcome(self.folder)))
        is_due = key != last_key and (key[1] != RUNNING or time.monotonic() - made_at > DIAGNOSIS_S)
        if is_due and self._diagnosing.acquire(blocking=False):
            try:
                lines = self._diagnose()
                self._diagnosis = (key, time.monotonic(), lines)
            finally:
                self._diagnosing.release()
        return self._diagnosis[2]

    def _diagnose(self) -> list[dict[str, str]]:
        try:
            findings = diagnose(self.folder, reads_contents=False)  # which takes a live run's disk from it
            return [{**asdict(finding), "status": finding.status.value} for finding in findings]
        except Exception as error:  # noqa: BLE001 - files of a run may hold anything
            return [{"subject": "run", "status": "skipped", "text": describe_error(error), "fix": ""}]

    def parts(self) -> dict[str, Any]:
        """Return the parts' states, and when they were seen last, the groups by state, and the work of each engine."""
        seen_at, parts = read_parts(self.folder) or (None, [])
        content: dict[str, Any] = {"time": seen_at, "now": time.time(), "parts": [asdict(part) for part in parts]}
        if self.index is None:
            return content
        with self.ledger() as ledger:
            engines = ledger.rows(
                "SELECT engine, count(*), max(oldest_version), avg(generate_s), max(generated_at) FROM groups"
                " WHERE engine IS NOT NULL GROUP BY engine ORDER BY engine"
            )
            states = ledger.counts()
        names = ("engine", "groups", "version", "seconds", "last")
        return content | {"states": states, "engines": [dict(zip(names, row, strict=True)) for row in engines]}

    def events(self, *, before: int | None = None, kind: str = "", limit: int = 200) -> dict[str, Any]:
        """Return the newest events before one, the kinds of events, why groups were discarded, and the commands."""
        if (log := self._events_log) is not None:
            content = run_events.logged_events(log, before, kind, limit)
        else:
            with self.ledger() as ledger:
                content = run_events.ledger_events(ledger, before, kind, limit)
        commands = self._commands()
        kinds = content["kinds"] | Counter(event["kind"] for event in commands)
        with_steps = {name: self._with_steps(content[name]) for name in ("events", "discarded")}
        return content | with_steps | {"kinds": kinds, "commands": commands}

    def marks(self) -> list[dict[str, Any]]:
        """Return the events for the marks above curves."""
        if (log := self._events_log) is not None:
            marks = run_events.logged_marks(log)
        else:
            with self.ledger() as ledger:
                marks = run_events.ledger_marks(ledger)
        return [*self._with_steps(marks), *self._commands()]

    @property
    def _events_log(self) -> Path | None:
        """The file with the events of a run without a ledger."""
        log = self.folder / run_files.EVENTS
        is_on_rows = self._algorithm.get("kind", "rl") != "rl"  # one without any event has no file of them
        return log if self.index is None and (log.is_file() or is_on_rows) else None

    def _commands(self) -> list[dict[str, Any]]:
        outcome = read_outcome(self.folder)
        return self._with_steps(run_events.command_events(outcome, self._state(outcome), self._changed_at))

    def _with_steps(self, events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [{"step": self.series.step_at(event["time"]), **event} for event in events]

    # Groups -------------------------------------------------------------------------------------------------------

    def groups(self, query: GroupQuery, size: int) -> dict[str, Any]:
        """Return a page of the table of groups."""
        index = self.needed_index()
        with self.ledger() as ledger:
            page = _newest(ledger, query, size) if query.is_plain else find_page(index, query, size)
        return {
            "rows": self.rows_of(page.group_ids),
            "after": None if page.after is None else f"{page.after[0]!r}|{page.after[1]}",
            "num_groups": index.num_groups,
            "num_indexed": index.num_indexed,
            "num_known": index.num_known,
        }

    def count(self, query: GroupQuery) -> int:
        """Return the number of groups that match, up to a bound beyond which they are not counted."""
        if query.is_plain:
            with self.ledger() as ledger:
                return ledger.next_group_id()
        return count_groups(self.needed_index(), query)

    def rows_of(self, group_ids: Sequence[int]) -> list[dict[str, Any]]:
        """Return what the table shows of groups, in the order of their ids here."""
        with self.ledger() as ledger:
            rows = {row.group_id: row for row in read_groups(ledger, group_ids)}
        means = self.needed_index().means(group_ids)
        return [_short(rows[number], means.get(number, {})) for number in group_ids if number in rows]

    def needed_index(self) -> GroupIndex:
        """Return the index of the groups; raise ``DataError`` if the run has no ledger."""
        if self.index is None:
            raise DataError(self.why_no_ledger or f"{self.path} has no ledger")
        return self.index

    def choices(self) -> dict[str, list[str]]:
        """Return the values that the table's filters offer."""
        return find_choices(self.needed_index())

    def group(self, group_id: int, *, most_tokens: int = MAX_TOKENS) -> dict[str, Any]:
        """Return one group in full; raise ``DataError`` if it is not in the ledger.

        An id below 0 stands for an answer to a held-out prompt.
        """
        if group_id < 0:
            return self._held_out(-group_id)
        with self.ledger() as ledger:
            rows = read_groups(ledger, [group_id])
            if not rows:
                raise NotInRun(f"{self.name} has no group {group_id}")
            group, differences = next(iter(ledger.load([group_id])), None), ledger.differences(group_id)
        row = rows[0]
        if group is None:
            logged = LoggedTexts(self.folder).rollouts(row)
            tree = describe_logged(row, logged) if logged else describe_group(row, None, None)
            note = row.why_no_tokens + (f"; its texts are from {run_files.COMPLETIONS}" if logged else "")
            return {**tree, "why_no_tokens": note}
        tokenizer, problem = self._find_tokenizer()
        return {
            **describe_group(row, group, tokenizer, differences=differences, most_tokens=most_tokens),
            "tokenizer_problem": problem,
        }

    def _held_out(self, number: int) -> dict[str, Any]:
        """Return an answer to a held-out prompt as a group of one completion."""
        with self.needed_index().reading() as connection:
            row = connection.execute("SELECT version, reward, row FROM held_out WHERE number = ?", (number,)).fetchone()
        if row is None:
            raise NotInRun(f"{self.name} has no answer {number} to a held-out prompt")
        values = {"group_id": -number, "state": HELD_OUT, "version": row[0], "reward": row[1], "why_no_tokens": ""}
        return {**values, **describe_texts([json.loads(row[2])])}

    def _find_tokenizer(self) -> tuple[Any, str]:
        """Return the tokenizer, or None and why it can't be loaded, which is tried again after ``TOKENIZER_S``."""
        with self.ledger() as ledger:
            run_id = ledger.get("run_id")
        tokenizer, _, tried_at = self._tokenizer
        is_due = tokenizer is None and (not tried_at or time.monotonic() - tried_at > TOKENIZER_S)
        if is_due or run_id != self._tokenizer_run:  # another run may have taken the folder
            self._tokenizer, self._tokenizer_run = (*self._open_tokenizer(), time.monotonic()), run_id
        return self._tokenizer[:2]

    def _open_tokenizer(self) -> tuple[Any, str]:
        try:
            with self.ledger() as ledger:
                model = stored_model(ledger)
            if model is None:
                return None, "the ledger holds no config"
            return open_tokenizer(model, self.folder, trusted=self._trusted), ""
        except (ModelError, DataError) as error:
            return None, str(error)

    def image(self, group_id: int, number: int) -> bytes:
        """Return an image of a group's prompt, encoded as it was stored."""
        with self.ledger() as ledger:
            group = next(iter(ledger.load([group_id])), None)
        if group is None or not 0 <= number < len(group.prompt.images):
            raise NotInRun(f"group {group_id} has no image {number}")
        return group.prompt.images[number].content


def _is_alive(outcome: RunOutcome) -> bool:
    """Return whether the run's driver is alive on this machine, and not a later process with its number."""
    try:
        return psutil.Process(outcome.pid).create_time() <= outcome.began_at + CLOCK_S
    except psutil.Error:
        return False


def _state(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


def _newest(ledger: Ledger, query: GroupQuery, size: int) -> GroupPage:
    """Return a page of all groups by their ids, straight from the ledger, which has that order."""
    sign, order, start = ("<", "DESC", 2**62) if query.descending else (">", "ASC", -1)
    start = start if query.after is None else query.after[1]
    rows = ledger.rows(
        f"SELECT group_id FROM groups WHERE group_id {sign} ? ORDER BY group_id {order} LIMIT ?", start, size + 1
    )
    ids = [row[0] for row in rows]
    after = (float(ids[size - 1]), ids[size - 1]) if len(ids) > size else None
    return GroupPage(group_ids=ids[:size], after=after)


def _last_change(states: Iterable[tuple[int, int, int] | None]) -> float:
    """Return when the newest of some files was written, in seconds since 1970; 0 if there are none."""
    return max((state[1] / 1e9 for state in states if state is not None), default=0.0)


SHOWN = ("group_id", "step", "state", "reason", "reward", "reward_std", "best_reward", "num_rollouts", "engine")


def _short(row: GroupRow, indexed: dict[str, Any]) -> dict[str, Any]:
    """Return what the table shows of a group."""
    sampled = row.num_loss_tokens
    return {
        **{name: getattr(row, name) for name in SHOWN},
        "length": None if sampled is None or not row.num_rollouts else sampled / row.num_rollouts,
        "version": None if row.oldest_version == -1 else row.oldest_version,
        "staleness": row.staleness,
        "prompt": None if row.prompt is None else shown_start(row.prompt),
        **indexed,
    }


class ViewedRuns(list[ViewedRun]):
    """The runs at some paths or below them, later ones after the others; raises ``DataError`` if there are none."""

    def __init__(self, paths: Sequence[Path], *, trusted: bool = False) -> None:
        super().__init__()
        self._paths, self._trusted = paths, trusted
        self._add(find_runs(paths))

    def look(self) -> None:
        """Add the runs that have begun since the last look; those that are known keep their places."""
        for path in self._paths:
            with suppress(InputError, OSError):  # it may have been removed
                self._add(find_runs([path]))

    def _add(self, paths: Sequence[Path]) -> None:
        viewed = {run.path.resolve() for run in self}
        self += [ViewedRun(path, path.name, trusted=self._trusted) for path in paths if path.resolve() not in viewed]
        for run, name in zip(self, distinct_names([run.path for run in self]), strict=True):
            run.name = name

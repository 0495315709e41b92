"""The ledger of a run, in SQLite: the state of every prompt's groups, and the tokens that are still needed.

A group is ADMITTED when its prompt is taken, GENERATED with its tokens, SCORED with its rewards, ASSIGNED once a step
takes it, and TRAINED once a checkpoint after that step is complete; or DISCARDED, with a reason. One process writes,
any number may read. Every change of groups and steps is one transaction and idempotent, so that a call whose answer
was lost can be repeated.
"""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from rlpipe.data.sources.row_source import Cursor, SkipRecord
from rlpipe.errors import LedgerError
from rlpipe.replay.buffer import GroupTicket
from rlpipe.replay.ledger.database import WITH_EPISODES, Database, has_episodes, pack_arrays, pack_record, unpack_group
from rlpipe.replay.step_queue import StepReport
from rlpipe.types import FloatArray, RolloutGroup, ServedRecord

COMPARED = "compared after the last step, not trained"
NO_VARIANCE = "no reward variance"
RELEASED = (
    "algorithm.groups_per_step was changed",
    "replay.max_staleness was lowered",
    "algorithm.num_steps was changed",
    "weights.every_steps was changed",
)
"""Reasons for discarding groups when a run is resumed with changed options."""
MAX_NUMBER = 2**62
"""Bound on numbers in ``meta``, with which queries can count."""
KEPT_DIGESTS = 100
"""Checkpoints whose weights' digests are kept."""


class GroupState(StrEnum):
    ADMITTED = "ADMITTED"
    GENERATED = "GENERATED"
    SCORED = "SCORED"
    ASSIGNED = "ASSIGNED"
    TRAINED = "TRAINED"
    DISCARDED = "DISCARDED"


UNFINISHED = (GroupState.ADMITTED, GroupState.GENERATED, GroupState.SCORED)
"""States of groups that no step has taken yet."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LedgerEvent:
    """Event to show to people, such as a death, a recovery, or a checkpoint that could not be written."""

    number: int
    time: float
    """Time in seconds since 1970."""
    kind: str
    subject: str
    message: str


@dataclass(kw_only=True, slots=True)
class StepGroups:
    """Groups that a step trains."""

    fresh: list[RolloutGroup]
    replayed: list[RolloutGroup] = field(default_factory=list)
    """Groups that an earlier step has trained once."""


class TakenStep(NamedTuple):
    """Ids of the groups that a step trained: its new ones, and those of earlier steps."""

    fresh: list[int]
    replayed: list[int]


class Ledger(Database):
    """Ledger of one run, which keeps tokens of trained groups for ``keep_steps`` steps before the newest checkpoint."""

    def __init__(self, path: Path, *, keep_steps: int = 0, read_only: bool = False, at_rest: bool = False) -> None:
        super().__init__(path, read_only=read_only, at_rest=at_rest)
        self._keep_steps = keep_steps

    # Changes ------------------------------------------------------------------------------------------------------

    def admit(self, groups: Iterable[GroupTicket], cursor: Cursor, skipped: Iterable[SkipRecord] = ()) -> None:
        """Record groups whose prompts are taken, the source's ``cursor`` after them, and ``skipped`` rows."""
        now = time.time()
        with self._transaction():
            self._connection.executemany(
                "INSERT OR IGNORE INTO groups (group_id, epoch, position, prompt_id, attempt, reroll, version, state,"
                " admitted_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                [
                    (g.group_id, g.epoch, g.position, g.prompt_id, g.attempt, g.reroll, g.version, "ADMITTED", now)
                    for g in groups
                ],
            )
            self._connection.executemany(
                "INSERT OR IGNORE INTO skipped VALUES (?, ?, ?, ?)",
                [(row.at.epoch, row.at.position, row.prompt_id, row.reason) for row in skipped],
            )
            if self.cursor < cursor:  # calls may be repeated, and arrive in any order
                self._set(place=[cursor.epoch, cursor.position])

    def generated(self, groups: Iterable[RolloutGroup], *, with_columns: bool = False) -> None:
        """Store the tokens of groups that were admitted, and ``with_columns`` their rows' columns."""
        now = time.time()
        with self._transaction():
            for group in groups:
                if has_episodes(group):
                    self._set(schema=WITH_EPISODES)
                row = (
                    len(group),
                    group.num_tokens,
                    group.num_loss_tokens,
                    group.oldest_version,
                    group.engine,
                    group.generate_s,
                    now,
                    group.group_id,
                )
                changed = self._connection.execute(
                    "UPDATE groups SET state = 'GENERATED', num_rollouts = ?, num_tokens = ?, num_loss_tokens = ?,"
                    " oldest_version = ?, engine = ?, generate_s = ?, generated_at = ?"
                    " WHERE group_id = ? AND state = 'ADMITTED'",
                    row,
                )
                if changed.rowcount:
                    self._connection.execute(
                        "INSERT OR REPLACE INTO payloads VALUES (?, ?)", (group.group_id, pack_record(group))
                    )
                    # A separate table, because SQLite rewrites a row, arrays included, whenever a column changes.
                    arrays = pack_arrays(group, with_columns=with_columns)
                    self._connection.execute("INSERT INTO tokens VALUES (?, ?)", (group.group_id, arrays))

    def scored(self, groups: Iterable[RolloutGroup]) -> None:
        """Store the rewards of groups that were generated."""
        now = time.time()
        with self._transaction():
            for group in groups:
                rewards = np.array([rollout.reward for rollout in group.sampled if rollout.reward is not None])
                statistics = (float(f()) if len(rewards) else None for f in (rewards.mean, rewards.std, rewards.max))
                changed = self._connection.execute(
                    "UPDATE groups SET state = 'SCORED', reward = ?, reward_std = ?, best_reward = ?, score_s = ?,"
                    " scored_at = ? WHERE group_id = ? AND state = 'GENERATED'",
                    (*statistics, group.score_s, now, group.group_id),
                )
                if changed.rowcount:
                    self._connection.execute(
                        "UPDATE payloads SET record = ? WHERE group_id = ?", (pack_record(group), group.group_id)
                    )

    def discard(self, reasons: Mapping[int, str], best_rewards: Mapping[int, float] | None = None) -> None:
        """Discard groups that will never be trained, with the reasons and known best rewards, by group id."""
        best = best_rewards or {}
        with self._transaction():
            self._connection.executemany(
                "UPDATE groups SET state = 'DISCARDED', reason = ?, best_reward = coalesce(?, best_reward)"
                " WHERE group_id = ? AND step IS NULL",
                [(reason, best.get(group_id), group_id) for group_id, reason in reasons.items()],
            )
            self._connection.executemany("DELETE FROM payloads WHERE group_id = ?", [(g,) for g in reasons])

    def assign(self, step: int, groups: StepGroups) -> None:
        """Assign groups, whose advantages are known, to a step."""
        now = time.time()
        with self._transaction():
            self._connection.executemany(
                "UPDATE groups SET state = 'ASSIGNED', step = ?, assigned_at = ? WHERE group_id = ?",
                [(step, now, group.group_id) for group in groups.fresh],
            )
            self._connection.executemany(
                "UPDATE payloads SET record = ? WHERE group_id = ?",
                [(pack_record(group), group.group_id) for group in groups.fresh],
            )
            self._connection.executemany(
                "INSERT OR IGNORE INTO replays VALUES (?, ?)", [(group.group_id, step) for group in groups.replayed]
            )

    def release(self, step: int, reason: str) -> None:
        """Discard groups that no step has taken, and those of ``step`` and later steps that no checkpoint holds."""
        with self._transaction():
            self._connection.execute(
                "UPDATE groups SET state = 'DISCARDED', reason = ?, step = NULL"
                f" WHERE {_is_in(*UNFINISHED)} OR (state = 'ASSIGNED' AND step >= ?)",
                (reason, step),
            )
            self._connection.execute(
                "DELETE FROM payloads WHERE group_id IN"
                " (SELECT group_id FROM groups WHERE state = 'DISCARDED' AND reason = ?)",
                (reason,),
            )

    def complete(self, report: StepReport) -> None:
        """Record that a step was trained or, as the run's last one, compared."""
        with self._transaction():
            self._connection.execute(
                "INSERT INTO steps VALUES (?, ?, ?, 1, ?) ON CONFLICT (step) DO UPDATE SET"
                " metrics = excluded.metrics, ended_at = excluded.ended_at, last = excluded.last,"
                " times = times + (ended_at IS NULL OR metrics != excluded.metrics)",  # not if a call is repeated
                (report.step, json.dumps(report.metrics), time.time(), report.last),
            )
            # A group that a later step replays keeps those of its own step, as it keeps that step's advantages.
            self._connection.executemany(
                "INSERT OR REPLACE INTO differences SELECT group_id, ? FROM payloads JOIN groups USING (group_id)"
                " WHERE group_id = ? AND step = ?",
                [(values.tobytes(), group_id, report.step) for group_id, values in report.differences.items()],
            )
            if report.last:
                self._connection.execute(
                    "UPDATE groups SET state = 'DISCARDED', reason = ? WHERE step = ? AND state = 'ASSIGNED'",
                    (COMPARED, report.step),
                )

    def checkpointed(self, step: int, weights: ServedRecord | None = None) -> None:
        """Record that the checkpoint after ``step`` steps is complete, with a record of its published weights.

        ``weights`` is None if engines were not sent this version.
        """
        with self._transaction():
            self._set(checkpoint_step=max(step, self.checkpoint_step))
            if weights is not None:
                digests = {**(self.get("digests") or {}), str(step): weights}
                self._set(
                    digests={saved_step: digests[saved_step] for saved_step in sorted(digests, key=int)[-KEPT_DIGESTS:]}
                )
            self._connection.execute(
                "UPDATE groups SET state = 'TRAINED', trained_at = ? WHERE state = 'ASSIGNED' AND step < ?",
                (time.time(), step),
            )

    def drop_tokens(self, *, kept: Collection[int] = ()) -> None:
        """Drop tokens of groups trained over ``keep_steps`` steps before the checkpoint, except those in ``kept``."""
        before = self.checkpoint_step - self._keep_steps
        with self._transaction():
            self._connection.execute(
                "DELETE FROM payloads WHERE group_id IN"
                " (SELECT group_id FROM groups WHERE state = 'TRAINED' AND step < ?)"
                " AND group_id NOT IN (SELECT group_id FROM replays WHERE step >= ?)"
                f" AND group_id NOT IN ({', '.join(map(str, kept))})",
                (before, before),
            )

    def begin_again(self, step: int, num_steps: int) -> None:
        """Resume after ``step`` steps: later steps are trained again, on the same groups.

        If the run's end has moved, groups that were only compared at the old end no longer belong to a step.
        """
        with self._transaction():
            self._connection.execute("UPDATE steps SET ended_at = NULL, last = 0 WHERE step >= ?", (step,))
            self._connection.execute(
                "UPDATE groups SET step = NULL WHERE state = 'DISCARDED' AND step != ?", (num_steps,)
            )
            self._connection.execute(
                "DELETE FROM replays WHERE NOT EXISTS (SELECT 1 FROM groups WHERE groups.step = replays.step)"
            )

    def note(self, kind: str, subject: str, message: str) -> None:
        with self._transaction():
            self._connection.execute(
                "INSERT INTO events (time, kind, subject, message) VALUES (?, ?, ?, ?)",
                (time.time(), kind, subject, message),
            )

    # Settings -----------------------------------------------------------------------------------------------------

    def change_config(self, config: Mapping[str, Any]) -> None:
        """Set the config of steps that have taken no group yet, and keep the old one for the steps before them."""
        first = self.rows("SELECT coalesce(max(step) + 1, 0) FROM groups")[0][0]
        earlier = [*(self.get("earlier_configs") or []), {"steps": first, "config": self.get("config")}]
        self.set(config=config, earlier_configs=earlier)

    @property
    def cursor(self) -> Cursor:
        """The prompt source's cursor."""
        match self.get("place"):
            case None:
                return Cursor(0, 0)
            case [int(epoch), int(position)] if 0 <= epoch < MAX_NUMBER and 0 <= position < MAX_NUMBER:
                return Cursor(epoch, position)
        raise self.damaged("place is not an epoch and a position")

    @property
    def checkpoint_step(self) -> int:
        """Steps of the newest checkpoint that the ledger knows to be complete."""
        step: int = self.get("checkpoint_step") or 0
        if not 0 <= step < MAX_NUMBER:
            raise self.damaged("checkpoint_step is not a number of steps")
        return step

    # Queries ------------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[tuple[GroupTicket, GroupState]]:
        """Return the groups that no step has taken, with their states, in the order of their ids."""
        condition = _is_in(*UNFINISHED)
        groups = self._admitted(condition)
        states = dict(self.rows(f"SELECT group_id, state FROM groups WHERE {condition}"))
        return [(group, GroupState(states[group.group_id])) for group in groups]

    def load(self, group_ids: Iterable[int]) -> Iterator[RolloutGroup]:
        """Yield those of the groups whose tokens are still there."""
        for group_id in group_ids:
            query = "SELECT record, arrays FROM payloads JOIN tokens USING (group_id) WHERE group_id = ?"
            for record, arrays in self.rows(query, group_id):
                with self.decoding(f"group {group_id}"):
                    group = unpack_group(group_id, record, arrays)
                yield group

    def differences(self, group_id: int) -> FloatArray | None:
        """Return the learner's log-probs of a trained group's loss tokens minus the engine's, or None if not there.

        They are in the order of its rollouts without the greedy one, and of their sequences; NaN for tokens that the
        learner left out.
        """
        if not self.rows("SELECT 1 FROM sqlite_master WHERE name = 'differences'"):
            return None  # a ledger of an earlier version
        rows = self.rows("SELECT halves FROM differences WHERE group_id = ?", group_id)
        with self.decoding(f"group {group_id}"):
            return np.frombuffer(rows[0][0], np.float16).astype(np.float32) if rows else None

    def groups_of(self, step: int) -> StepGroups | None:
        """Return the groups that a step took, or None if none; raise ``LedgerError`` if their tokens are dropped."""
        fresh = [row[0] for row in self.rows("SELECT group_id FROM groups WHERE step = ? ORDER BY group_id", step)]
        if not fresh:
            return None
        replayed = [row[0] for row in self.rows("SELECT group_id FROM replays WHERE step = ? ORDER BY group_id", step)]
        groups = StepGroups(fresh=list(self.load(fresh)), replayed=list(self.load(replayed)))
        if len(groups.fresh) < len(fresh) or len(groups.replayed) < len(replayed):
            raise LedgerError(
                f"{self.path}: step {step} must be trained again, but the tokens of its groups were dropped; "
                f"increase ledger.keep_steps, now {self._keep_steps}, in future runs"
            )
        return groups

    def steps_taken(self) -> list[TakenStep]:
        """Return the ids of the groups of every step, in order, whose tokens are still there."""
        steps: dict[int, TakenStep] = {}
        for step, group_id in self.rows(
            "SELECT step, group_id FROM groups WHERE step IS NOT NULL AND group_id IN (SELECT group_id FROM payloads)"
            " ORDER BY step, group_id"
        ):
            steps.setdefault(step, TakenStep([], [])).fresh.append(group_id)
        for step, group_id in self.rows("SELECT step, group_id FROM replays"):
            steps.setdefault(step, TakenStep([], [])).replayed.append(group_id)
        return [steps[step] for step in sorted(steps)]

    def failures(self) -> list[tuple[str, int]]:
        """Return why groups could not be sampled or scored, each with their number, the most frequent first."""
        return self.rows(
            "SELECT reason, count(*) FROM groups WHERE state = 'DISCARDED' AND step IS NULL AND reason NOT LIKE ?"
            f" AND reason NOT IN ({', '.join('?' * (1 + len(RELEASED)))}) GROUP BY reason ORDER BY 2 DESC",
            f"{NO_VARIANCE}%",
            COMPARED,
            *RELEASED,
        )

    def open_attempts(self) -> list[int]:
        """Return the attempts due for groups without reward variance that the run did not make before it ended."""
        remaining: Counter[int] = Counter()
        for attempt, count in self.rows(
            "SELECT attempt + 1, count(*) FROM groups WHERE state = 'DISCARDED' AND reason LIKE ? GROUP BY attempt",
            f"{NO_VARIANCE}%",
        ):
            remaining[attempt] = count
        for attempt, count in self.rows("SELECT attempt, count(*) FROM groups WHERE attempt > 0 GROUP BY attempt"):
            remaining[attempt] -= count
        return sorted(remaining.elements())

    def discarded(self, group_ids: Iterable[int], *, with_tokens: bool) -> list[tuple[GroupTicket, str]]:
        """Return those groups that were discarded with tokens, or before they had any, with the reasons."""
        condition = (
            "state = 'DISCARDED' AND step IS NULL AND (generated_at IS NOT NULL) = ?"
            f" AND group_id IN ({', '.join(map(str, group_ids))})"
        )
        reasons = dict(self.rows(f"SELECT group_id, reason FROM groups WHERE {condition}", with_tokens))
        return [(group, reasons[group.group_id]) for group in self._admitted(condition, with_tokens)]

    def origins(self, group_ids: Iterable[int]) -> list[tuple[int, int, float, float]]:
        """Return attempt, re-roll, and generation and scoring times (seconds since 1970) of groups with scores."""
        return self.rows(
            "SELECT attempt, reroll, generated_at, scored_at FROM groups"
            f" WHERE group_id IN ({', '.join(map(str, group_ids))})"
        )

    def zero_reward(self, at_most: float) -> list[GroupTicket]:
        """Return groups without a reward above ``at_most`` whose prompts have not been rerolled."""
        return self._admitted(
            "(state NOT IN ('DISCARDED') OR reason LIKE ?) AND best_reward <= ? AND NOT EXISTS (SELECT 1 FROM groups"
            " AS later WHERE later.epoch = groups.epoch AND later.position = groups.position"
            " AND later.reroll > groups.reroll AND (later.state NOT IN ('DISCARDED') OR later.reason LIKE ?))",
            f"{NO_VARIANCE}%",
            at_most,
            f"{NO_VARIANCE}%",
        )

    def counts(self) -> dict[GroupState, int]:
        """Return the number of groups in each state."""
        return {GroupState(state): n for state, n in self.rows("SELECT state, count(*) FROM groups GROUP BY state")}

    def num_slots_taken(self, step: int) -> int:
        """Return the number of groups that are in ``step`` or a later one, or can still join one."""
        query = f"SELECT count(*) FROM groups WHERE step >= ? OR {_is_in(*UNFINISHED)}"
        return int(self.rows(query, step)[0][0])

    def has_steps(self, before: int) -> bool:
        """Return whether all steps before ``before`` have groups; a power failure may have lost the newest ones."""
        return self.rows("SELECT count(DISTINCT step) FROM groups WHERE step < ?", before) == [(before,)]

    def next_group_id(self) -> int:
        return int(self.rows("SELECT coalesce(max(group_id) + 1, 0) FROM groups")[0][0])

    def reports(self, after: int) -> list[StepReport]:
        """Return the reports of steps after ``after`` that have ended."""
        rows = self.rows(
            "SELECT step, metrics, last FROM steps WHERE step > ? AND ended_at IS NOT NULL ORDER BY step", after
        )
        return [StepReport(step=step, metrics=self.metrics(step, text), last=bool(last)) for step, text, last in rows]

    def metrics(self, step: int, text: str) -> dict[str, float]:
        """Return the metrics of a step, stored as ``text``."""
        with self.decoding(f"the metrics of step {step}"):
            metrics: dict[str, float] = json.loads(text)
            for value in metrics.values():
                math.isfinite(value)  # raises an error for anything but a number
        return metrics

    @property
    def last_step(self) -> int:
        """Newest step that has ended, or -1."""
        return int(self.rows("SELECT coalesce(max(step), -1) FROM steps WHERE ended_at IS NOT NULL")[0][0])

    def events(self, after: int = 0) -> list[LedgerEvent]:
        rows = self.rows("SELECT id, time, kind, subject, message FROM events WHERE id > ? ORDER BY id", after)
        return [LedgerEvent(number=row[0], time=row[1], kind=row[2], subject=row[3], message=row[4]) for row in rows]

    def _admitted(self, condition: str, *values: Any) -> list[GroupTicket]:
        names = [entry.name for entry in fields(GroupTicket)]
        rows = self.rows(f"SELECT {', '.join(names)} FROM groups WHERE {condition} ORDER BY group_id", *values)
        return [GroupTicket(**dict(zip(names, row, strict=True))) for row in rows]


def _is_in(*states: GroupState) -> str:
    return f"state IN ({', '.join(repr(state.value) for state in states)})"

"""Audit of a run's ledger: whether every rollout was trained or discarded exactly once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlpipe.errors import DataError
from rlpipe.replay.ledger.query import has_ended
from rlpipe.replay.ledger.run_ledger import COMPARED, NO_VARIANCE, Ledger

MAX_MISSING = 1000
"""Most epochs, and most steps, that are looked for beyond as many as there are groups."""
TABLES = f"""
WITH RECURSIVE
run(epoch, position, num_rows, checkpoint_step, finished, refill_attempts, has_epochs) AS (
    VALUES (?, ?, ?, ?, ?, ?, ?)),
limits(first, beyond, groups_per_step, max_staleness, reuse_groups, one_sum) AS (
    SELECT json_extract(value, '$[0]'), json_extract(value, '$[1]'), json_extract(value, '$[2]'),
    json_extract(value, '$[3]'), json_extract(value, '$[4]'), json_extract(value, '$[5]') FROM json_each(?)),
entries(epoch, position, prompt_id, group_id) AS (
    SELECT epoch, position, prompt_id, group_id FROM groups WHERE reroll = 0
    UNION ALL SELECT epoch, position, prompt_id, NULL FROM skipped),
epochs(epoch, length) AS (
    SELECT 0, iif(run.epoch > 0, num_rows, position) FROM run
    UNION ALL SELECT epochs.epoch + 1, iif(run.epoch > epochs.epoch + 1, num_rows, position) FROM epochs, run
    WHERE epochs.epoch < run.epoch AND epochs.epoch < (SELECT count(*) + {MAX_MISSING} FROM entries)),
rerolled(epoch, position, prompt_id, group_id, reroll) AS (
    SELECT epoch, position, prompt_id, group_id, reroll FROM groups WHERE reroll = 0 OR state != 'DISCARDED'
    OR step IS NOT NULL OR coalesce(reason, '') LIKE '{NO_VARIANCE}%'),
reached(epoch, beyond) AS (SELECT epoch, max(position) + 1 FROM entries GROUP BY epoch),
checkpointed(step) AS (
    SELECT 0 FROM run WHERE checkpoint_step > 0
    UNION ALL SELECT step + 1 FROM checkpointed, run WHERE step + 1 < checkpoint_step
    AND step < (SELECT count(*) + {MAX_MISSING} FROM groups)),
sizes(step, num_groups, num_flat) AS (
    SELECT step, count(*), sum(reward_std IS NULL OR reward_std < 1e-8) FROM groups WHERE step IS NOT NULL
    GROUP BY step)
"""
"""Tables that the queries below share; ``rlpipe.replay.ledger.audit`` supplies the parameters."""


class Check(NamedTuple):
    """Invariant that holds in every sound ledger."""

    claim: str
    contradictions: str
    """Query that selects a line of text for each contradiction."""


CHECKS = (
    Check(
        "every position up to the prompt source's has a group or a skipped row",
        """SELECT 'epoch ' || epoch || ', position ' || first || iif(last > first, '-' || last, '') FROM (
            SELECT epoch, before + 1 AS first, position - 1 AS last FROM (
                SELECT epoch, position, lag(position, 1, -1) OVER (PARTITION BY epoch ORDER BY position) AS before
                FROM entries) WHERE position > before + 1
            UNION ALL
            SELECT epochs.epoch, coalesce(beyond, 0), length - 1 FROM epochs LEFT JOIN reached USING (epoch)
            WHERE coalesce(beyond, 0) < length)""",
    ),
    Check(
        "no position has two groups or skipped rows",
        """SELECT 'epoch ' || epoch || ', position ' || position || ': '
            || group_concat(coalesce('group ' || group_id, 'a skipped row'), ', ')
            FROM entries GROUP BY epoch, position HAVING count(*) > 1""",
    ),
    Check(
        "nothing is beyond the prompt source's position",
        """SELECT coalesce('group ' || group_id, 'a skipped row') || ' at epoch ' || entries.epoch || ', position '
            || entries.position FROM entries, run WHERE entries.epoch NOT BETWEEN 0 AND run.epoch
            OR entries.position < 0 OR entries.position >= iif(entries.epoch < run.epoch, num_rows, run.position)""",
    ),
    Check(
        "no prompt has two positions in an epoch",
        """SELECT 'prompt ' || prompt_id || ' in epoch ' || entries.epoch || ', positions ' || min(entries.position)
            || ' and ' || max(entries.position) FROM entries, run WHERE has_epochs
            GROUP BY entries.epoch, prompt_id HAVING count(*) > 1 AND min(entries.position) < max(entries.position)""",
    ),
    Check(
        "rerolled prompts are numbered 1, 2, ... after their first group; one whose group failed is rerolled "
        "with the same number",
        """SELECT 'epoch ' || epoch || ', position ' || position || ': groups ' || group_concat(group_id, ', ')
            FROM rerolled WHERE (epoch, position) IN (SELECT epoch, position FROM rerolled WHERE reroll != 0)
            GROUP BY epoch, position
            HAVING min(reroll) != 0 OR max(reroll) != count(*) - 1 OR count(DISTINCT reroll) != count(*)
            OR min(prompt_id) != max(prompt_id)""",
    ),
    Check(
        "every group is in one of the states, and has no step before it is assigned",
        """SELECT 'group ' || group_id || ' is ' || coalesce(state, 'in none')
            || coalesce(' and in step ' || step, '') FROM groups WHERE state IS NULL
            OR state NOT IN ('ADMITTED', 'GENERATED', 'SCORED', 'ASSIGNED', 'TRAINED', 'DISCARDED')
            OR state IN ('ADMITTED', 'GENERATED', 'SCORED') AND step IS NOT NULL""",
    ),
    Check(
        "ASSIGNED groups are in a step after the newest checkpoint",
        """SELECT 'group ' || group_id || ' in ' || coalesce('step ' || step, 'no step') FROM groups, run
            WHERE state = 'ASSIGNED' AND (step IS NULL OR step < checkpoint_step)""",
    ),
    Check(
        "TRAINED groups are in a step that a checkpoint contains, and have the time of that checkpoint",
        """SELECT 'group ' || group_id || ' in ' || coalesce('step ' || step, 'no step')
            || iif(trained_at IS NULL, ', without a time', '') FROM groups, run
            WHERE state = 'TRAINED' AND (step IS NULL OR step >= checkpoint_step OR trained_at IS NULL)""",
    ),
    Check(
        "DISCARDED groups have a reason, and no step except the one that was only compared; others have no reason",
        f"""SELECT 'group ' || group_id || ', ' || state || coalesce(', in step ' || step, '')
            || iif(coalesce(reason, '') = '', ', without a reason', ': ' || reason) FROM groups
            WHERE state = 'DISCARDED' AND (coalesce(reason, '') = '' OR step IS NOT NULL AND reason != '{COMPARED}')
            OR state != 'DISCARDED' AND reason IS NOT NULL""",
    ),
    Check(
        "groups that are still to be trained, or trained again, have their tokens",
        """SELECT 'group ' || group_id || ', ' || state FROM groups
            WHERE state IN ('GENERATED', 'SCORED', 'ASSIGNED') AND group_id NOT IN (SELECT group_id FROM tokens)
            UNION ALL SELECT 'group ' || group_id || ', again in step ' || step FROM replays, run
            WHERE step >= checkpoint_step AND group_id NOT IN (SELECT group_id FROM tokens)""",
    ),
    Check(
        "every step has algorithm.groups_per_step groups",
        """SELECT 'step ' || step || ': ' || coalesce(num_groups, 0) || ' of ' || groups_per_step FROM (
                SELECT step FROM checkpointed UNION SELECT step FROM sizes
                UNION SELECT step FROM steps WHERE ended_at IS NOT NULL)
            LEFT JOIN sizes USING (step) JOIN limits ON step >= first AND step < beyond
            WHERE coalesce(num_groups, 0) != groups_per_step""",
    ),
    Check(
        "no group is trained more than replay.max_staleness versions after the one that it was admitted with",
        """SELECT 'group ' || group_id || ' of version ' || coalesce(version, 'none') || ' in step ' || step
            || ', at most ' || max_staleness || ' later' FROM groups JOIN limits ON step >= first AND step < beyond
            WHERE state IN ('ASSIGNED', 'TRAINED')
            AND (version IS NULL OR step < version OR step - version > max_staleness)""",
    ),
    Check(
        "no token is older than the version that its group was admitted with, or newer than its step",
        """SELECT 'group ' || group_id || ' of version ' || version || ': a token of version ' || oldest_version
            || coalesce(', step ' || step, '') FROM groups WHERE oldest_version >= 0
            AND (oldest_version < version OR state IN ('ASSIGNED', 'TRAINED') AND oldest_version > step)""",
    ),
    Check(
        "groups that are trained twice (replay.reuse_groups) replace groups without reward variance in later steps",
        """SELECT 'group ' || group_id || ', ' || coalesce(state || coalesce(' in step ' || groups.step, ''), 'unknown')
            || ', again in step ' || replays.step FROM replays LEFT JOIN groups USING (group_id)
            WHERE state IS NULL OR state NOT IN ('ASSIGNED', 'TRAINED') OR replays.step <= groups.step
            UNION ALL
            SELECT 'step ' || step || ': ' || again || ' groups again, at most ' || most FROM (
                SELECT step, count(*) AS again, min(reuse_groups, iif(one_sum, num_flat, num_groups)) AS most
                FROM replays JOIN sizes USING (step) JOIN limits ON step >= first AND step < beyond GROUP BY step)
            WHERE again > most""",
    ),
    Check(
        "groups without reward variance are replaced at most replay.refill_attempts times, each only once",
        """SELECT 'group ' || group_id || ': attempt ' || attempt || ' of ' || refill_attempts FROM groups, run
            WHERE attempt NOT BETWEEN 0 AND refill_attempts
            UNION ALL
            SELECT 'attempt ' || later.attempt || ': ' || later.num || ' groups, of which '
            || coalesce(earlier.num, 0) || ' replace another' FROM
                (SELECT attempt, count(*) AS num FROM groups WHERE attempt > 0 GROUP BY attempt) AS later
            LEFT JOIN
                (SELECT attempt + 1 AS attempt, count(*) AS num FROM groups
                WHERE state = 'DISCARDED' AND reason LIKE 'no reward variance%' GROUP BY attempt) AS earlier
            USING (attempt) WHERE later.num > coalesce(earlier.num, 0)""",
    ),
    Check(
        "nothing is in flight once the run has ended",
        """SELECT 'group ' || group_id || ' is ' || state FROM groups, run
            WHERE finished AND state NOT IN ('TRAINED', 'DISCARDED')""",
    ),
)


MAX_KEPT = 1000
"""Limit on the contradictions of one check that are kept as text; all are counted."""
MAX_SHOWN = 20


@dataclass(kw_only=True, slots=True, frozen=True)
class Finding:
    """Result of one check."""

    claim: str
    num_contradictions: int
    contradictions: list[str]


@dataclass(kw_only=True, slots=True, frozen=True)
class Audit:
    """Totals of a run, and the contradictions in its ledger."""

    finished: bool
    num_steps: int
    """Number of trained steps, including those after the newest checkpoint."""
    checkpoint_step: int
    repeated_steps: dict[int, int]
    """Number of times that a step was trained, for steps trained again on the same groups after a crash."""
    prompts: dict[str, int]
    """Number of prompts by the state of their first group; rows that can't be used count as ``skipped``."""
    rerolled: dict[str, int]
    """Number of groups of rerolled prompts, by state."""
    discarded: dict[str, int]
    """Number of groups by the reason why they were not trained."""
    skipped: dict[str, int]
    """Number of rows by the kind of reason why they can't be used."""
    replayed: int
    """Number of groups that were trained in a second step."""
    events: dict[str, int]
    """Number of events by kind."""
    findings: list[Finding]

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.num_contradictions]


def audit(ledger: Ledger) -> Audit:
    """Add up and check a run's ledger; raise ``DataError`` if the ledger does not have the run's config."""
    if ledger.get("config") is None:
        raise DataError(f"{ledger.path} has no config yet: its run has not started; wait, or specify another run")
    values = _values(ledger)
    return Audit(
        finished=has_ended(ledger),
        num_steps=ledger.rows("SELECT count(*) FROM steps WHERE ended_at IS NOT NULL AND NOT last")[0][0],
        checkpoint_step=ledger.checkpoint_step,
        repeated_steps=dict(ledger.rows("SELECT step, times FROM steps WHERE times > 1 AND NOT last ORDER BY step")),
        prompts=_prompts(ledger),
        rerolled=_counts(ledger, "SELECT state, count(*) FROM groups WHERE reroll > 0 GROUP BY state"),
        discarded=_counts(ledger, "SELECT reason, count(*) FROM groups WHERE state = 'DISCARDED' GROUP BY reason"),
        skipped=_counts(
            ledger, "SELECT substr(reason, 1, instr(reason || ':', ':') - 1), count(*) FROM skipped GROUP BY 1"
        ),
        replayed=ledger.rows("SELECT count(*) FROM replays WHERE step NOT IN (SELECT step FROM steps WHERE last)")[0][
            0
        ],
        events=_counts(ledger, "SELECT kind, count(*) FROM events GROUP BY kind"),
        findings=[_run_check(ledger, check, values) for check in CHECKS],
    )


def _run_check(ledger: Ledger, check: Check, values: tuple[Any, ...]) -> Finding:
    query = f"{TABLES} SELECT count(*) OVER (), * FROM ({check.contradictions}) LIMIT {MAX_KEPT}"
    rows = ledger.rows(query, *values)
    return Finding(
        claim=check.claim, num_contradictions=rows[0][0] if rows else 0, contradictions=[str(text) for _, text in rows]
    )


def _prompts(ledger: Ledger) -> dict[str, int]:
    skipped: int = ledger.rows("SELECT count(*) FROM skipped")[0][0]
    counts = _counts(ledger, "SELECT state, count(*) FROM groups WHERE reroll = 0 GROUP BY state")
    return {**counts, **({"skipped": skipped} if skipped else {})}


def _counts(ledger: Ledger, query: str) -> dict[str, int]:
    """Return the counts that a query selects, the largest first."""
    return dict(sorted(((str(key), count) for key, count in ledger.rows(query)), key=lambda item: -item[1]))


def _values(ledger: Ledger) -> tuple[Any, ...]:
    """Return the values that the checks compare with, in the order of the parameters in ``TABLES``."""
    with ledger.decoding("config"):
        return _compared(ledger, list(_eras(ledger)))


def _compared(ledger: Ledger, eras: Sequence[tuple[int, int, Mapping[str, Any]]]) -> tuple[Any, ...]:
    trees = [tree for _, _, tree in eras]
    same_data = all((tree["data"], tree["seed"]) == (trees[0]["data"], trees[0]["seed"]) for tree in trees)
    has_epochs = same_data and trees[0]["data"].get("source") != "mix"
    limits = [
        [
            first,
            stop,
            tree["algorithm"]["groups_per_step"],
            tree["replay"]["max_staleness"],
            tree["replay"]["reuse_groups"],
            tree["algorithm"]["combine"] == "sum_then_normalize",
        ]
        for first, stop, tree in eras
    ]
    return (
        ledger.cursor.epoch,
        ledger.cursor.position,
        ledger.get("num_rows") if same_data else None,
        ledger.checkpoint_step,
        has_ended(ledger),
        max(tree["replay"]["refill_attempts"] for tree in trees),
        has_epochs,
        json.dumps(limits),
    )


def _eras(ledger: Ledger) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Yield each config that the run had, with its first step and the step after its last."""
    config, first = ledger.get("config"), 0
    for earlier in ledger.get("earlier_configs") or []:
        yield first, earlier["steps"], earlier["config"]
        first = earlier["steps"]
    yield first, 2**62, config


def describe(result: Audit) -> Iterator[str]:
    """Yield the totals and the checks, as lines of text."""
    state = "a finished run" if result.finished else "a run that has not ended"
    yield f"{state}: {result.num_steps:,} steps trained, the newest checkpoint after {result.checkpoint_step:,}"
    num_repeated = len(result.repeated_steps)
    if num_repeated:
        times = sum(result.repeated_steps.values()) - num_repeated
        listed = _listed(result.repeated_steps)
        steps = "step was" if num_repeated == 1 else "steps were"
        yield f"{num_repeated:,} {steps} trained again after a crash, {times:,} repetitions in all: {listed}"
    yield ""
    yield f"prompts    {sum(result.prompts.values()):,}: {_sums(result.prompts) or 'none was admitted yet'}"
    if result.rerolled:
        yield f"rerolled   {sum(result.rerolled.values()):,}: {_sums(result.rerolled)}"
    if result.replayed:
        yield f"replayed   {result.replayed:,}"
    for title, counts in (("discarded", result.discarded), ("skipped", result.skipped), ("events", result.events)):
        if counts:
            yield f"{title:<9}  {sum(counts.values()):,}"
        yield from (f"{count:>13,}  {reason}" for reason, count in list(counts.items())[:MAX_SHOWN])
        if len(counts) > MAX_SHOWN:
            yield f"{'':13}  and {len(counts) - MAX_SHOWN:,} other reasons"
    yield ""
    for finding in result.findings:
        yield f"{'FAILS' if finding.num_contradictions else 'ok':<5}  {finding.claim}"
        yield from (f"         {text}" for text in finding.contradictions[:MAX_SHOWN])
        if finding.num_contradictions > MAX_SHOWN:
            yield f"         and {finding.num_contradictions - MAX_SHOWN:,} more"


def _sums(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in counts.items())


def _listed(steps: Mapping[int, int]) -> str:
    shown = ", ".join(str(step) for step in list(steps)[:MAX_SHOWN])
    return shown if len(steps) <= MAX_SHOWN else f"{shown}, ..."

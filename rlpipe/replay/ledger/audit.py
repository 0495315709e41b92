"""An audit of a run's ledger: each prompt of an epoch is trained exactly once, or discarded with a reason."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rlpipe.errors import DataError
from rlpipe.replay.ledger.invariants import CHECKS, TABLES, Check
from rlpipe.replay.ledger.query import has_ended
from rlpipe.replay.ledger.run_ledger import Ledger

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
    put_back: dict[str, int]
    """Number of groups of prompts that were put back, by state."""
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
    values = _values(ledger)
    return Audit(
        finished=has_ended(ledger),
        num_steps=ledger.rows("SELECT count(*) FROM steps WHERE ended_at IS NOT NULL AND NOT last")[0][0],
        checkpoint_step=ledger.checkpoint_step,
        repeated_steps=dict(ledger.rows("SELECT step, times FROM steps WHERE times > 1 AND NOT last ORDER BY step")),
        prompts=_prompts(ledger),
        put_back=_counts(ledger, "SELECT state, count(*) FROM groups WHERE reroll > 0 GROUP BY state"),
        discarded=_counts(ledger, "SELECT reason, count(*) FROM groups WHERE state = 'DISCARDED' GROUP BY reason"),
        skipped=_counts(
            ledger, "SELECT substr(reason, 1, instr(reason || ':', ':') - 1), count(*) FROM skipped GROUP BY 1"
        ),
        replayed=ledger.rows("SELECT count(*) FROM replays WHERE step NOT IN (SELECT step FROM steps WHERE last)")[0][
            0
        ],
        events=_counts(ledger, "SELECT kind, count(*) FROM events GROUP BY kind"),
        findings=[_ask(ledger, check, values) for check in CHECKS],
    )


def _ask(ledger: Ledger, check: Check, values: tuple[Any, ...]) -> Finding:
    query = f"{TABLES} SELECT count(*) OVER (), * FROM ({check.contradictions}) LIMIT {MAX_KEPT}"
    rows = ledger.rows(query, *values)
    return Finding(
        claim=check.claim,
        num_contradictions=rows[0][0] if rows else 0,
        contradictions=[str(text) for _, text in rows],
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
    eras = list(_eras(ledger))
    trees = [tree for _, _, tree in eras]
    one_data = all((tree["data"], tree["seed"]) == (trees[0]["data"], trees[0]["seed"]) for tree in trees)
    has_epochs = one_data and trees[0]["data"].get("source") != "mix"
    limits = [
        [
            first,
            beyond,
            tree["algorithm"]["groups_per_step"],
            tree["replay"]["max_staleness"],
            tree["replay"]["reuse_groups"],
            tree["algorithm"]["combine"] == "sum_then_normalize",
        ]
        for first, beyond, tree in eras
    ]
    return (
        ledger.place.epoch,
        ledger.place.position,
        ledger.get("num_rows") if one_data else None,
        ledger.checkpoint_step,
        has_ended(ledger),
        max(tree["replay"]["refill_attempts"] for tree in trees),
        has_epochs,
        json.dumps(limits),
    )


def _eras(ledger: Ledger) -> Iterator[tuple[int, int, Mapping[str, Any]]]:
    """Yield each config that the run had, with its first step and the step after its last."""
    config, first = ledger.get("config"), 0
    if config is None:
        raise DataError(f"{ledger.path} does not say which config its run has: it has not begun")
    for earlier in ledger.get("earlier_configs") or []:
        yield first, earlier["steps"], earlier["config"]
        first = earlier["steps"]
    yield first, 2**62, config


def describe(result: Audit) -> Iterator[str]:
    """Yield the totals and the checks, as lines of text."""
    state = "a finished run" if result.finished else "a run that has not ended"
    yield f"{state}: {result.num_steps:,} steps trained, the newest checkpoint after {result.checkpoint_step:,}"
    again = len(result.repeated_steps)
    if again:
        times = sum(result.repeated_steps.values()) - again
        listed = _listed(result.repeated_steps)
        yield f"{again:,} steps were trained again after a crash, {times:,} times in all: {listed}"
    yield ""
    yield f"prompts    {sum(result.prompts.values()):,}: {_sums(result.prompts) or 'none was taken yet'}"
    if result.put_back:
        yield f"put back   {sum(result.put_back.values()):,}: {_sums(result.put_back)}"
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

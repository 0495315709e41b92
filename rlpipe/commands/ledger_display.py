"""Display of a run's ledger in the terminal or as JSON, also while the run is active."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, cast

from rlpipe.common import run_files
from rlpipe.common.formatting import printable
from rlpipe.common.imports import reading_files
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.data.render.messages import content_text
from rlpipe.errors import DataError, ModelError
from rlpipe.replay.ledger.query import (
    Feed,
    GroupFilter,
    GroupRow,
    Row,
    StepRow,
    find_groups,
    find_ledger,
    find_steps,
    has_ended,
    reading,
    stored_model,
    to_tree,
)
from rlpipe.replay.ledger.run_ledger import Ledger, LedgerEvent
from rlpipe.tracking.jsonl import LoggedTexts, last_turn
from rlpipe.tracking.metric_text import Column, one_line, print_table, show_count, show_number, show_start, show_time
from rlpipe.types import ChatMessages, Rollout, RolloutGroup

POLL_S = 0.5
PATIENCE = 4
"""Failed reads in a row before a message: a ledger that is being replaced by a copy is missing for a moment."""
Subject = Literal["groups", "steps", "events"]


@dataclass(kw_only=True, slots=True, frozen=True)
class Question:
    """Selection and order of the ledger's rows to show."""

    subjects: tuple[Subject, ...] = ("groups",)
    wanted: GroupFilter = field(default_factory=GroupFilter)
    sort: str = "id"
    ascending: bool = False
    limit: int | None = None


def inspect(run: Path, question: Question, *, as_json: bool = False) -> None:
    """Print the rows that a question selects, the newest first; raise ``DataError`` if there is no ledger."""
    with reading(find_ledger(run)) as ledger:
        for subject in question.subjects:
            rows = _find(ledger, subject, question)
            if subject == "groups":
                rows = LoggedTexts(run).with_prompts(cast("Sequence[GroupRow]", rows))
            if as_json:
                _print_json(rows)
            else:
                print_table(COLUMNS[subject], rows, sys.stdout)


def follow(run: Path, question: Question, *, as_json: bool = False) -> None:
    """Print the newest ``limit`` rows of each subject, and then new rows until the run has ended.

    Continues while the writing process is dead, and when a copy replaces the ledger.
    """
    path, feed, failures = find_ledger(run), Feed(question.wanted), 0
    show = _print_json if as_json else _print_lines
    with _identified(path) as (ledger, file):
        for subject in question.subjects if question.limit != 0 else ():
            show(_find(ledger, subject, question)[::-1])
        feed.look(ledger, file)
        ended = has_ended(ledger)
    while not ended:
        time.sleep(POLL_S)
        try:
            with _identified(path, checked=file) as (ledger, file):
                rows, ended = feed.look(ledger, file), has_ended(ledger)
        except (OSError, DataError) as error:
            failures += 1
            if failures == PATIENCE:
                print(f"rlpipe: waiting for the ledger: {error}", file=sys.stderr)
        else:
            failures = 0
            show([row for row in rows if SUBJECTS[type(row)] in question.subjects])


@contextmanager
def _identified(path: Path, *, checked: tuple[int, int] | None = None) -> Iterator[tuple[Ledger, tuple[int, int]]]:
    """Yield the ledger and its device and inode; raise ``DataError`` if it is replaced while it is opened.

    The values of a ``checked`` file have been checked before.
    """
    before = path.stat()
    file = (before.st_dev, before.st_ino)
    with reading(path, check=file != checked) as ledger:
        if not os.path.samestat(before, path.stat()):
            raise DataError(f"{path} is being replaced: try again")
        yield ledger, file


def _find(ledger: Ledger, subject: Subject, question: Question) -> Sequence[Row]:
    group_filter, limit = question.wanted, question.limit
    if subject == "groups":
        return find_groups(ledger, group_filter, sort=question.sort, ascending=question.ascending, limit=limit)
    if subject == "steps":
        return find_steps(ledger, first=group_filter.first_step or 0, last=group_filter.last_step, limit=limit)[::-1]
    return ledger.events()[::-1][:limit]


def _print_json(rows: Sequence[Row]) -> None:
    for row in rows:
        print(json.dumps(to_tree(row), ensure_ascii=False), flush=True)


def _print_lines(rows: Sequence[Row]) -> None:
    for row in rows:
        print(one_line(COLUMNS[SUBJECTS[type(row)]], row), flush=True)


# Tables ---------------------------------------------------------------------------------------------------------------


def _prompt_cell(group: GroupRow) -> str:
    if group.prompt is None:
        return "(dropped)" if group.is_dropped else ""
    return show_start(last_turn(group.prompt))


def _metric(name: str, key: str, show: Callable[[float | None], str | None] = show_number) -> Column:
    def cell(step: StepRow) -> str | None:
        value = step.metrics.get(key)
        return show(value) if value is None or math.isfinite(value) else str(value)

    return Column(name, cell)


COLUMNS: dict[Subject, tuple[Column, ...]] = {
    "groups": (
        Column("group", lambda group: str(group.group_id)),
        Column("step", lambda group: show_count(group.step)),
        Column("state", lambda group: group.state, is_text=True),
        Column("prompt", _prompt_cell, is_text=True),
        Column("reward", lambda group: show_number(group.reward)),
        Column("std", lambda group: show_number(group.reward_std)),
        Column("best", lambda group: show_number(group.best_reward)),
        Column("staleness", lambda group: show_count(group.staleness)),
        Column("tokens", lambda group: show_count(group.num_tokens)),
        Column("engine", lambda group: group.engine, is_text=True),
        Column("generate s", lambda group: show_number(group.generate_s)),
        Column("score s", lambda group: show_number(group.score_s)),
        Column("reason", lambda group: printable(group.reason) if group.reason else None, is_text=True),
    ),
    "steps": (
        Column("step", lambda step: str(step.step)),
        Column("ended", lambda step: show_time(step.ended_at), is_text=True),
        Column("times", lambda step: "compared" if step.last else str(step.times)),
        _metric("reward", "reward"),
        _metric("std", "reward_std"),
        _metric("loss", "loss"),
        _metric("length", "completions/mean_length"),
        _metric("staleness", "staleness/max", show_count),
        _metric("tokens", "num_tokens", show_count),
        _metric("train s", "time/train"),
        _metric("wait s", "time/wait"),
    ),
    "events": (
        Column("event", lambda event: str(event.number)),
        Column("time", lambda event: show_time(event.time), is_text=True),
        Column("kind", lambda event: event.kind, is_text=True),
        Column("subject", lambda event: event.subject, is_text=True),
        Column("message", lambda event: printable(event.message), is_text=True),
    ),
}
SUBJECTS: dict[type, Subject] = {GroupRow: "groups", StepRow: "steps", LedgerEvent: "events"}


# One group ------------------------------------------------------------------------------------------------------------


def inspect_group(run: Path, group_id: int, *, as_json: bool = False, trusted: bool = False) -> None:
    """Print all details of one group; raise ``DataError`` if it is not in the ledger.

    A tokenizer's own code is executed only if the ledger's config is ``trusted`` and allows it.
    """
    with reading(find_ledger(run)) as ledger:
        rows = find_groups(ledger, GroupFilter(group_id=group_id))
        if not rows:
            raise DataError(f"{ledger.path} has no group {group_id}; its groups are 0 to {ledger.next_group_id() - 1}")
        groups = list(ledger.load([group_id]))
        model = stored_model(ledger)
    texts, problem = _decode(groups, model, trusted)
    logged = LoggedTexts(run).rollouts(rows[0]) if rows[0].is_dropped else []
    if logged:
        print("\n".join(_logged_lines(rows[0], logged, as_json)))
    elif as_json:
        rollouts = [_rollout_tree(*pair) for group in groups for pair in zip(group, texts, strict=True)]
        print(json.dumps({**to_tree(rows[0]), "rollouts": rollouts}, ensure_ascii=False))
    else:
        print("\n".join(_describe(rows[0], groups, texts, problem)))


def _decode(
    groups: Sequence[RolloutGroup], model: ModelConfig | None, trusted: bool
) -> tuple[list[str | None], str | None]:
    """Return the text of each completion, or None for each and the reason if the tokenizer can't be loaded."""
    completions = [rollout.completion_ids.tolist() for group in groups for rollout in group]
    if not completions or model is None:
        return [None] * len(completions), None
    from rlpipe.data.render.processor import load_tokenizer

    try:
        with reading_files("they can't be decoded", "fix the ledger's config or the tokenizer", error=ModelError):
            tokenizer = load_tokenizer(replace(model, trust_remote_code=model.trust_remote_code and trusted))
            return [*tokenizer.batch_decode(completions, skip_special_tokens=True)], None
    except ModelError as error:
        return [None] * len(completions), str(error)


def _rollout_tree(rollout: Rollout, text: str | None) -> dict[str, Any]:
    return {
        "sample_index": rollout.sample_index,
        "completion": text,
        "completion_ids": rollout.completion_ids.tolist(),
        "rewards": rollout.rewards,
        "reward": rollout.reward,
        "advantage": rollout.mean_advantage,
        "versions": rollout.num_tokens_by_version,
        "status": rollout.status.value,
        "finish_reason": rollout.finish_reason,
    }


def _describe(
    row: GroupRow, groups: Sequence[RolloutGroup], texts: Sequence[str | None], problem: str | None
) -> Iterator[str]:
    yield from _describe_record(row)
    if not groups:
        yield row.why_no_tokens
        return
    for name, value in groups[0].logged.items():
        yield f"{name} {value:.6g}"
    yield from _describe_prompt(groups[0].prompt.prompt)
    if problem is not None:
        yield f"\nits completions are shown as token ids: {problem}"
    for rollout, text in zip(groups[0], texts, strict=True):
        yield f"\nrollout {rollout.sample_index}: {_outcome(rollout)}"
        yield str(rollout.completion_ids.tolist()) if text is None else printable(text)


def _describe_record(row: GroupRow) -> Iterator[str]:
    yield one_line(COLUMNS["groups"], row)
    yield (
        f"epoch {row.epoch}, position {row.position}, prompt {row.prompt_id}; admitted with version {row.version}"
        + (f", attempt {row.attempt}" if row.attempt else "")
        + (f", rerolled {row.reroll} times" if row.reroll else "")
        + (f"; trained again in step {row.replayed_in}" if row.replayed_in is not None else "")
    )
    times = {"admitted": row.admitted_at, "generated": row.generated_at, "scored": row.scored_at}
    times |= {"assigned": row.assigned_at, "trained": row.trained_at}
    yield ", ".join(f"{name} {show_time(moment)}" for name, moment in times.items() if moment is not None)


def _logged_lines(row: GroupRow, logged: Sequence[dict[str, Any]], as_json: bool) -> Iterator[str]:
    """Yield the lines of a group whose tokens are dropped, but whose texts were logged."""
    prompt = logged[0].get("prompt")
    if as_json:
        yield json.dumps({**to_tree(replace(row, prompt=prompt)), "rollouts": logged}, ensure_ascii=False)
        return
    yield from _describe_record(replace(row, prompt=prompt))
    yield f"{row.why_no_tokens}; its texts are from {run_files.COMPLETIONS}"
    if prompt:
        yield from _describe_prompt(prompt)
    for rollout in logged:
        rewards = ", ".join(f"{name} {show_number(value) or 'none'}" for name, value in rollout["rewards"].items())
        yield (
            f"\nrollout {rollout['sample_index']}: reward {show_number(rollout['reward']) or 'none'} ({rewards}); "
            f"advantage {show_number(rollout['advantage']) or 'none'}; {rollout['num_tokens']} tokens; "
            f"{rollout['status']} ({rollout['finish_reason']})"
        )
        yield printable(rollout["completion"])


def _describe_prompt(prompt: str | ChatMessages) -> Iterator[str]:
    if isinstance(prompt, str):
        yield f"\nprompt\n{printable(prompt)}"
        return
    for message in prompt:
        yield printable(f"\n{message.get('role')}\n{content_text(message.get('content'))}")


def _outcome(rollout: Rollout) -> str:
    rewards = ", ".join(f"{name} {show_number(value) or 'none'}" for name, value in rollout.rewards.items())
    versions = ", ".join(
        f"{count} tokens of version {version}" for version, count in rollout.num_tokens_by_version.items()
    )
    fields = [
        f"reward {show_number(rollout.reward) or 'none'}" + (f" ({rewards})" if rewards else ""),
        f"advantage {show_number(rollout.mean_advantage) or 'none'}",
        versions or "no tokens",
        f"{rollout.status.value} ({rollout.finish_reason})",
    ]
    return "; ".join(fields)

"""``rlpipe audit`` and ``rlpipe inspect``: check or show a run's ledger."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.commands.arguments import Commands, OneLineParser, add_command, add_trust_argument, at_least, span
from rlpipe.common import run_files
from rlpipe.errors import AuditFailed, InputError

if TYPE_CHECKING:
    from rlpipe.commands.ledger_display import Question

RUN_HELP = f"the output folder of a run, one of its checkpoints, or a {run_files.LEDGER}"
INSPECT_EXAMPLES = """\
examples:
  rlpipe inspect outputs/run --step 10-12 --sort reward
  rlpipe inspect outputs/run --state DISCARDED --limit 0
  rlpipe inspect outputs/run --group 96
  rlpipe inspect outputs/run --follow
"""
NUM_SHOWN = 20
GROUP_FILTERS = ("reward", "state", "epoch", "prompt_id", "sort", "reverse")


def add_commands(commands: Commands) -> None:
    audited = add_command(commands, "audit", run_audit, "check that every prompt of a run is accounted for")
    audited.add_argument("run", metavar="RUN", help=RUN_HELP)
    audited.add_argument("--json", action="store_true", help="print one JSON object")
    audited.add_argument(
        "--weights",
        action="store_true",
        help="also recompute the weights of checkpoints, and compare their digests with those that engines served",
    )
    add_trust_argument(audited)
    add_inspect_arguments(
        add_command(
            commands, "inspect", run_inspect, "show the groups, steps and events of a run", epilog=INSPECT_EXAMPLES
        )
    )


def add_inspect_arguments(parser: OneLineParser) -> None:
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--group", type=at_least(int, 0), metavar="ID", help="one group in full, with its completions")
    for subject, summary in (
        ("groups", "the groups (default)"),
        ("steps", "the steps that were trained"),
        ("events", "deaths, recoveries and other events"),
    ):
        parser.add_argument(f"--{subject}", dest="subjects", action="append_const", const=subject, help=summary)
    parser.add_argument("--step", type=span(int, "-"), metavar="N or A-B", help="groups of these steps, counted from 0")
    parser.add_argument(
        "--reward",
        type=span(float, ".."),
        metavar="A..B",
        help="groups with a mean reward from A to B; A.. and ..B are open; below 0: --reward=-1..0",
    )
    parser.add_argument("--state", action="append", metavar="STATE", help="groups in this state, or several: A,B")
    parser.add_argument("--epoch", type=at_least(int, 0), metavar="N", help="groups of this epoch, counted from 0")
    parser.add_argument("--prompt-id", type=at_least(int, 0), metavar="ROW", help="groups of this row, counted from 0")
    parser.add_argument(
        "--sort",
        metavar="KEY",
        help="id (default), step, prompt, reward, std, best, staleness, tokens, generate or score; the largest first",
    )
    parser.add_argument("--reverse", action="store_true", help="the smallest first")
    parser.add_argument(
        "--limit", type=at_least(int, 0), metavar="N", help=f"number of rows; default: {NUM_SHOWN}; 0: all"
    )
    parser.add_argument("--follow", action="store_true", help="keep showing new entries until the run ends")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")
    add_trust_argument(parser)


def run_audit(arguments: argparse.Namespace) -> None:
    from rlpipe.replay.ledger.audit import audit, describe
    from rlpipe.replay.ledger.query import check_groups, check_pages, find_ledger, reading

    path = find_ledger(Path(arguments.run))
    with reading(path) as ledger:
        check_pages(ledger)
        check_groups(ledger)
        result = audit(ledger)
        digests = ledger.get("digests") or {}
    if arguments.weights:
        from rlpipe.commands.weights_audit import check_weights

        findings = [*result.findings, check_weights(Path(arguments.run), digests, trusted=arguments.trust_remote_code)]
        result = replace(result, findings=findings)
    print(json.dumps(asdict(result), ensure_ascii=False) if arguments.json else "\n".join(describe(result)), flush=True)
    if result.problems:
        claims = "; ".join(finding.claim for finding in result.problems)
        raise AuditFailed(f"the ledger {path} is inconsistent; failed checks: {claims}")


def run_inspect(arguments: argparse.Namespace) -> None:
    from rlpipe.commands.ledger_display import follow, inspect, inspect_group

    run, as_json = Path(arguments.run), arguments.json
    if arguments.group is not None:
        refuse(arguments, "shows one group in full", "--group", [*GROUP_FILTERS, "step", "limit", "subjects", "follow"])
        inspect_group(run, arguments.group, as_json=as_json, trusted=arguments.trust_remote_code)
    elif arguments.follow:
        with suppress(KeyboardInterrupt):  # the usual way to end it
            follow(run, make_question(arguments), as_json=as_json)
    else:
        inspect(run, make_question(arguments), as_json=as_json)


def make_question(arguments: argparse.Namespace) -> Question:
    """Return the query that the arguments describe; raise ``InputError`` if they contradict each other."""
    from rlpipe.commands.ledger_display import Question
    from rlpipe.replay.ledger.query import SORT_KEYS, GroupFilter
    from rlpipe.replay.ledger.run_ledger import GroupState

    subjects = arguments.subjects or (["groups", "steps", "events"] if arguments.follow else ["groups"])
    if "groups" not in subjects:
        refuse(arguments, "show no groups", " and ".join(f"--{name}" for name in subjects), GROUP_FILTERS)
    if arguments.follow:
        refuse(arguments, "shows groups in the order in which they come", "--follow", ["sort", "reverse"])
    if subjects == ["events"]:
        refuse(arguments, "shows what belongs to no step", "--events", ["step"])
    sort = arguments.sort or "id"
    states = [name.upper() for text in arguments.state or () for name in text.split(",")]
    for state in states:
        check_choice("--state", state, list(GroupState))
    check_choice("--sort", sort, list(SORT_KEYS))
    first_step, last_step = arguments.step or (None, None)
    least_reward, most_reward = arguments.reward or (None, None)
    group_filter = GroupFilter(
        first_step=first_step,
        last_step=last_step,
        least_reward=least_reward,
        most_reward=most_reward,
        states=tuple(states),
        epoch=arguments.epoch,
        prompt_id=arguments.prompt_id,
    )
    default_limit = 0 if arguments.follow else NUM_SHOWN
    limit = default_limit if arguments.limit is None else arguments.limit or None
    return Question(subjects=tuple(subjects), wanted=group_filter, sort=sort, ascending=arguments.reverse, limit=limit)


def check_choice(option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise InputError(f"{option}: there is no {value}; it is one of {', '.join(known)}")


def refuse(arguments: argparse.Namespace, why: str, because: str, others: Sequence[str]) -> None:
    """Raise ``InputError`` if one of the options ``others`` is given, because it would have no effect."""
    for name in others:
        if getattr(arguments, name) not in (None, False):
            option = "--groups, --steps and --events" if name == "subjects" else f"--{name.replace('_', '-')}"
            raise InputError(f"{because} {why}: leave out {option}")

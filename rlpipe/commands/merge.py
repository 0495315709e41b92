"""``rlpipe merge``: merge an adapter into its base model."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlpipe.commands.arguments import Commands, add_command

MERGE_NOTES = """\
A QLoRA adapter is trained on its base in NF4. It can be merged into the original base, or into the base as rounded to
NF4; the command measures how far the log-probs of each are from the adapter's own, and keeps the closer one.

An interrupted merge continues where it stopped.

examples:
  rlpipe merge outputs/quickstart/policy merged
  rlpipe merge outputs/run/policy merged --base models/base --text held_out.txt
"""


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "merge", run_merge, "merge an adapter into its base", epilog=MERGE_NOTES)
    parser.add_argument("adapter", metavar="ADAPTER", help="folder or hub id of a PEFT adapter")
    parser.add_argument("output", metavar="OUTPUT", help="folder to create for the merged model")
    parser.add_argument("--base", metavar="PATH", help="folder or hub id of the base; default: the adapter's own")
    parser.add_argument(
        "--base-precision",
        choices=("full", "nf4"),
        help="precision of the base to merge into; default: the one closer to the trained policy",
    )
    parser.add_argument(
        "--trained-on",
        choices=("full", "nf4"),
        help="precision of the base in training, for adapters that rlpipe did not train; default: full",
    )
    parser.add_argument(
        "--text",
        metavar="FILE",
        help="file with texts to measure on, one per line; default: texts sampled from the policy, which is slower",
    )


def run_merge(arguments: argparse.Namespace) -> None:
    from rlpipe.learner.merging import MergeRequest, merge

    request = MergeRequest(
        adapter=arguments.adapter,
        output=Path(arguments.output),
        base=arguments.base,
        base_precision=arguments.base_precision,
        trained_on=arguments.trained_on,
        text=None if arguments.text is None else Path(arguments.text),
    )
    for line in merge(request):
        print(line, flush=True)

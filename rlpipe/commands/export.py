"""``rlpipe export``: export the policy of a checkpoint in a format that other tools load."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlpipe.commands.arguments import Commands, add_command, add_trust_argument

EXPORT_NOTES = """\
Writes the same files as a run does to policy/ at its end: a PEFT adapter, or the whole model for transformers. It needs
no GPU, even if the run has one, and can be used while the run continues.

examples:
  rlpipe export outputs/run/checkpoints/step_000300 at_300
  rlpipe export outputs/run/checkpoints/step_000300 at_300 --base models/base
"""


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "export", run_export, "export the policy of a checkpoint", epilog=EXPORT_NOTES)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a step_... folder")
    parser.add_argument("output", metavar="OUTPUT", help="folder to create for the policy")
    parser.add_argument(
        "--base", metavar="PATH", help="folder or hub id of the model that was trained; default: the run's model.path"
    )
    add_trust_argument(parser)


def run_export(arguments: argparse.Namespace) -> None:
    from rlpipe.learner.checkpoints import export_checkpoint

    export_checkpoint(
        Path(arguments.checkpoint), Path(arguments.output), base=arguments.base, trusted=arguments.trust_remote_code
    )
    print(f"written to {arguments.output}")

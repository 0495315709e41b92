"""``rlpipe sandbox``: test the sandbox for code that models wrote on this machine."""

from __future__ import annotations

import argparse

from rlpipe.commands.arguments import Commands, add_command
from rlpipe.errors import RunError

SANDBOX_NOTES = """\
Programs try to break out of the sandbox that `isolation: sandbox` provides. Run this as the same user and in the same
container as the scoring processes, such as in a Ray job. The exit code is 1 if any attempt succeeds.
"""


def add_commands(commands: Commands) -> None:
    add_command(
        commands,
        "sandbox",
        run_sandbox,
        "test the sandbox for code that models wrote on this machine",
        epilog=SANDBOX_NOTES,
    )


def run_sandbox(arguments: argparse.Namespace) -> None:
    from rlpipe.scoring.sandbox.confinement import describe_confinement
    from rlpipe.scoring.sandbox.self_check import check_sandbox

    held = check_sandbox()
    print(f"programs are confined by {describe_confinement()}")
    for name, has_held in held.items():
        print(f"{'held' if has_held else 'FAILED':<8}{name}")
    if failed := [name for name, has_held in held.items() if not has_held]:
        raise RunError(f"the sandbox did not hold: a program could {', '.join(failed)}")

"""The command ``rlpipe import``, which turns configs of other systems into configs of rlpipe."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlpipe.commands.arguments import Commands, add_command
from rlpipe.errors import ConfigError

NOTES = """\
Reads YAML files of axolotl, shell scripts and YAML files of verl and OpenRLHF, and scripts, commands and YAML files of
TRL.
Nothing in the file is executed. Each setting becomes an option, or a comment with the reason why it has no equivalent.
"""

METHODS = (
    *("sft", "dpo", "kto", "orpo", "cpo", "reward_model", "process_reward_model"),
    *("grpo", "rloo", "online_dpo"),
)


def add_import(commands: Commands) -> None:
    parser = add_command(commands, "import", run_import, "convert a config of another system to rlpipe", epilog=NOTES)
    parser.add_argument("file", metavar="FILE", help="a YAML file, a shell script or a Python script")
    parser.add_argument("-o", "--output", metavar="FILE", help="YAML file to write; default: print it")
    parser.add_argument(
        "--from",
        dest="system",
        choices=("axolotl", "openrlhf", "trl", "verl"),
        help="the system that a YAML file is for, where its options do not show it",
    )
    parser.add_argument("--method", choices=METHODS, help="the method, where the file does not show it")


def run_import(arguments: argparse.Namespace) -> None:
    from rlpipe.common.atomic_io import write_whole
    from rlpipe.configs.foreign.foreign_file import read_foreign
    from rlpipe.configs.foreign.foreign_run import SYSTEMS
    from rlpipe.configs.translation import translate, write

    path = Path(arguments.file)
    run = read_foreign(path, arguments.system, "rl" if arguments.method == "grpo" else arguments.method)
    translation = translate(run)
    text = write(translation, f"{SYSTEMS[run.system]}'s {path.name}")
    if arguments.output is None:
        print(text, end="")
        return
    if Path(arguments.output).exists():
        raise ConfigError(f"{arguments.output} exists already; name another file, or delete it")
    try:
        write_whole(Path(arguments.output), text)
    except OSError as error:
        raise ConfigError(f"--output: {arguments.output} can't be written: {error.strerror}") from None
    print(f"written to {arguments.output}: {len(translation.options)} options, {len(translation.notes)} comments")

"""The command line, whose commands import what they need when they run."""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version

from rlpipe.commands import data, doctor, importing, ledger, policies, preflight, runs, viewing
from rlpipe.commands.arguments import OneLineParser
from rlpipe.common.formatting import drop_output, printable
from rlpipe.common.signals import interrupted_by_sigterm
from rlpipe.errors import InputError, Interrupted, RlpipeError, RunError

LIBRARIES = ("DeepSpeed", "bitsandbytes.backends.cpu.ops", "transformers.modeling_utils")
"""Loggers of libraries whose messages about missing optional components, or about what rlpipe refuses, are hidden."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0 done, 1 the run failed, 2 wrong input, 3 an audit differs, 130 interrupted."""
    _open_standard_files()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # texts of models and files may have characters that can't be encoded
            stream.reconfigure(errors="backslashreplace")
    for name in LIBRARIES:
        logging.getLogger(name).addFilter(_is_useful)
    try:
        with interrupted_by_sigterm():
            arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
            command: Callable[[argparse.Namespace], None] = arguments.command
            command(arguments)
            if sys.stdout is not None:  # closed by the caller, as in `rlpipe config >&-`
                sys.stdout.flush()
    except RlpipeError as error:
        print(f"rlpipe: error: {user_message(error)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("rlpipe: interrupted", file=sys.stderr)
        return Interrupted.exit_code
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        drop_output(sys.stdout)
    except PermissionError as error:
        if error.filename is None:
            raise
        print(f"rlpipe: error: {error.filename}: this user may not read or write it", file=sys.stderr)
        return InputError.exit_code
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        drop_output(sys.stdout)
        print(f"rlpipe: error: {error}", file=sys.stderr)
        return RunError.exit_code
    return 0


def _open_standard_files() -> None:
    """Open ``/dev/null``, also for children, as each closed standard file: the next opened file would become it."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _is_useful(record: logging.LogRecord) -> bool:
    """Return whether a library's log message is useful to the user."""
    message = record.getMessage()
    refused = "LOAD REPORT" in message and ("| MISSING" in message or "| MISMATCH" in message)
    return not (refused or message.startswith(("Setting accelerator to CPU", "Failed to load CPU gemm_4bit")))


def user_message(error: RlpipeError) -> str:
    """Return the message in one line; if the error crossed Ray, its cause has the text without the remote traceback."""
    cause = getattr(error, "cause", None)
    return printable(" ".join(str(cause if isinstance(cause, RlpipeError) else error).split()))


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; positional ones may come between options, which argparse alone refuses."""
    parser = make_parser()
    arguments, rest = parser.parse_known_args(argv)
    for text in rest:
        if text.startswith("-"):
            parser.error(f"there is no option {text} (options of a run are written key=value)")
    if rest and "run" in arguments and "overrides" not in arguments:
        parser.error(f"only one run can be given, not also {rest[0]}")
    if rest:
        positional = next((name for name in ("prompts", "overrides", "runs") if name in arguments), None)
        if positional is None:
            parser.error(f"unexpected argument: {rest[0]}")
        getattr(arguments, positional).extend(rest)
    if "overrides" in arguments:
        take_config_file(parser, arguments)
    return arguments


def take_config_file(parser: OneLineParser, arguments: argparse.Namespace) -> None:
    """Move a YAML file among the overrides to ``config``, as if it had been passed with ``--config``."""
    is_file = [text.endswith((".yaml", ".yml")) and "=" not in text and text[0] != "~" for text in arguments.overrides]
    files = [text for text, is_config in zip(arguments.overrides, is_file, strict=True) if is_config]
    config_files = [*files, *(arguments.config or [])]
    if len(config_files) > 1:
        parser.error(f"only one config file can be given, not {' and '.join(config_files)}")
    arguments.config = next(iter(config_files), None)
    arguments.overrides = [text for text in arguments.overrides if text not in files]


def make_parser() -> OneLineParser:
    parser = OneLineParser(prog="rlpipe", description="Train language models with reinforcement learning on Ray.")
    parser.add_argument("--version", action="version", version=f"rlpipe {version('rlpipe')}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=OneLineParser)
    for add in (
        runs.add_train,
        runs.add_config,
        importing.add_import,
        data.add_commands,
        doctor.add_doctor,
        preflight.add_plan,
        preflight.add_simulate,
        ledger.add_commands,
        viewing.add_view,
        policies.add_generate,
        runs.add_episode,
        policies.add_export,
        policies.add_merge,
        preflight.add_sandbox,
    ):
        add(commands)
    return parser

"""Shared parts of the commands' arguments: a parser with one-line errors, and validating types."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn, TypeAlias

from rlpipe.errors import InputError


class OneLineParser(argparse.ArgumentParser):
    """Parser that reports a wrong argument in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(InputError.exit_code, f"rlpipe: error: {message}; see {self.prog} --help\n")


Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"


def add_command(
    commands: argparse._SubParsersAction[OneLineParser],
    name: str,
    command: Callable[[argparse.Namespace], None],
    summary: str,
    *,
    epilog: str | None = None,
) -> OneLineParser:
    parser = commands.add_parser(
        name,
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(command=command)
    return parser


def add_run_arguments(parser: OneLineParser, *, takes_runs: bool = False) -> None:
    """Add a config's file and options; a command that ``takes_runs`` accepts a run's folder in their place."""
    parser.add_argument("--config", metavar="FILE", action="append", help="a YAML file with options and group choices")
    parser.add_argument(
        "overrides",
        nargs="*",
        default=[],
        metavar="RUN, FILE or key=value" if takes_runs else "FILE or key=value",
        help=("the output folder of a run; or " if takes_runs else "")
        + "a YAML file as for --config; options and group choices",
    )


def add_trust_argument(parser: OneLineParser, effect: str = "run the model's own code if the run did") -> None:
    """Add the flag without which a model's own code is not executed, even if a checkpoint's config wants it."""
    parser.add_argument("--trust-remote-code", action="store_true", help=f"{effect} (model.trust_remote_code)")


LARGEST = 2**63
"""Bound on numbers, which SQLite can compare."""


def at_least(kind: type[int] | type[float], minimum: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = kind(-1)
        if not minimum <= value < LARGEST:
            words = "an integer" if kind is int else "a number"
            limit = "" if value < LARGEST else " and less than 2**63"
            raise argparse.ArgumentTypeError(f"{text!r} is not {words} of at least {minimum:g}{limit}")
        return value

    return parse


def span(kind: type[int] | type[float], between: str) -> Callable[[str], tuple[Any, Any]]:
    """Return a parser of one value, or of two bounds of which either may be left out."""

    def parse(text: str) -> tuple[Any, Any]:
        first, separator, last = text.partition(between)
        try:
            lower, upper = (kind(bound) if bound else None for bound in (first, last if separator else first))
        except ValueError:
            lower = upper = None
        if max((abs(bound) for bound in (lower, upper) if bound is not None), default=LARGEST) >= LARGEST:
            raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor bounds such as 1{between}3")
        if lower is not None and upper is not None and lower > upper:
            raise argparse.ArgumentTypeError(f"{text!r} ends before it begins")
        return lower, upper

    return parse

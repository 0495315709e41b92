"""``rlpipe config``: print the resolved config of a run, or list all options and groups."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from rlpipe.commands.arguments import Commands, add_command, add_run_arguments
from rlpipe.errors import InputError


def add_commands(commands: Commands) -> None:
    config = add_command(commands, "config", run_config, "print the resolved config of a run, or list the options")
    add_run_arguments(config)
    shown = config.add_mutually_exclusive_group()
    shown.add_argument("--docs", action="store_true", help="list every option, or those under the named sections")
    shown.add_argument(
        "--groups", action="store_true", help="list the config groups, or the named ones, and their choices"
    )


def run_config(arguments: argparse.Namespace) -> None:
    if arguments.docs:
        print("\n".join(document_options(arguments.overrides)))
    elif arguments.groups:
        print("\n".join(document_groups(arguments.overrides)))
    else:
        print_tree(arguments)


def print_tree(arguments: argparse.Namespace) -> None:
    """Print the config, even if it is incomplete or contradictory, and then raise ``ConfigError`` if it is."""
    from rlpipe.configs.compose import build_config, compose_tree, require_rewards, show_tree

    tree = compose_tree(arguments.overrides, file=arguments.config)
    print(show_tree(tree), end="", flush=True)
    require_rewards(build_config(tree))


def document_options(prefixes: Sequence[str]) -> Iterator[str]:
    """Yield the default, type, range and description of every option under one of the prefixes, or of all options."""
    from rlpipe.configs.options import describe_default, options

    found = [option for option in options() if not prefixes or any(covers(prefix, option.name) for prefix in prefixes)]
    if not found:
        raise InputError(f"there is no option under {', '.join(prefixes)}; see rlpipe config --docs")
    for option in found:
        allowed = f", {option.allowed}" if option.allowed else ""
        yield f"{option.name}: {describe_default(option)}\n    {option.doc} ({option.type}{allowed})"


def covers(prefix: str, name: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}.")


def document_groups(groups: Sequence[str]) -> Iterator[str]:
    """Yield the choices of the given config groups, or of all groups, with their descriptions."""
    from rlpipe.configs.compose import describe_choice, list_groups

    for group in groups:
        if group not in list_groups():
            raise InputError(f"there is no config group {group}; the groups are {', '.join(list_groups())}")
    for group in groups or list_groups():
        yield group
        yield from (f"    {group}={name}: {describe_choice(group, name)}" for name in list_groups()[group])

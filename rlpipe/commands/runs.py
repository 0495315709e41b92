"""``rlpipe train``, ``eval``, ``config`` and ``episode``: what takes the config of a run."""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout

from rlpipe.commands.arguments import Commands, add_command, add_run_arguments, at_least
from rlpipe.errors import InputError

TRAIN_NOTES = """\
examples:
  rlpipe train experiment=quickstart algorithm.loss.clip_high=0.28
  rlpipe train --config my_run.yaml learner=fsdp2 learner.num_ranks=4

rlpipe config --docs lists every option, rlpipe config --groups every config group.
"""


def add_train(commands: Commands) -> None:
    add_run_arguments(add_command(commands, "train", run_train, "train a policy", epilog=TRAIN_NOTES))
    evaluate = add_command(
        commands, "eval", run_eval, "evaluate a policy, optionally with an adapter, on held-out prompts"
    )
    add_run_arguments(evaluate)
    evaluate.add_argument("--adapter", metavar="FOLDER", help="a PEFT adapter to evaluate")
    evaluate.add_argument("--json", action="store_true", help="print one JSON object")


def run_train(arguments: argparse.Namespace) -> None:
    from rlpipe.configs.compose import load_config, require_rewards

    config = load_config(arguments.overrides, file=arguments.config)
    require_rewards(config)
    import psutil

    from rlpipe.preload import preloading
    from rlpipe.tracking.phases import PHASES

    PHASES.show(config.tracking, began=psutil.Process().create_time())
    try:
        preloading.begin(config)
        with PHASES.phase("importing libraries"):
            from rlpipe.run.pipeline import train

        train(config)
    finally:
        PHASES.hide()


def run_eval(arguments: argparse.Namespace) -> None:
    from rlpipe.configs.compose import load_config, require_rewards

    config = load_config(arguments.overrides, file=arguments.config)
    require_rewards(config)
    from rlpipe.run.pipeline import evaluate

    with redirect_stdout(sys.stderr):  # what is printed meanwhile, such as the progress of a warm-up
        metrics = evaluate(config, adapter=arguments.adapter)
    print(json.dumps(metrics, indent=2) if arguments.json else "\n".join(f"{k}: {v:.6g}" for k, v in metrics.items()))


def add_config(commands: Commands) -> None:
    config = add_command(commands, "config", run_config, "print the resolved config of a run, or list the options")
    add_run_arguments(config)
    shown = config.add_mutually_exclusive_group()
    shown.add_argument(
        "--docs",
        action="store_true",
        help="list every option, or those under the named sections, and with --config the functions of your own",
    )
    shown.add_argument(
        "--groups", action="store_true", help="list the config groups, or the named ones, and their choices"
    )


def run_config(arguments: argparse.Namespace) -> None:
    if arguments.docs:
        for line in document_options(arguments.overrides):
            print(line)
        for line in document_functions(arguments.config, arguments.overrides) if arguments.config else ():
            print(line)
    elif arguments.groups:
        if arguments.config is not None:
            raise InputError(f"--groups lists the choices of groups, and reads no --config {arguments.config}")
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

    matches = [
        option for option in options() if not prefixes or any(covers(prefix, option.name) for prefix in prefixes)
    ]
    unknown = [prefix for prefix in prefixes if not any(covers(prefix, option.name) for option in matches)]
    if unknown:
        raise InputError(f"there is no option under {', '.join(unknown)}; see rlpipe config --docs")
    for option in matches:
        allowed = f", {option.allowed}" if option.allowed else ""
        yield f"{option.name}: {describe_default(option)}\n    {option.doc} ({option.type}{allowed})"


def document_functions(file: str, prefixes: Sequence[str]) -> Iterator[str]:
    """Yield the functions that a config file, complete or not, names in place of built-in ones under the prefixes."""
    from omegaconf import OmegaConf

    from rlpipe.algorithms.plugins import OWN_FUNCTIONS, code_digest, load_function
    from rlpipe.configs.compose import compose_tree
    from rlpipe.configs.schema.option import UserFunction

    tree = compose_tree([], file=file)
    for section in OWN_FUNCTIONS:
        path = OmegaConf.select(tree, f"{section}.path")
        if path is not None and (not prefixes or any(covers(prefix, f"{section}.path") for prefix in prefixes)):
            function = load_function(UserFunction(path=path), section)
            doc = (inspect.getdoc(function) or "It has no docstring.").partition("\n")[0]
            yield f"{section}.path: {path}\n    {doc} (your own function, SHA-256 {code_digest(path, section)})"


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


def add_episode(commands: Commands) -> None:
    parser = add_command(commands, "episode", run_episode, "play one episode and show which of its tokens are trained")
    parser.add_argument("--row", type=at_least(int, 0), default=0, metavar="N", help="row of the data, counted from 0")
    parser.add_argument("--seed", type=at_least(int, 0), default=0, metavar="N", help="random seed")
    parser.add_argument("--temperature", type=at_least(float, 0), metavar="T", help="0: greedy; default: the run's")
    add_run_arguments(parser)


def run_episode(arguments: argparse.Namespace) -> None:
    from rlpipe.commands.episode import play_episode
    from rlpipe.configs.compose import load_config
    from rlpipe.data.row_view import print_rows

    config = load_config(arguments.overrides, file=arguments.config)
    rows = play_episode(config, row=arguments.row, seed=arguments.seed, temperature=arguments.temperature)
    print_rows(rows, [], trains=True)

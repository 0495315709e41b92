"""``rlpipe episode``: play one episode of a config's environment, without Ray."""

from __future__ import annotations

import argparse

from rlpipe.commands.arguments import Commands, add_command, add_run_arguments, at_least


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "episode", run_episode, "play one episode and show which of its tokens are trained")
    parser.add_argument("--row", type=at_least(int, 0), default=0, metavar="N", help="row of the data, counted from 0")
    parser.add_argument("--seed", type=at_least(int, 0), default=0, metavar="N", help="random seed")
    parser.add_argument("--temperature", type=at_least(float, 0), metavar="T", help="0: greedy; default: the run's")
    add_run_arguments(parser)


def run_episode(arguments: argparse.Namespace) -> None:
    from rlpipe.commands.played_episode import play_episode
    from rlpipe.configs.compose import load_config
    from rlpipe.data.row_view import print_rows

    config = load_config(arguments.overrides, file=arguments.config)
    rows = play_episode(config, row=arguments.row, seed=arguments.seed, temperature=arguments.temperature)
    print_rows(rows, [], trains=True)

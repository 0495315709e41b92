"""``rlpipe simulate``: simulate a run in virtual time."""

from __future__ import annotations

import argparse
from pathlib import Path

from rlpipe.commands.arguments import Commands, add_command, add_run_arguments, at_least

SIMULATE_NOTES = """\
DIST is a distribution of seconds:
  constant:S            always S
  uniform:A,B           between A and B
  exponential:MEAN      exponential
  lognormal:MEAN,SIGMA  log-normal; SIGMA is the standard deviation of the logarithm
  empirical:FILE        drawn from the numbers in a text file, one per line

examples:
  rlpipe simulate experiment=gsm8k --generate lognormal:20,0.5 --score constant:0.2 --train constant:40 --minutes 60
  rlpipe simulate --from outputs/quickstart --engines 4
"""


def add_commands(commands: Commands) -> None:
    parser = add_command(commands, "simulate", run_simulate, "simulate a run in virtual time", epilog=SIMULATE_NOTES)
    add_run_arguments(parser)
    times = parser.add_argument_group("times")
    times.add_argument("--generate", metavar="DIST", help="time to generate a group that is alone on an engine")
    times.add_argument(
        "--score",
        metavar="[POOL=]DIST",
        action="append",
        default=[],
        help="time to score a group in one process; with POOL= for one of several pools; default: 0",
    )
    times.add_argument("--train", metavar="DIST", help="time to train a step on the config's ranks")
    times.add_argument("--sync", metavar="DIST", help="time until all engines serve new weights; default: 0")
    times.add_argument(
        "--from",
        dest="run",
        metavar="RUN",
        help="folder of a run, whose config is used, and whose ledger provides the times that are not given",
    )
    times.add_argument(
        "--slowdown",
        type=at_least(float, 1),
        default=1.0,
        metavar="X",
        help="how many times as long a group takes on a full engine as alone",
    )
    parser.add_argument(
        "--engines", type=at_least(int, 1), metavar="N", help="number of engines; default: the config's"
    )
    parser.add_argument(
        "--places", type=at_least(int, 1), metavar="N", help="groups that an engine samples at the same time"
    )
    parser.add_argument(
        "--minutes",
        type=at_least(float, 0),
        default=1.0,
        metavar="M",
        help="minutes of training to simulate; default: 1",
    )
    parser.add_argument("--seed", type=at_least(int, 0), default=0, metavar="N", help="random seed")
    parser.add_argument(
        "--add",
        type=at_least(int, 1),
        default=1,
        metavar="N",
        help="processes of each kind that the advice adds; default: 1",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_simulate(arguments: argparse.Namespace) -> None:
    from rlpipe.configs.compose import load_config
    from rlpipe.simulation.setup import GivenTimes, read_setup, read_times
    from rlpipe.simulation.study import study

    run = Path(arguments.run) if arguments.run else None
    file = arguments.config
    if file is None and run is not None and (run / "config.yaml").is_file():
        file = run / "config.yaml"
    engines = [f"rollout.num_engines={arguments.engines}"] if arguments.engines else []
    config = load_config([*arguments.overrides, *engines], file=file, need_files=False)
    given = GivenTimes(
        generate=arguments.generate, score=arguments.score, train=arguments.train, sync=arguments.sync, run=run
    )
    times = read_times(config, given, slowdown=arguments.slowdown)
    setup = read_setup(config, times, groups_per_engine=arguments.places, slowdown=arguments.slowdown)
    result = study(setup, seed=arguments.seed, minutes=arguments.minutes, add=arguments.add)
    print(result.to_json() if arguments.json else result.to_text())

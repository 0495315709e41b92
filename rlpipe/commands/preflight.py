"""``rlpipe plan``, ``simulate`` and ``sandbox``: what a run needs and what holds on a machine, before it starts."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.commands.arguments import Commands, add_command, add_run_arguments, at_least
from rlpipe.common import run_files
from rlpipe.common.imports import without_collection
from rlpipe.errors import InputError, RunError

if TYPE_CHECKING:
    from rlpipe.hardware.device import Device


PLAN_NOTES = """\
examples:
  rlpipe plan experiment=gsm8k_qwen3_8b_lora --device h100-80g
  rlpipe plan --config my_run.yaml --device a100-40g rollout.tensor_parallel_size=2 rollout.num_gpus=2
  rlpipe plan --calibrate
"""
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
SANDBOX_NOTES = """\
Programs try to break out of the sandbox that `isolation: sandbox` provides. Run this as the same user and in the same
container as the scoring processes, such as in a Ray job. The exit code is 1 if any attempt succeeds.
"""


def add_plan(commands: Commands) -> None:
    parser = add_command(
        commands, "plan", run_plan, "estimate a run's memory and time, and what would make it fit", epilog=PLAN_NOTES
    )
    add_run_arguments(parser)
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="device to plan for, such as h100-80g; default, or 'this': this machine, as measured",
    )
    parser.add_argument(
        "--calibrate",
        action="store_true",
        help="measure this machine's GPU, or CPU if there is none, and store the result; without a config, only that",
    )
    parser.add_argument(
        "--host-memory-gib",
        type=float,
        metavar="GIB",
        help="host memory of the machine; default: that of the device table or the measurement",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_plan(arguments: argparse.Namespace) -> None:
    from rlpipe.configs.compose import load_config
    from rlpipe.hardware.device_profiles import OWN_MACHINE, find_device

    if arguments.calibrate and arguments.device not in (None, OWN_MACHINE):
        raise InputError(f"--calibrate measures this machine, not --device {arguments.device}: leave one of them out")
    if arguments.calibrate and not arguments.overrides and arguments.config is None:
        if arguments.host_memory_gib is not None:
            raise InputError("--host-memory-gib is for the plan of a config, and there is none: leave it out")
        print_measurement(measure_machine(), as_json=arguments.json)
        return
    config = load_config(arguments.overrides, file=arguments.config, need_files=False)
    # Before the imports below, which load torch.
    device = measure_machine() if arguments.calibrate else find_device(arguments.device)
    if arguments.host_memory_gib is not None:
        if not 0 < arguments.host_memory_gib < math.inf:
            raise InputError(f"--host-memory-gib is {arguments.host_memory_gib:g}: give a number above 0")
        device = replace(device, host_memory_bytes=int(arguments.host_memory_gib * 2**30))
    with without_collection():  # most of the time goes to imports, and then to a trace of a million small objects
        from rlpipe.plan.report import make_report

        report = make_report(config, device)
    print(report.to_json() if arguments.json else report.to_text())


def measure_machine() -> Device:
    import torch

    from rlpipe.hardware.calibration import calibrate

    return calibrate(torch.device("cuda:0" if torch.cuda.is_available() else "cpu"))


def print_measurement(device: Device, *, as_json: bool) -> None:
    from rlpipe.hardware.device_profiles import path_of
    from rlpipe.plan.sections import device_section, to_text

    section, path = device_section(device, [*device.matmul_flops]), path_of(device.name)
    if as_json:
        print(json.dumps({section.name: section.data, "path": str(path)}))
    else:
        print(f"{to_text([section])}\n\nstored in {path}")


def add_simulate(commands: Commands) -> None:
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
        help="time of a group on a full engine, relative to one alone; default: 1",
    )
    parser.add_argument(
        "--engines", type=at_least(int, 1), metavar="N", help="number of engines; default: the config's"
    )
    parser.add_argument(
        "--groups-per-engine",
        type=at_least(int, 1),
        metavar="N",
        help="groups that an engine samples at the same time; default: its sequences divided by the group size",
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
    if run is not None and not run.exists():
        raise InputError(f"--from needs the folder of a run; there is no {run}")
    if file is None and run is not None and (run / run_files.CONFIG).is_file():
        file = run / run_files.CONFIG
    engines = [f"rollout.num_engines={arguments.engines}"] if arguments.engines else []
    config = load_config([*arguments.overrides, *engines], file=file, need_files=False)
    explicit_times = GivenTimes(
        generate=arguments.generate, score=arguments.score, train=arguments.train, sync=arguments.sync, run=run
    )
    times = read_times(config, explicit_times, slowdown=arguments.slowdown)
    setup = read_setup(config, times, groups_per_engine=arguments.groups_per_engine, slowdown=arguments.slowdown)
    result = study(setup, seed=arguments.seed, minutes=arguments.minutes, add=arguments.add)
    print(result.to_json() if arguments.json else result.to_text())


def add_sandbox(commands: Commands) -> None:
    add_command(
        commands, "sandbox", run_sandbox, "test this machine's sandbox for code from models", epilog=SANDBOX_NOTES
    )


def run_sandbox(arguments: argparse.Namespace) -> None:
    from rlpipe.scoring.sandbox.confinement import describe_confinement
    from rlpipe.scoring.sandbox.self_check import check_sandbox

    held = check_sandbox()
    print(f"programs are confined by {describe_confinement()}")
    for name, has_held in held.items():
        print(f"{'held' if has_held else 'FAILED':<8}{name}")
    if failed := [name for name, has_held in held.items() if not has_held]:
        raise RunError(f"the sandbox is not secure: a program could {', '.join(failed)}")

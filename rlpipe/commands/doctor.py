"""``rlpipe doctor``: checks before a run, and the reason why one has ended."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rlpipe.commands.arguments import Commands, add_command, add_run_arguments
from rlpipe.errors import InputError, RlpipeError, RunError

if TYPE_CHECKING:
    from rlpipe.doctor.observations import Check, Observation

NOTES = """\
examples:
  rlpipe doctor run.yaml                    # before a run: this machine, the config, and one step in a temporary folder
  rlpipe doctor experiment=gsm8k --quick    # the same without the step
  rlpipe doctor outputs/run                 # how a run ended, and why

Each line is ok, skipped, a warning or a PROBLEM, with what to do about it. The exit code is 1 if a run would fail.
"""


def add_doctor(commands: Commands) -> None:
    parser = add_command(
        commands, "doctor", run_doctor, "check a run before it starts, or say why one has ended", epilog=NOTES
    )
    add_run_arguments(parser, takes_runs=True)
    parser.add_argument("--quick", action="store_true", help="skip the trial step")
    parser.add_argument("--json", action="store_true", help="print one JSON object per line")


def run_doctor(arguments: argparse.Namespace) -> None:
    """Print what is found; raise ``RunError`` if something would make the run fail."""
    run = Path(arguments.overrides[0]) if len(arguments.overrides) == 1 and arguments.config is None else None
    if run is not None and run.is_dir():
        from rlpipe.doctor.diagnosis import diagnose

        if arguments.quick:
            raise InputError(f"--quick is for a config, and {run} is a run that has begun: leave it out")

        print_all(diagnose(run), as_json=arguments.json)
    elif run is not None and os.sep in arguments.overrides[0] and "=" not in str(run):
        raise InputError(f"there is no run {run}: name its folder, or give a config's options as key=value")
    elif num_problems := print_all(check_before(arguments), as_json=arguments.json):
        raise RunError(f"{num_problems} problem{'s' * (num_problems > 1)} found; a run would fail")


def check_before(arguments: argparse.Namespace) -> Iterator[Observation]:
    """Yield what is found on this machine, in the config, and in one step if nothing else is wrong."""
    from rlpipe.configs.compose import load_config, require_rewards
    from rlpipe.doctor import machine_checks
    from rlpipe.doctor.observations import Status, examine, ok, problem, skipped

    config = None
    if arguments.overrides or arguments.config is not None:
        try:
            config = load_config(arguments.overrides, file=arguments.config)
            require_rewards(config)
            yield ok("config", "its options fit together")
        except RlpipeError as error:
            config = None
            yield problem("config", " ".join(str(error).split()))
    output = Path("." if config is None else config.output).absolute()
    machine: dict[str, Check] = {
        "versions": machine_checks.check_versions,
        "devices": partial(machine_checks.check_devices, config),
        "memory": machine_checks.check_memory,
        "clock": partial(machine_checks.check_clock, output),
        "limits": partial(machine_checks.check_limits, config),
        "network": partial(machine_checks.check_network, config),
    }
    is_ok = True
    for observation in examine(machine):
        is_ok = is_ok and observation.status is not Status.PROBLEM
        yield observation
    if config is None:
        yield from examine({"disk": partial(machine_checks.check_disks, output, None)})
        return
    from rlpipe.doctor.run_checks import RunChecks
    from rlpipe.doctor.trial_step import try_step

    checks = RunChecks(config)
    for observation in examine(checks.all()):
        is_ok = is_ok and observation.status is not Status.PROBLEM
        yield observation
    if arguments.quick or checks.is_made_first:
        yield skipped("trial step", "--quick" if arguments.quick else "the policy is made when the run starts")
    elif not is_ok:
        yield skipped("trial step", "the problems above come first")
    else:
        yield from examine({"trial step": partial(try_step, config)})


def print_all(observations: Iterator[Observation], *, as_json: bool) -> int:
    """Print each observation as it is made; return the number of problems."""
    from rlpipe.common.formatting import printable
    from rlpipe.doctor.observations import Status

    num_problems = 0
    for observation in observations:
        num_problems += observation.status is Status.PROBLEM
        print(
            json.dumps(asdict(observation), ensure_ascii=False) if as_json else printable(observation.line()),
            flush=True,
        )
    return num_problems

"""``rlpipe plan``: estimate the memory and time of a run before it starts."""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from rlpipe.commands.arguments import Commands, add_command, add_run_arguments
from rlpipe.common.imports import without_collection
from rlpipe.errors import InputError

if TYPE_CHECKING:
    from rlpipe.hardware.device import Device

PLAN_NOTES = """\
examples:
  rlpipe plan experiment=gsm8k_qwen3_8b_lora --device h100-80g
  rlpipe plan --config my_run.yaml --device a100-40g rollout.tensor_parallel_size=2 rollout.num_gpus=2
  rlpipe plan --calibrate
"""


def add_commands(commands: Commands) -> None:
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
    from rlpipe.hardware.devices import OWN_MACHINE, find_device

    if arguments.calibrate and arguments.device not in (None, OWN_MACHINE):
        raise InputError(f"--calibrate measures this machine, not --device {arguments.device}: leave one of them out")
    if arguments.calibrate and not arguments.overrides and arguments.config is None:
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
    from rlpipe.hardware.devices import path_of
    from rlpipe.plan.sections import device_section, to_text

    section, path = device_section(device, [*device.matmul_flops]), path_of(device.name)
    if as_json:
        print(json.dumps({section.name: section.data, "path": str(path)}))
    else:
        print(f"{to_text([section])}\n\nstored in {path}")

"""``rlpipe plan``: what a run will take, before it starts."""

from __future__ import annotations

import argparse

from rlpipe.commands.arguments import Commands, add_command, add_run_arguments

PLAN_NOTES = """\
examples:
  rlpipe plan experiment=gsm8k_qwen3_8b_lora --device h100-80g
  rlpipe plan --config my_run.yaml --device a100-40g rollout.tensor_parallel_size=2 rollout.num_gpus=2
"""


def add_commands(commands: Commands) -> None:
    parser = add_command(
        commands,
        "plan",
        run_plan,
        "say what a run will take: memory, time, and what would make it fit",
        epilog=PLAN_NOTES,
    )
    add_run_arguments(parser)
    parser.add_argument("--device", metavar="NAME", help="such as h100-80g; default, and this: what was measured on this machine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run_plan(arguments: argparse.Namespace) -> None:
    from rlpipe.configs.compose import load_config
    from rlpipe.hardware.devices import find_device

    config = load_config(arguments.overrides, file=arguments.config, need_files=False)
    device = find_device(arguments.device)  # before what follows, which imports torch
    from rlpipe.plan.report import make_report

    report = make_report(config, device)
    print(report.to_json() if arguments.json else report.to_text())

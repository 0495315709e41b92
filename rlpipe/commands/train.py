"""``rlpipe train`` and ``rlpipe eval``: train or evaluate a policy."""

from __future__ import annotations

import argparse
import json

from rlpipe.commands.arguments import Commands, add_command, add_run_arguments

TRAIN_EXAMPLES = """\
examples:
  rlpipe train experiment=quickstart algorithm.loss.clip_high=0.28
  rlpipe train --config my_run.yaml learner=fsdp2 learner.num_ranks=4

rlpipe config --docs lists every option, rlpipe config --groups every config group.
"""


def add_commands(commands: Commands) -> None:
    add_run_arguments(add_command(commands, "train", run_train, "train a policy", epilog=TRAIN_EXAMPLES))
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

    metrics = evaluate(config, adapter=arguments.adapter)
    print(json.dumps(metrics, indent=2) if arguments.json else "\n".join(f"{k}: {v:.6g}" for k, v in metrics.items()))

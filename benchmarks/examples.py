"""The examples that run on two cores, as users run them: what each learned, how long it took, what health rules said.

The exit code is 1 if an example fails, reaches less than it must, or has health rules that warned (``missed``).

Run: ``python -m benchmarks.examples`` (two and a half hours) or, for some, ``python -m benchmarks.examples guess sft``.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlpipe.viewer.viewed_run import ViewedRun

ROOT = Path(__file__).parents[1]
FOLDER = Path("outputs/benchmarks/examples").absolute()
METRICS = ("eval/accuracy", "eval/rewards/accuracies", "eval/loss", "reward", "loss")
"""Metrics that tell what was learned, the most telling first."""
PREFERENCES = ("--config", "examples/preferences/run.yaml")
COMMANDS = {
    "quickstart": ("experiment=quickstart",),
    "smollm2": ("experiment=smollm2",),
    **{name: (f"experiment={name}",) for name in ("full_finetuning", "rloo", "gspo", "dr_grpo", "dapo")},
    "online_dpo": ("experiment=quickstart", "algorithm=online_dpo"),
    "images": ("--config", "examples/images/sft.yaml"),
    "orpo": (*PREFERENCES, "algorithm=orpo", "algorithm.num_steps=1000"),
    "simpo": (*PREFERENCES, "algorithm=simpo", "algorithm.num_steps=1000"),
    "kto": (
        *(*PREFERENCES, "algorithm=kto", "data.transform=examples/preferences/sums.py:labelled"),
        *("algorithm.preference.cross_entropy_coef=0", "algorithm.preference.beta=0.5"),
        *("algorithm.groups_per_step=64", "algorithm.num_steps=1000", "learner.optimizer.lr=3e-4"),
        "model.prepare=rlpipe.quickstart:warm_up",
    ),
    **{
        name: ("--config", f"examples/{name}/run.yaml")
        for name in (
            *("words", "own_data", "own_algorithm", "custom_reward", "judge", "math", "code", "sft", "preferences"),
            *("ebft", "ebft_strided", "reward_model", "process_reward"),
            *("guess", "tictactoe", "calculator", "frozen_lake", "agent_frameworks"),
        )
    },
}
"""Arguments of ``rlpipe train``, by example."""
LEAST = {
    **dict.fromkeys(("preferences", "orpo", "simpo", "kto", "reward_model", "process_reward"), 0.9),
    **dict.fromkeys(("quickstart", "online_dpo", "guess", "frozen_lake", "tictactoe"), 0.8),
    "calculator": 0.9,
}
"""Least value that an example must reach in its most telling metric."""


def run_example(name: str, overrides: Sequence[str], folder: str | None = None) -> dict[str, Any]:
    """Run an example into a folder of its own; return its figures and health findings, or the end of its error."""
    output = FOLDER / (folder or name)
    command = [sys.executable, "-m", "rlpipe", "train", *COMMANDS[name], f"output={output}", "resume=never", *overrides]
    shutil.rmtree(output, ignore_errors=True)
    began = time.monotonic()
    ended = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    found: dict[str, Any] = {"seconds": round(time.monotonic() - began, 1)}
    if ended.returncode != 0:
        return found | {"error": ended.stderr[-400:]}
    run = ViewedRun(output, name)
    run.refresh()
    metric = next(metric for metric in METRICS if metric in run.series.names)
    values = run.series.get([metric])[metric]["values"]
    said = run.events(kind="health")["events"][::-1]
    rules = sorted({event["subject"] for event in said})
    messages = [event["message"] for event in said]
    return found | {"metric": metric, "start": values[0], "end": values[-1], "rules": rules, "health": messages}


def find_missed(results: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Return why examples failed, by name: the rules that spoke, and a last value that is too low."""
    missed = {}
    for name, result in results.items():
        reasons = ["error"] * ("error" in result) + [*result.get("rules", [])]
        end = result.get("end", math.inf)
        if end is None:
            reasons.append(f"{result['metric']} is not finite")
        elif end < LEAST.get(name, -math.inf):
            reasons.append(f"{result['metric']} {end:.3g} < {LEAST[name]}")
        if reasons:
            missed[name] = reasons
    return missed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"examples to run; default: all of {', '.join(COMMANDS)}"
    )
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="OPTION=VALUE", help="options of all of them, e.g. seed=1"
    )
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in COMMANDS]:
        parser.error(f"no such example: {', '.join(unknown)}; there are {', '.join(COMMANDS)}")
    results = {}
    for name in arguments.names or COMMANDS:
        results[name] = run_example(name, arguments.set)
        print(f"{name:<18} {json.dumps(results[name])}", flush=True)
    quiet = not any(result.get("rules") for result in results.values())
    missed = find_missed(results)
    print(json.dumps({"quiet": quiet, "missed": missed, "examples": results}))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()

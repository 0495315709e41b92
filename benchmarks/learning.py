"""Learning in the examples of environments with several seeds, and from rewards of another game as a control.

The control plays `guess` with rewards for another number than the one that the answers are about: their distribution is
the same, and they tell nothing. Its policy is then evaluated by the true rewards.

Run: ``python -m benchmarks.learning`` (an hour) or, for some, ``python -m benchmarks.learning guess --seeds 0 1``.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import rlpipe
from benchmarks.examples import FOLDER, ROOT, run_example
from rlpipe.examples.guess.guess import LARGEST, Guess

EXAMPLES = ("guess", "frozen_lake", "tictactoe", "calculator")
CONTROL = "guess_shuffled"


class ShuffledGuess(Guess):
    """The game of `guess` with the rewards of another number, drawn at random for each game."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._other = Guess()
        self._other.reset({"number": random.Random(seed).randint(1, LARGEST)}, seed)
        return super().reset(row, seed)

    def step(self, action: str) -> rlpipe.Step:
        step, other = super().step(action), self._other.step(action)
        return rlpipe.Step(step.observation, reward=other.reward, done=step.done)


def run_control(seed: int) -> dict[str, Any]:
    """Train on shuffled rewards; return the share of held-out games that the policy wins."""
    folder = f"{CONTROL}-{seed}"
    found = run_example("guess", [f"seed={seed}", "environment.path=benchmarks.learning:ShuffledGuess"], folder)
    if "error" in found:
        return found
    policy = f"model.path={FOLDER / folder / 'policy'}"
    options = ["--config", "examples/guess/run.yaml", "--json", policy, "model.prepare=null", f"seed={seed}"]
    told = subprocess.run(
        [sys.executable, "-m", "rlpipe", "eval", *options], cwd=ROOT, capture_output=True, text=True, check=True
    )
    accuracy = json.loads(told.stdout)["eval/accuracy"]
    return {"seconds": found["seconds"], "end": accuracy}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = (*EXAMPLES, CONTROL)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"default: all of {', '.join(names)}")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.names if name not in names]:
        parser.error(f"no such example: {', '.join(unknown)}; there are {', '.join(names)}")
    results: dict[str, dict[int, Any]] = {}
    for name in arguments.names or names:
        for seed in arguments.seeds:
            is_control = name == CONTROL
            found = run_control(seed) if is_control else run_example(name, [f"seed={seed}"], f"{name}-{seed}")
            results.setdefault(name, {})[seed] = found
            print(f"{name:<14} seed {seed}: {json.dumps(found)}", flush=True)
    print(json.dumps({"learning": results}))


if __name__ == "__main__":
    main()

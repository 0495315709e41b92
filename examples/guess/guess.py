"""A game of several turns: the policy guesses a number, and is told whether it is higher or lower."""

import json
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rlpipe

LARGEST, NUM_GUESSES = 32, 5
REWARD_PER_BIT = 0.1
"""Reward for halving what is still possible; all of it is worth half a right guess."""


class Guess(rlpipe.Environment):
    """Guess the row's ``number``, from 1 to 32, in five guesses."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._number, self._left = int(row["number"]), NUM_GUESSES
        self._low, self._high = 1, LARGEST
        return f"1-{LARGEST}?"

    def step(self, action: str) -> rlpipe.Step:
        self._left -= 1
        if not action.isdecimal():
            return rlpipe.Step("a number", done=not self._left)
        guess, before = int(action), self._high - self._low + 1
        if guess == self._number:
            return rlpipe.Step("right", reward=1.0, done=True)
        if guess < self._number:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        bits = math.log2(before / (self._high - self._low + 1))
        said = "higher" if guess < self._number else "lower"
        return rlpipe.Step(said, reward=REWARD_PER_BIT * bits, done=not self._left)


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy on games that were played at random, and save it at ``config.model.path``."""
    output = Path(config.model.path).parent
    output.mkdir(parents=True, exist_ok=True)
    games = output / "games.jsonl"
    rng = random.Random(config.seed)
    games.write_text("".join(json.dumps({"messages": random_game(rng)}) + "\n" for _ in range(8000)))
    rlpipe.train(
        rlpipe.load_config(
            [
                "name=guess_warm_up",
                f"output={output}",
                f"seed={config.seed}",
                "algorithm=sft",
                "model=full",
                f"model.path={output}/random",
                "model.prepare=rlpipe.examples.guess.guess:make_policy",
                "model.dtype=float32",
                f"data.path={games}",
                "algorithm.num_steps=400",
                "algorithm.groups_per_step=64",
                "learner.num_cpus=2",
                "learner.optimizer.lr=2e-3",
                "learner.schedule.warmup_steps=10",
                "checkpoint=end",
                "tracking.ray_metrics=false",
            ]
        )
    )


def make_policy(config: rlpipe.Config) -> None:
    """Write a random policy of 0.4M parameters to ``config.model.path``."""
    from rlpipe.models.tiny import make_tiny_policy

    make_tiny_policy(config.model.path, hidden_size=128, num_layers=2, intermediate_size=384, seed=config.seed)


def random_game(rng: random.Random) -> list[dict[str, str]]:
    """Return the messages of a game whose guesses are drawn from what is still possible."""
    environment, low, high = Guess(), 1, LARGEST
    messages = [{"role": "user", "content": environment.reset({"number": rng.randint(low, high)}, seed=0)}]
    while True:
        guess = rng.randint(low, high)
        step = environment.step(str(guess))
        messages.append({"role": "assistant", "content": str(guess)})
        if step.done:
            return messages
        messages.append({"role": "user", "content": str(step.observation)})
        low, high = (guess + 1, high) if step.observation == "higher" else (low, guess - 1)

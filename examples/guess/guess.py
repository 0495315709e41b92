"""A game of several turns: the policy guesses a number, and is told whether it is higher or lower."""

import math
import random
from collections.abc import Mapping
from typing import Any

import rlpipe
from rlpipe.quickstart import teach

LARGEST, NUM_GUESSES = 32, 5
WORDS = [f"1-{LARGEST}?", "higher", "lower"]
"""Texts that are one token, which makes games short."""
REWARD_PER_BIT, REWARD_OF_RIGHT = 0.15, 0.25
"""Reward for halving what is still possible, and for the right guess besides; a game that is won earns 1 in all."""
TIMID = 0.7
"""Share of the guesses in the warm-up that are the lower one of two."""


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
            return rlpipe.Step("right", reward=REWARD_PER_BIT * math.log2(before) + REWARD_OF_RIGHT, done=True)
        if guess < self._number:
            self._low = max(self._low, guess + 1)
        else:
            self._high = min(self._high, guess - 1)
        bits = math.log2(before / (self._high - self._low + 1))
        hint = "higher" if guess < self._number else "lower"
        return rlpipe.Step(hint, reward=REWARD_PER_BIT * bits, done=not self._left)


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy on games that were played at random; ``model.prepare`` of the example."""
    rng = random.Random(config.seed)
    teach(config, (random_game(rng) for _ in range(8000)), words=WORDS, num_steps=1000)


def random_game(rng: random.Random) -> list[dict[str, str]]:
    """Return the messages of a game whose guesses are drawn from what is still possible, low ones more often."""
    environment, low, high = Guess(), 1, LARGEST
    messages = [{"role": "user", "content": environment.reset({"number": rng.randint(low, high)}, seed=0)}]
    while True:
        guess = min(rng.randint(low, high) for _ in range(2 if rng.random() < TIMID else 1))
        step = environment.step(str(guess))
        messages.append({"role": "assistant", "content": str(guess)})
        if step.done:
            return messages
        messages.append({"role": "user", "content": str(step.observation)})
        low, high = (guess + 1, high) if step.observation == "higher" else (low, guess - 1)

"""Tic-tac-toe against an opponent that plays at random."""

import random
from collections.abc import Mapping
from typing import Any

import rlpipe
from rlpipe.quickstart import teach

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
EMPTY = "." * 9


class TicTacToe(rlpipe.Environment):
    """Play ``X``, and move first; an action is a field, 1 to 9.

    A win gives 1; a move that is not allowed ends the game and costs 1.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._board, self._opponent = EMPTY, random.Random(seed)
        return self._board

    def step(self, action: str) -> rlpipe.Step:
        if action not in "123456789" or len(action) != 1 or self._board[int(action) - 1] != ".":
            return rlpipe.Step("not allowed", reward=-1.0, done=True)
        self._board = marked(self._board, int(action) - 1, "X")
        if has_won(self._board, "X"):
            return rlpipe.Step(self._board, reward=1.0, done=True)
        free = free_fields(self._board)
        if free:
            self._board = marked(self._board, self._opponent.choice(free), "O")
        return rlpipe.Step(self._board, done=len(free) < 2 or has_won(self._board, "O"))


def marked(board: str, field: int, mark: str) -> str:
    return board[:field] + mark + board[field + 1 :]


def free_fields(board: str) -> list[int]:
    return [field for field, mark in enumerate(board) if mark == "."]


def has_won(board: str, mark: str) -> bool:
    return any(all(board[field] == mark for field in line) for line in LINES)


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy on games of random moves that are allowed; ``model.prepare`` of the example."""
    rng = random.Random(config.seed)
    teach(config, (random_game(rng) for _ in range(8000)))


def random_game(rng: random.Random) -> list[dict[str, str]]:
    """Return the messages of a game in which both sides move at random."""
    game = TicTacToe()
    messages = [{"role": "user", "content": game.reset({}, seed=rng.randrange(2**31))}]
    while True:
        action = str(rng.choice(free_fields(messages[-1]["content"])) + 1)
        step = game.step(action)
        messages.append({"role": "assistant", "content": action})
        if step.done:
            return messages
        messages.append({"role": "user", "content": str(step.observation)})

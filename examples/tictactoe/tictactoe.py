"""Tic-tac-toe against an opponent that plays at random."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import rlpipe
from rlpipe.quickstart import teach

LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]
EMPTY = "." * 9


class TicTacToe(rlpipe.Environment):
    """Play ``X``, and move first; an action is a field, 1 to 9.

    A win gives 1; a move that is not allowed ends the game, which the reward function ``illegal`` counts.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        self._board, self._opponent = EMPTY, random.Random(seed)
        return self._board

    def step(self, action: str) -> rlpipe.Step:
        if not is_allowed(action, self._board):
            return rlpipe.Step("not allowed", done=True)
        self._board = marked(self._board, int(action) - 1, "X")
        if has_won(self._board, "X"):
            return rlpipe.Step(self._board, reward=1.0, done=True)
        free = free_fields(self._board)
        if free:
            self._board = marked(self._board, self._opponent.choice(free), "O")
        return rlpipe.Step(self._board, done=len(free) < 2 or has_won(self._board, "O"))


def is_allowed(action: str, board: str) -> bool:
    return len(action) == 1 and action in "123456789" and board[int(action) - 1] == "."


def illegal(completions: Sequence[Sequence[Mapping[str, Any]]], **_: Any) -> list[float]:
    """Return 1 for games that ended with a move that is not allowed: the last one, on the board before it."""
    ends = [[EMPTY, *(str(message["content"]) for message in completion)][-2:] for completion in completions]
    return [float(not is_allowed(action, board)) for board, action in ends]


def marked(board: str, field: int, mark: str) -> str:
    return board[:field] + mark + board[field + 1 :]


def free_fields(board: str) -> list[int]:
    return [field for field, mark in enumerate(board) if mark == "."]


def has_won(board: str, mark: str) -> bool:
    return any(all(board[field] == mark for field in line) for line in LINES)


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy on games of random moves that are allowed; ``model.prepare`` of the example."""
    rng = random.Random(config.seed)
    teach(config, (random_game(rng) for _ in range(8000)), num_steps=300)


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

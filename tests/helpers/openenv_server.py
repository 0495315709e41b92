"""Environments of the real OpenEnv, and their server: a number to guess, with actions of one field or of two.

Its packages are those of a folder in ``PYTHONPATH``. The address is the first line of the output.
"""

from __future__ import annotations

import os
import socket
import sys
from typing import Any

import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    message: str


class Number(Action):
    number: int
    is_last: bool = False


class Hint(Observation):
    text: str = ""


class Board(Observation):
    hint: str = ""
    left: int = 0


class GuessNumber(Environment[Any, Any, State]):
    SUPPORTS_CONCURRENT_SESSIONS = True
    num_open = 0

    def __init__(self) -> None:
        super().__init__()
        GuessNumber.num_open += 1

    def reset(self, seed: int | None = None, episode_id: str | None = None, number: int = 20, **_: Any) -> Any:
        self._number, self._left = number, 5
        return self._shown(f"1-32? (seed {seed}, open {GuessNumber.num_open})")

    def step(self, action: Any, timeout_s: float | None = None, **_: Any) -> Any:
        text = action.message if isinstance(action, Said) else str(action.number)
        if text == "break":
            raise ValueError("the board is gone")
        if text == "exit":
            os._exit(3)
        self._left -= 1
        is_right = text == str(self._number)
        return self._shown("right" if is_right else "wrong", reward=float(is_right), done=is_right)

    def _shown(self, text: str, **more: Any) -> Any:
        return Hint(text=text, **more) if sys.argv[1] == "text" else Board(hint=text, left=self._left, **more)

    @property
    def state(self) -> State:
        return State(step_count=5 - self._left)

    def close(self) -> None:
        GuessNumber.num_open -= 1


if __name__ == "__main__":
    kinds = (Said, Hint) if sys.argv[1] == "text" else (Number, Board)
    app = create_app(GuessNumber, *kinds, env_name="guess", max_concurrent_envs=int(sys.argv[2]))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(f"http://127.0.0.1:{listening.getsockname()[1]}", flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])

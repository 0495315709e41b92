"""Gymnasium's FrozenLake on random maps of 4×4 fields: the policy sees the map and its place, and names a direction."""

import json
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import rlpipe
from rlpipe.quickstart import teach

SIZE, MAX_MOVES = 4, 10
MOVES = {"left": 0, "down": 1, "right": 2, "up": 3}
"""Gymnasium's number of each direction."""
SHARE_OF_ICE = 0.7
STRAY, LOST_FROM = 0.5, 5
"""Share of the moves in the warm-up that are drawn at random, and how far from the start all of them are."""
LOST_MOVES = (*MOVES, "left", "up")
"""Moves that are drawn there: most of them lead away from the goal."""
NUM_WALKS = 4000


def show(env: Any, place: int) -> str:
    """Return the map, on which the player is ``P``, and below it the fields to its left, below, right and above.

    Beyond the border is its own field.
    """
    fields = [field.decode() for field in env.unwrapped.desc.flat]
    around = "".join(fields[neighbour(int(place), move)] for move in MOVES)
    fields[int(place)] = "P"
    lines = ["".join(fields[start : start + SIZE]) for start in range(0, SIZE * SIZE, SIZE)]
    return "\n".join([*lines, around])


def read(text: str, space: Any) -> int:
    """Return the number of the direction that the policy names."""
    if text not in MOVES:
        raise ValueError(f"{text[:10]!r} is not a direction")
    return MOVES[text]


FrozenLake = rlpipe.from_gymnasium(
    "FrozenLake-v1", show=show, read=read, is_slippery=False, max_episode_steps=MAX_MOVES, disable_env_checker=True
)


class Lake(FrozenLake):  # type: ignore[valid-type, misc]
    """FrozenLake whose reward is the share of the way that a move gains; a hole takes back all that was gained."""

    def reset(self, row: Mapping[str, Any], seed: int) -> str:
        observation = str(super().reset(row, seed))
        self._distances = distances([field.decode() for field in self.env.unwrapped.desc.flat])
        self._gained = 0.0
        return observation

    def step(self, action: str) -> rlpipe.Step:
        step = super().step(action)
        distance, before = self._distances.get(int(self.env.unwrapped.s)), self._gained
        self._gained = 0.0 if distance is None else 1 - distance / self._distances[0]
        return replace(step, reward=self._gained - before)


def warm_up(config: rlpipe.Config) -> None:
    """Train a policy on walks that often stray, over other maps; ``model.prepare`` of the example."""
    rng = random.Random(config.seed)
    rows = Path(str(config.data.path)).read_text().splitlines()
    training_maps = {"".join(json.loads(row)["make"]["desc"]) for row in rows}
    maps = (desc for desc in iter(lambda: random_map(rng), None) if "".join(desc) not in training_maps)
    teach(config, (stray_walk(next(maps), rng) for _ in range(NUM_WALKS)), words=[*MOVES], num_steps=450)


def random_map(rng: random.Random) -> list[str]:
    """Return a map from whose start a way leads to the goal."""
    while True:
        fields = ["F" if rng.random() < SHARE_OF_ICE else "H" for _ in range(SIZE * SIZE)]
        fields[0], fields[-1] = "S", "G"
        if 0 in distances(fields):
            return ["".join(fields[start : start + SIZE]) for start in range(0, SIZE * SIZE, SIZE)]


def stray_walk(desc: list[str], rng: random.Random) -> list[dict[str, str]]:
    """Return the messages of a walk towards the goal; some moves are random, and all of those near the goal."""
    lake, remaining, position = Lake(), distances("".join(desc)), 0
    messages = [{"role": "user", "content": str(lake.reset({"make": {"desc": desc}}, seed=0))}]
    while True:
        targets = {move: neighbour(position, move) for move in MOVES}
        choices = [move for move, field in targets.items() if remaining.get(field, SIZE * SIZE) < remaining[position]]
        if sum(divmod(position, SIZE)) >= LOST_FROM:
            choices = [*LOST_MOVES]
        elif rng.random() < STRAY:
            choices = [*MOVES]
        move = rng.choice(choices)
        step = lake.step(move)
        messages.append({"role": "assistant", "content": move})
        if step.done:
            return messages
        messages.append({"role": "user", "content": str(step.observation)})
        position = targets[move]


def distances(fields: list[str] | str) -> dict[int, int]:
    """Return the number of moves to the goal from each field that leads there."""
    goal = SIZE * SIZE - 1
    num_moves, waiting = {goal: 0}, deque([goal])
    while waiting:
        position = waiting.popleft()
        for field in (neighbour(position, move) for move in MOVES):
            if field not in num_moves and fields[field] != "H":
                num_moves[field] = num_moves[position] + 1
                waiting.append(field)
    return num_moves


def neighbour(place: int, move: str) -> int:
    """Return the field that a move leads to: the same one at the border."""
    row, column = divmod(place, SIZE)
    row = min(max(row + {"down": 1, "up": -1}.get(move, 0), 0), SIZE - 1)
    column = min(max(column + {"right": 1, "left": -1}.get(move, 0), 0), SIZE - 1)
    return row * SIZE + column

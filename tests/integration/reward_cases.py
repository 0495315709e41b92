"""Rewards as users write them, good and bad; imported by path in the scoring processes."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from rlpipe import RewardActor, RolloutGroup


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def digits(completions: list[Any], **columns: Any) -> list[float]:
    """The share of digits in the text, which a random policy gets right now and then."""
    texts = [text_of(completion) for completion in completions]
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]


def witness(completions: list[Any], rollouts: list[Any], folder: str, **columns: Any) -> list[float]:
    """Counts as nothing, but writes down which process scored, and with which versions the tokens were drawn."""
    seen = {
        "pid": os.getpid(),
        "group_id": rollouts[0].group_id,
        "masked": [rollout.loss_mask.tolist() for rollout in rollouts],
        "versions": [rollout.policy_versions.tolist() for rollout in rollouts],
    }
    with (Path(folder) / f"{os.getpid()}.jsonl").open("a") as file:
        file.write(json.dumps(seen) + "\n")
    return [0.0] * len(completions)


def misbehave(completions: list[Any], how: list[str], **columns: Any) -> Any:
    """Does what its row's column ``how`` says."""
    match how[0]:
        case "sleep":
            time.sleep(3600)
        case "die":
            os._exit(3)
        case "raise":
            raise RuntimeError("no such judge")
        case "nan":
            return [float("nan")] * len(completions)
        case "short":
            return [1.0]
    return [float(index) for index in range(len(completions))]


async def patient(completions: list[Any], **columns: Any) -> list[float]:
    import asyncio

    await asyncio.sleep(0.01)
    return [0.5] * len(completions)


class Length(RewardActor):
    """A reward with state: how long the longest text was that its process has seen."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._longest = 1

    def setup(self) -> None:
        (self._folder / f"{os.getpid()}.setup").touch()

    def score(self, group: RolloutGroup) -> list[float | None]:
        lengths = [len(text) for text in self.texts(group)]
        self._longest = max(self._longest, *lengths)
        (self._folder / f"{os.getpid()}.scored").touch()
        return [length / self._longest for length in lengths]


def always_raises(completions: list[Any], **columns: Any) -> list[float]:
    raise ValueError("never works")


def slow_digits(completions: list[Any], **columns: Any) -> list[float]:
    """Slow enough that a run can be stopped between two of its steps."""
    time.sleep(0.1)
    return digits(completions)


def slower_digits(completions: list[Any], **columns: Any) -> list[float]:
    """Slow enough that an engine can be stopped while it has nothing to do but to wait for the next weights."""
    time.sleep(1.0)
    return digits(completions)

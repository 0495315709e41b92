"""Good and bad rewards as users write them, imported by path in the scoring processes."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlpipe import RewardActor, RolloutGroup
from rlpipe.scoring.http import together
from rlpipe.scoring.judge import Judge


def text_of(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[0]["content"]


def digits(completions: list[Any], **columns: Any) -> list[float]:
    """Return the share of digits in each text, which is nonzero now and then for a random policy."""
    texts = [text_of(completion) for completion in completions]
    return [sum(character.isdigit() for character in text) / max(len(text), 1) for text in texts]


def witness(completions: list[Any], rollouts: list[Any], folder: str, **columns: Any) -> list[float]:
    """Return 0, and record which process scored and which versions sampled the tokens."""
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
    """Misbehave in the way that the row's column ``how`` names, with a child whose id goes to the file ``child``."""
    if child := columns.get("child"):
        Path(child[0]).write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
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
    """A reward with state: the length of each text, relative to the longest that its process has seen."""

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


def nothing(completions: list[Any], **columns: Any) -> list[float]:
    return [0.0] * len(completions)


def first_of_group(completions: list[Any], **columns: Any) -> list[float]:
    """Return 1 for the first of a prompt's completions, whatever is in it, and 0 for the others."""
    return [float(index == 0) for index in range(len(completions))]


def variety(completions: list[Any], **columns: Any) -> list[float]:
    """Return the share of different characters in each text, which is high for a random policy."""
    texts = [text_of(completion) for completion in completions]
    return [len(set(text)) / max(len(text), 1) for text in texts]


def as_asked(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Return the share of digits, and of other characters for rows whose answer is not a number."""
    shares = zip(digits(completions), answer, strict=True)
    return [share if expected.isdecimal() else 1 - share for share, expected in shares]


def huge(completions: list[Any], **columns: Any) -> list[float]:
    """Return numbers whose gradients have no norm in float32."""
    return [1e30 * share for share in digits(completions)]


def length(completions: list[Any], **columns: Any) -> list[float]:
    return [len(text_of(completion)) / 32 for completion in completions]


def raises_for_some(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    """Return ``digits``; raise for every third of the prompts ``n+(n+3)=``."""
    if int(answer[0]) % 3 == 0:
        raise ValueError("no such answer")
    return digits(completions)


def always_raises(completions: list[Any], **columns: Any) -> list[float]:
    raise ValueError("never works")


def slow_digits(completions: list[Any], **columns: Any) -> list[float]:
    """Return ``digits`` slowly enough that a run can be stopped between two of its steps."""
    time.sleep(0.1)
    return digits(completions)


def slower_digits(completions: list[Any], **columns: Any) -> list[float]:
    """Return ``digits`` so slowly that an engine can be stopped while it is idle, waiting for the next weights."""
    time.sleep(1.0)
    return digits(completions)


class Napping(RewardActor):
    """A slow reward that records how many groups each process has scored per call."""

    def __init__(self, folder: str, seconds: float = 0.2) -> None:
        self._folder, self._seconds = Path(folder), seconds

    def score(self, group: RolloutGroup) -> list[float | None]:
        return self.score_groups([group])[0]

    def score_groups(self, groups: Sequence[RolloutGroup]) -> list[list[float | None]]:
        with (self._folder / f"{os.getpid()}.batches").open("a") as file:
            file.write(f"{len(groups)}\n")
        time.sleep(self._seconds)
        return [[float(len(text)) for text in self.texts(group)] for group in groups]


class Ruined(RewardActor):
    def setup(self) -> None:
        raise OSError("no such model")

    def score(self, group: RolloutGroup) -> list[float | None]:
        raise AssertionError("it was never set up")


def record_groups(groups: Sequence[RolloutGroup]) -> None:
    """Append the groups' rewards to a file in the driver's working directory, as a hook."""
    with Path("hook.txt").open("a") as file:
        for group in groups:
            file.write(f"{group.group_id} {[rollout.reward for rollout in group]}\n")


def fail_hook(groups: Sequence[RolloutGroup]) -> None:
    """Raise, die or hang, as a bad hook."""
    match groups[0].group_id % 4:
        case 0:
            raise RuntimeError("no such table")
        case 1:
            os._exit(3)
    time.sleep(3600)


class EngineJudge(Judge):
    """A judge that accepts any answer as a mark, and records its questions and marks.

    A random policy answers without numbers. While the judge waits, a file of its process ends in ``.asking``.
    """

    def __init__(self, folder: str, **options: Any) -> None:
        super().__init__(template="{{ prompt }} {{ completion }}", max_tokens=6, **options)
        self._folder = Path(folder)

    async def score(self, group: RolloutGroup) -> list[float | None]:  # type: ignore[override]
        texts, asking = self.texts(group), self._folder / f"{os.getpid()}.{group.group_id}.asking"
        asking.touch()
        values = await together(self.ask(group, completion=text) for text in texts)
        asking.unlink()
        with (self._folder / "judged.jsonl").open("a") as file:
            for text, value in zip(texts, values, strict=True):
                file.write(json.dumps([group.prompt.prompt, text, value]) + "\n")
        return list(values)

    def parse(self, answer: str) -> float:
        return sum(map(ord, answer)) / 1000


def held_digits(completions: list[Any], hold: str, **columns: Any) -> list[float]:
    """Return ``digits`` as soon as there is no file ``hold``."""
    while Path(hold).exists():
        time.sleep(0.05)
    return digits(completions)


def digits_but_for_the_end(
    completions: list[Any], trainer_state: Any, hangs: Sequence[bool] = (), **columns: Any
) -> list[float]:
    """Return ``digits``; for rows with the column ``hangs``, only before anything is trained."""
    if hangs and trainer_state.global_step > 0:
        time.sleep(10_000)
    return digits(completions)

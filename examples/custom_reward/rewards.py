"""The rewards of the example: a function that reads a data column, and an actor that remembers earlier texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import rlpipe


def alphabet(completions: Sequence[list[dict[str, Any]]], allowed: Sequence[str]) -> list[float]:
    """Return the share of a completion's characters that the row's column ``allowed`` lists; 0 for an empty one."""
    texts = [completion[0]["content"] for completion in completions]
    return [share_of(characters, text) for text, characters in zip(texts, allowed, strict=True)]


def share_of(characters: str, text: str) -> float:
    return sum(character in characters for character in text) / max(len(text), 1)


class Novelty(rlpipe.RewardActor):
    """A reward of 1 for a text that is new in the run, and of 1/n for its n-th occurrence.

    The count is kept in the actor's process, so the reward needs a single process.
    """

    def setup(self) -> None:
        self.times_written: Counter[str] = Counter()

    def score(self, group: rlpipe.RolloutGroup) -> list[float | None]:
        return [self.first_time(text) for text in self.texts(group)]

    def first_time(self, text: str) -> float:
        self.times_written[text] += 1
        return 1 / self.times_written[text]

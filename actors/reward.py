"""The scoring actor: one process of a pool that scores groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpipe.configs.schema import ModelConfig, RewardConfig
from rlpipe.data.chat import load_tokenizer
from rlpipe.scoring.scorer import GroupScores, Scorer
from rlpipe.types import RolloutGroup


class ScoringActor:
    """Remote shell of ``Scorer``. Scoring runs on the process's main thread, so that rewards may use signals."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scorer: Scorer | None = None

    def start(
        self, rewards: Mapping[str, RewardConfig], callables: Mapping[str, Callable[..., Any]], model: ModelConfig
    ) -> None:
        """Imports the rewards and sets up their actors."""
        self._scorer = Scorer(rewards, load_tokenizer(model), callables)

    def ping(self) -> str:
        """Answers as soon as the process runs."""
        return self._name

    def score(self, groups: Sequence[RolloutGroup], indices: Sequence[int]) -> list[GroupScores]:
        """Scores ``groups[indices]``."""
        assert self._scorer is not None, "start() comes first"
        return self._scorer.score([groups[index] for index in indices])

"""The scoring actor: one process of a pool that scores groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlpipe.actors.engine_handles import Engines, open_chat
from rlpipe.common.imports import enter_folder
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.scoring_config import RewardConfig
from rlpipe.data.render.tokenizer import load_tokenizer
from rlpipe.scoring.memory import MemoryLimit
from rlpipe.scoring.process_reaper import start_keeper
from rlpipe.scoring.scorer import GroupScores, Scorer
from rlpipe.types import RolloutGroup


class ScoringActor:
    """Ray actor around a ``Scorer``; scoring runs on the process's main thread, so that rewards may use signals."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._scorer: Scorer | None = None

    def start(
        self,
        rewards: Mapping[str, RewardConfig],
        callables: Mapping[str, Callable[..., Any]],
        model: ModelConfig,
        num_steps: int,
        folder: str,
        memory: MemoryLimit | None = None,
        engines: Engines | None = None,
    ) -> None:
        """Import the rewards and set up their actors; ``folder`` is the driver's working directory."""
        enter_folder(folder)
        start_keeper()
        tokenizer = load_tokenizer(model)
        self._scorer = Scorer(rewards, tokenizer, callables, num_steps, open_chat(engines, tokenizer, model))
        if memory is not None:
            self._scorer.limit_memory(memory)

    def score(self, groups: Sequence[RolloutGroup], indices: Sequence[int]) -> list[GroupScores]:
        """Score those of ``groups[indices]`` that the engine could sample."""
        assert self._scorer is not None, "start() comes first"
        return self._scorer.score([groups[index] for index in indices if groups[index].failure is None])

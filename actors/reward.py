"""Actor that scores groups with reward functions, and the handles by which rewards reach the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from rlpipe.actors.remote import describe_failure
from rlpipe.actors.rollout import QUESTIONS
from rlpipe.common.imports import enter_folder
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.configs.schema.rollout_config import RewardConfig
from rlpipe.data.render.processor import load_tokenizer
from rlpipe.errors import RunError
from rlpipe.scoring.engine_chat import EngineChat, EngineSilent
from rlpipe.scoring.processes import MemoryLimit, start_reaper
from rlpipe.scoring.scorer import GroupScores, Scorer
from rlpipe.types import GroupRequest, RolloutGroup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(kw_only=True, frozen=True)
class Engines:
    """Actor handles and chat template options that a process needs to query the run's engines."""

    actors: Mapping[str, ActorHandle]
    chat_template_kwargs: Mapping[str, Any]

    async def ask(self, name: str, request: GroupRequest, timeout_s: float) -> RolloutGroup:
        """Return an engine's group for a request; raise ``EngineSilent`` if it is dead, late, or not restarted yet."""
        call: Any = self.actors[name].ask.options(concurrency_group=QUESTIONS)
        try:
            group: RolloutGroup = await call.remote(request, timeout_s)
        except RayTaskError as error:
            if isinstance(error.cause, RunError):
                raise EngineSilent(str(error.cause)) from None
            raise
        except RayError as error:
            raise EngineSilent(f"engine {name}: {describe_failure(error)}") from None
        return group


def open_chat(engines: Engines | None, tokenizer: PreTrainedTokenizerBase, model: ModelConfig) -> EngineChat | None:
    """Return a chat interface to the engines, or None if there are no engines."""
    if engines is None:
        return None
    return EngineChat(
        engines.actors, engines.ask, tokenizer=tokenizer, model=model, chat_template_kwargs=engines.chat_template_kwargs
    )


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
        start_reaper()
        tokenizer = load_tokenizer(model)
        self._scorer = Scorer(rewards, tokenizer, callables, num_steps, open_chat(engines, tokenizer, model))
        if memory is not None:
            self._scorer.limit_memory(memory)

    def score(self, groups: Sequence[RolloutGroup], indices: Sequence[int]) -> list[GroupScores]:
        """Score those of ``groups[indices]`` that the engine could sample."""
        assert self._scorer is not None, "start() comes first"
        return self._scorer.score([groups[index] for index in indices if groups[index].failure is None])

"""Handles by which scorers query the run's rollout actors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from rlpipe.actors.remote import describe_failure
from rlpipe.actors.rollout import QUESTIONS
from rlpipe.configs.schema.model_config import ModelConfig
from rlpipe.errors import RunError
from rlpipe.scoring.engine_chat import EngineChat, EngineSilent
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
        engines.actors,
        engines.ask,
        tokenizer=tokenizer,
        model=model,
        chat_template_kwargs=engines.chat_template_kwargs,
    )

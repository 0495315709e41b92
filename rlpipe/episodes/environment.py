"""The interface of environments, which users write: they answer the policy, and offer it tools."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from rlpipe.episodes.tools import FunctionTool, Observation, Step, Tool
from rlpipe.types import ChatMessages

Function = TypeVar("Function", bound=Callable[..., Any])
MARK = "_rlpipe_tool"


class Environment(ABC):
    """A task with several turns; one object serves one episode.

    Methods may be coroutines; others run in threads, one after the other, so that they may block.

    Methods marked by ``tool`` are offered to the policy; a turn that calls tools is answered by their results, and not
    given to ``step``. A tool that returns a ``Step`` gives the turn its reward, and may end the episode. An episode's
    reward is the sum of its steps' rewards and the final one.
    """

    @abstractmethod
    def reset(self, row: Mapping[str, Any], seed: int) -> Observation | Awaitable[Observation]:
        """Begin an episode on a row of the data, and return what the policy sees first."""

    def step(self, action: str) -> Step | Awaitable[Step]:
        """Answer a turn without tool calls; by default it ends the episode."""
        return Step(done=True)

    def final_reward(self) -> float | Awaitable[float]:
        """Return a reward that is added at the end of an episode, also if a limit has truncated it."""
        return 0.0

    def tools(self) -> Sequence[Tool]:
        """Return the tools of the episode: by default the methods marked by ``tool``, in the order of the class."""
        kinds = reversed(type(self).__mro__)
        names = [name for kind in kinds for name, own in vars(kind).items() if _is_tool(own)]
        return [FunctionTool(getattr(self, name), name=name) for name in dict.fromkeys(names)]

    def close(self) -> Awaitable[None] | None:
        """Free what the episode holds; called once, however the episode ends."""
        return None


def tool(function: Function) -> Function:
    """Mark a method of an environment as a tool; its schema comes from its signature and docstring."""
    setattr(function, MARK, True)
    return function


def _is_tool(own: Any) -> bool:
    return inspect.isfunction(own) and getattr(own, MARK, False)


def as_messages(observation: Observation) -> ChatMessages:
    """Return an observation as chat messages; a text is a user's."""
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else list(observation)
